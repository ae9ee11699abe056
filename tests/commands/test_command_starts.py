"""How a command begins: help without torch, unknown keys with what is meant, Ctrl-C at once."""

from __future__ import annotations

import os
import re
import sys
import tomllib

import pytest
import yaml
from command_runs import ROOT, started


def test_help_shows_the_settings_that_the_arguments_lead_to(command):
    shown = command("--help", "labels=sinkhorn", "epsilon=0.25", "hydra.help.template='$X $CONFIG'")
    # A template is taken as it is.
    assert shown.out.startswith("$X ")
    assert "method: sinkhorn" in shown.out
    assert "epsilon: 0.25" in shown.out
    # References stay unless their values are asked for.
    assert "${seed}" in shown.out
    assert "${seed}" not in command("--help", "--resolve", "hydra.help.template='$CONFIG'").out


# What is given, and how the sentence begins, or what it holds after dots.
REFUSED = r"""
    sorce=mnist -> there is no setting sorce (did you mean source?)
    tolerance=1 -> there is no setting tolerance (did you mean solver.tolerance?)
    solver.seed=1 -> there is no setting solver.seed (did you mean seed?)
    labels=gausian -> labels has no choice 'gausian' (did you mean gaussian?); choose one
    source.path=a.npz -> this choice of source has no source.path; choose source=arrays or source=hu
    solver.scaling=0.5 -> this choice of solver has no solver.scaling; choose solver=geoml
    +labels=none -> labels has a choice already; write labels=none, without the +
    hydra.runn.dir=x -> there is no setting hydra.runn (did you mean hydra.run?)
    epsilon -> 'epsilon' sets nothing; write KEY=VALUE
    epsilon = 0.2 -> cannot read 'epsilon = 0.2'; write epsilon=0.2, without spaces
    +lambda_x=0.2 -> lambda_x is a setting already; write lambda_x=VALUE, without the +
    epsilon=[1 -> ...or where they and other signs belong to a text, write epsilon='[1'
    data_root=it's\ -> ...belong to a text, write data_root='it\'s\\'
    epsilon=0,2 -> ...a list as epsilon=[0,2], a text as epsilon='0,2'
    a b=1 -> ...'a b' is no key
    =1 -> ...Hydra ends on
    ~epsilon -> no setting can be deleted; leave ~epsilon out
    solver=[1] -> solver takes one choice, got [1]; write solver=CHOICE with one of conver
    ++solver=geomloss -> solver has a choice already; write solver=geomloss, without the +
    labels=exact,means -> labels takes one choice, got exact,means; write labels=CHOICE
    hydra.run.dir='\${x}' -> ...Hydra takes ${ in a folder's name for a reference
    hydra.hydra_logging={version:7} -> ...Unsupported version: 7
    --nosuch -> ...unrecognized arguments: --nosuch; --help
    --resolve -> ...--resolve flag can only be used
    epsilon=${oc.env:NO_SUCH} -> ...epsilon=${oc.env:NO_SUCH} has no value: Environment variab
    epsilon=${foo} -> ...epsilon=${foo} has no value: there is no setting foo; write epsilon=
    epsilon=${epsilon} -> ...epsilon=${epsilon} has no value: it refers to itself
    epsilon=${nosuch:1} -> ...Unsupported interpolation type nosuch
    source.classes=[${foo}] -> ...source.classes[0]=${foo} has no value
    epsilon=${oc.env:PATH} -> ...epsilon must be a number or null, got '${oc.env:PATH}'
    log_level=${foo} -> ...log_level=${foo} has no value
    hydra.run.dir=${foo} -> ...hydra.run.dir=${foo} has no value
    hydra.run.dir='???' -> ...hydra.run.dir must be given: hydra.run.dir=DIR
"""


def _rows():
    for number, line in enumerate(REFUSED.strip().splitlines()):
        argument, _, sentence = line.strip().partition(" -> ")
        marks = pytest.mark.slow if number else ()
        yield pytest.param(argument, sentence, marks=marks, id=argument[:30])
    for argument, sentence in (
        (" epsilon=0.2", "cannot read ' epsilon=0.2'; write epsilon=0.2, without spaces"),
        ("epsilon=1\n", "...it holds a line end or another control character"),
        ("", "'' sets nothing; write KEY=VALUE"),
    ):
        yield pytest.param(argument, sentence, marks=pytest.mark.slow, id=repr(argument))


@pytest.mark.parametrize(("argument", "sentence"), [*_rows()])
def test_what_hydra_cannot_take_is_one_sentence_with_what_is_meant(
    command, folder, argument, sentence
):
    ended = command(argument)
    assert ended.code == 2
    beginning = 0 if sentence.startswith("...") else ended.error.index(sentence)
    assert beginning == 0
    assert sentence.removeprefix("...") in ended.error
    assert len(ended.err.splitlines()) == 1
    assert not re.search("LexerNoViableAlt|append", ended.err)
    assert not (folder / "None").exists()


