"""Output folders: no two runs share one, and no result is replaced unasked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from otdd_flash.commands.outcome import LOCK_FILE, claim, claimed
from otdd_flash.commands.start import at_the_end
from otdd_flash.errors import InputError
from otdd_flash.files import atomic as locks

KEEP = "overwrite=false"

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(autouse=True)
def unclaimed():
    yield
    at_the_end.close()


def results(folder):
    return sorted(Path(folder).rglob("result.json"))


@pytest.mark.slow
def test_folders_are_named_by_microsecond_and_process(composed):
    for name in ("distance", "flow", "study", "nearest", "mix"):
        node = composed(name=name, return_hydra_config=True).hydra
        for kind in ("run", "sweep"):
            text = node._get_node(kind)._get_node("dir")._value()
            assert "%f" in text
            assert "${process:}" in text


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-m",)])
def test_a_folder_with_a_result_is_refused_before_anything_is_written(command, read, flags):
    if not flags:
        # After a failure a run may be repeated in its folder.
        assert command("epsilon=-1", KEEP).code == 2
    assert command(*flags, "epsilon=1", KEEP, "report=none").code == 0
    folder = Path("sweep" if flags else "run")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    ended = command(*flags, "epsilon=2", KEEP)
    assert ended.code == 2
    assert f"={folder} holds a result already" in ended.error
    assert "overwrite=true" in ended.error
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert command(*flags, "epsilon=2", "overwrite=true", "report=none").code == 0
    if flags:
        # Nor does one job replace another's.
        same = ("hydra.sweep.subdir=same", "hydra.sweep.dir=other")
        ended = command(*flags, "epsilon=0.1,0.3", *same, KEEP, "report=none")
        assert ended.code == 2
        assert "hydra.sweep.subdir=" in ended.err
        assert read("other/same/result.json")["epsilon"] == 0.1


@pytest.mark.slow
def test_a_folder_that_a_living_process_holds_is_refused(command):
    holder = locks.lock(_made("run") / LOCK_FILE)
    for setting in (KEEP, "overwrite=true"):
        ended = command(setting)
        assert ended.code == 2
        assert ended.error.startswith("hydra.run.dir=run is in use by another run")
        assert [path.name for path in Path("run").iterdir()] == [LOCK_FILE]
    # Its lock ends with it, whether or not it could remove the file.
    os.close(holder)
    assert command(KEEP, "report=none").code == 0
    assert not (Path("run") / LOCK_FILE).exists()


def test_the_lock_of_a_killed_process_does_not_block(tmp_path):
    program = (
        "import os, signal\nfrom pathlib import Path\n"
        "from otdd_flash.commands.outcome import claim\n"
        "claim(Path('run'), 'hydra.run.dir', replace=False)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "run" / LOCK_FILE).exists()
    claim(Path("run"), "hydra.run.dir", replace=False)


def test_a_lock_on_a_file_that_was_removed_keeps_nobody_out(tmp_path, monkeypatch):
    """Between opening and locking, the last holder may remove the file."""
    path, taken = tmp_path / LOCK_FILE, locks._taken
    removals = iter([path.unlink])

    def raced(descriptor):
        next(removals, lambda: None)()
        return taken(descriptor)

    monkeypatch.setattr(locks, "_taken", raced)
    held = locks.lock(path)
    assert held is not None
    assert locks.lock(path) is None
    os.close(held)


@pytest.mark.parametrize("file", ["result.safetensors", "checkpoint.json"])
def test_other_things_worth_keeping_are_kept(file):
    (_made("run") / file).touch()
    with pytest.raises(InputError, match=file) as refused:
        claim(Path("run"), "hydra.run.dir", replace=False)
    assert ("flow.resume=true" in str(refused.value)) == (file == "checkpoint.json")
    assert "overwrite=true" in str(refused.value)
    claim(Path("run"), "hydra.run.dir", replace=True)


def _made(folder):
    Path(folder).mkdir()
    return Path(folder)


@pytest.mark.slow
def test_a_run_folder_in_the_home_folder_is_there_and_not_beside(
    command, folder, tmp_path_factory, monkeypatch
):
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    before = {entry.name for entry in folder.iterdir()}
    given = ("cache_dir=null", "report=none", "seed=1", "++seed=2")
    twice = command("hydra.run.dir=~/x", *given)
    assert twice.code == 0
    assert "notice: seed is given 2 times: seed=2, the last one, is taken" in twice.err
    assert results(home / "x")
    # Nor is there a folder of a cache that is null.
    assert {entry.name for entry in folder.iterdir()} == before
    for argument in ("hydra.run.dir=", "cache_dir=''", "data_root=''", "source.path=''"):
        assert command(argument).code == 2, argument


def test_a_claim_within_a_claim_ends_with_the_outer_one():
    with claimed(Path("run"), "hydra.run.dir", replace=False):
        with claimed(Path("run"), "hydra.run.dir", replace=False):
            assert (Path("run") / LOCK_FILE).exists()
        assert (Path("run") / LOCK_FILE).exists()
    assert not (Path("run") / LOCK_FILE).exists()
