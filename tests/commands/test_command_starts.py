"""How a command begins: help without torch, unknown keys with what is meant, Ctrl-C at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HELP = """
import sys
from otdd_flash.{name} import main
from otdd_flash.commands.start import run_command
sys.argv = ["command", {flag!r}]
try:
    run_command(main)
finally:
    print(sorted({{"torch", "numpy", "matplotlib", "rich"}} & {{*sys.modules}}))
"""


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["distance", "flow"])
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_comes_without_torch(name, flag):
    shown = subprocess.run(
        [sys.executable, "-c", HELP.format(name=name, flag=flag)],
        capture_output=True,
        text=True,
        check=False,
    )
    *text, modules = shown.stdout.splitlines()
    assert modules == "[]"
    assert shown.returncode == 0, shown.stderr
    assert (f"python -m otdd_flash.{name}" in "".join(text)) == (flag == "--help")


def test_help_shows_the_settings_that_the_arguments_lead_to(command):
    shown = command("--help", "labels=sinkhorn", "epsilon=0.25").out
    assert "method: sinkhorn" in shown
    assert "epsilon: 0.25" in shown


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("sorce=mnist", "there is no setting sorce (did you mean source?)"),
        ("source.splt=test", "there is no setting source.splt (did you mean source.split?)"),
        ("tolerance=1", "there is no setting tolerance (did you mean solver.tolerance?)"),
        ("solver.tol=1", "there is no setting solver.tol (did you mean solver.tolerance?)"),
        ("labels=gausian", "labels has no choice 'gausian' (did you mean gaussian?); choose one"),
        (
            "source.path=a.npz",
            "this choice of source has no source.path; choose source=arrays or source=huggingface",
        ),
        ("solver.scaling=0.5", "this choice of solver has no solver.scaling; choose solver=geoml"),
        ("source.pth=a.npz", "there is no setting source.pth; --help explains all of them"),
        ("runtime.device=cpu", "there is no setting runtime; --help explains all of them"),
        ("nothing_like_it=1", "there is no setting nothing_like_it; --help explains all of them"),
        ("+labels=none", "labels has a choice already; write labels=CHOICE, without the +"),
        ("hydra.runn.dir=x", "there is no setting hydra.runn (did you mean hydra.run?)"),
        ("epsilon", "'epsilon' sets nothing; write KEY=VALUE"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("-m",)])
def test_an_unknown_key_is_told_with_what_is_meant(command, wrong, meant, flags):
    ended = command(*flags, wrong)
    assert ended.code == 2
    assert ended.error.startswith(meant)
    assert "append" not in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("key", ["epsilom", "solver.tolerence"])
def test_an_added_key_is_told_with_what_is_meant(command, key):
    ended = command(f"+{key}=1")
    assert ended.code == 2
    assert ended.error.startswith(f"there is no setting {key} (did you mean ")


def test_the_whole_error_of_hydra_is_there_for_who_asks(command, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    ended = command("foo=1")
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert "Could not override 'foo'" in ended.err


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("imported", ["hydra", "torch"])
@pytest.mark.parametrize("name", ["distance", "flow"])
def test_ctrl_c_during_imports_is_130_without_a_traceback(folder, imported, name):
    """A module that interrupts the process that imports it stands in for the one named.

    It then waits: the signal may arrive at another thread, and some time later.
    """
    (folder / imported).mkdir()
    (folder / imported / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", f"otdd_flash.{name}", "hydra.run.dir=run"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    assert ended.returncode == 130
    assert ended.stderr == "interrupted; what had been written is whole\n"