@pytest.mark.slow
def test_the_way_out_of_an_unreadable_text_keeps_it(command):
    """What is written of quotes and backslashes is what Hydra then reads."""
    text = "it's\\a [~] \\'"
    way_out = command(f"data_root={text}").error.partition("write ")[2].partition(", all of it")[0]
    assert yaml.safe_load(command("--cfg=job", way_out).out)["data_root"] == text
    assert command("-m", "sorce=mnist").error.startswith("there is no setting sorce (did you mean")


RANKS = {"WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE must be an integer of at least 1, got 'abc'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK must be an integer from 0 to 1, got '2'"),
        ({**RANKS, "MASTER_PORT": "1"}, "MASTER_ADDR must be the name or address of the machine"),
        ({**RANKS, "LOCAL_RANK": "x"}, "LOCAL_RANK must be an integer from 0 to 1, got 'x'"),
    ],
)
def test_variables_of_torchrun_that_mean_nothing_are_named(
    command, monkeypatch, variables, sentence
):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = command()
    assert ended.code == 2
    assert sentence in ended.error
    assert "unset WORLD_SIZE" in ended.error


def test_a_working_directory_that_is_gone_is_one_sentence(command, folder, monkeypatch):
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    ended = command()
    assert ended.code == 2
    assert "the working directory is not to be had (No such file or directory)" in ended.error


@pytest.mark.slow
def test_the_whole_error_of_hydra_is_there_for_who_asks(command, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    ended = command("foo=1")
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert "Could not override 'foo'" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(("imported", "name"), [("hydra", "distance"), ("torch", "flow")])
def test_ctrl_c_during_imports_is_130_without_a_traceback(folder, imported, name):
    """A module that interrupts the process that imports it stands in for the one named.

    It then waits: the signal may arrive at another thread, and some time later.
    """
    (folder / imported).mkdir()
    (folder / imported / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    path = os.pathsep.join([str(folder), *sys.path])
    ended = started(folder, "-m", f"otdd_flash.{name}", "hydra.run.dir=run", PYTHONPATH=path)
    assert ended.returncode == 130
    *progress, last = ended.stderr.splitlines()
    assert last == "interrupted; what had been written is whole"
    # Hydra is imported before there is anything to say of it.
    assert [re.sub(r"\d+", "N", line) for line in progress] == (
        ["progress: N s, importing torch"] if imported == "torch" else []
    )


@pytest.mark.parametrize(("given", "kept"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_while_they_wait_unless_asked_otherwise(ended, monkeypatch, given, kept):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert ended(lambda: None).code == 0
    assert os.environ["OMP_WAIT_POLICY"] == kept


SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]


def _script(folder, name):
    """A console command as installers write it."""
    module, _, function = SCRIPTS[name].partition(":")
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["otdd-flow", "otdd-mix", "otdd-nearest", "otdd-study"])
def test_help_comes_without_torch_and_names_its_command(folder, name):
    shown = started(folder, "-X", "importtime", _script(folder, name), "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"\n  {name} [KEY=VALUE ...]" in shown.stdout
    assert "python -m" not in shown.stdout
    assert not re.search(r"\| +(torch|numpy|rich|matplotlib)$", shown.stderr, re.M)


@pytest.mark.slow
def test_a_console_command_in_a_process_of_its_own(folder):
    """What it imports, says of that, and finds in its environment.

    Functions of the working directory are found when they are named, and nothing else there. It
    draws whatever a notebook's environment names: its backend, and a style that needs LaTeX.
    """
    (folder / "features.py").write_text(
        "import helper\n\ndef embed(x):\n    return helper.TWICE * x\n"
    )
    (folder / "helper.py").write_text("TWICE = 2.0\n")
    for name in ("torch", "json", "typing", "datasets", "rich", "decimal", "hydra"):
        (folder / f"{name}.py").write_text("open('imported', 'a').write(__name__)\n")
    (folder / "hydra_plugins").mkdir()
    (folder / "hydra_plugins" / "evil.py").write_text("open('imported', 'a').write(__name__)\n")
    (folder / "matplotlibrc").write_text("text.usetex: True")
    # The encoding of a locale that has few signs.
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    variables["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    data = ["source=arrays", "source.path=a.npz", "target=arrays", "target.path=b.npz"]
    named = ["extractor=callable", "extractor.path=features:embed", "cache_dir=null"]
    late = ["solver.max_iterations=1", "solver.require_convergence=true", "solver.tolerance=1e-4"]
    ended = started(
        folder,
        _script(folder, "otdd-distance"),
        *data,
        *named,
        *late,
        "hydra.run.dir=run",
        **variables,
    )
    assert ended.returncode == 3
    assert "a -> b" in ended.stdout
    assert re.search(r"\(import \d", ended.stdout)
    lines = ended.stderr.splitlines()
    assert re.fullmatch(r"progress: \d+ s, importing torch", lines[0])
    assert re.fullmatch(r"progress: \d+ s, importing scipy and otdd_flash", lines[1])
    # On a busy machine there are others, of what takes more than a minute.
    stages = iter([re.sub(r".* s, ", "", line) for line in lines[2:]])
    for stage in ("loading source: arrays", "embedding target: b", "comparing", "drawing"):
        assert stage in stages, lines
    assert len([*(folder / "run").glob("*.png")]) == 3
    assert not (folder / "imported").exists()
