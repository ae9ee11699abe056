"""What commands run: their own code and what the user names, not what lies beside the data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from command_runs import ROOT, started

from otdd_flash.distance import main as distance

SMALL = (
    "source=arrays",
    "source.path=a.npz",
    "target=arrays",
    "target.path=b.npz",
    "extractor=identity",
    "cache_dir=null",
    "report=none",
    "hydra.run.dir=run",
)
# What a module that must not be imported does.
MARK = "open('imported', 'a').write(__name__)\n"


@pytest.mark.slow
def test_a_program_of_others_keeps_its_folder(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import otdd_flash\n")
    (tmp_path / "theirs" / "run.py").write_text("import helper\nprint(helper.TWICE)\n")
    (tmp_path / "helper.py").write_text("TWICE = 2.0\n")
    ended = started(tmp_path, "-m", "theirs.run")
    assert ended.stdout == "2.0\n", ended.stderr


@pytest.mark.slow
def test_a_checkout_runs_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "otdd_flash").symlink_to(ROOT / "otdd_flash")
    (tmp_path / "torch.py").write_text(MARK)
    ended = started(tmp_path, "-m", "otdd_flash.distance", "--version", PYTHONPATH="")
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "imported").exists()


CALLBACK = "callbacks: {evil: {_target_: os.system, command: touch imported}}"
LOG_CLASS = 'hydra_logging: {handlers: {x: {"()": os.system, command: touch imported}}}'
LOG_FILE = "job_logging: {handlers: {x: {class: logging.FileHandler, filename: imported}}}"
ENVIRONMENT = "job: {env_set: {LD_PRELOAD: evil.so}}"
FUNCTION = "extractor: {name: callable, path: os:system}"
ADDRESS = "log: {tracker: mlflow, uri: 'http://127.0.0.1:9'}"


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("content", "key"),
    [
        (CALLBACK, "hydra.callbacks.evil._target_=os.system"),
        (LOG_CLASS, "hydra.hydra_logging.handlers.x.()=os.system"),
        (LOG_FILE, "hydra.job_logging.handlers.x.filename=imported"),
        (ENVIRONMENT, "hydra.job.env_set.LD_PRELOAD=evil.so"),
        (FUNCTION, "extractor.path=os:system"),
        (ADDRESS, "log.uri=http://127.0.0.1:9"),
    ],
)
def test_a_folder_of_configurations_names_no_code(
    ended: Callable, folder: Path, content: str, key: str
) -> None:
    (folder / "theirs" / "solver").mkdir(parents=True)
    text = content if content in (FUNCTION, ADDRESS) else f"hydra: {{{content}}}"
    (folder / "theirs" / "solver" / "evil.yaml").write_text(f"# @package _global_\n{text}\n")
    searched = f"hydra.searchpath=[file://{folder}/theirs]"
    where = (searched,) if content is FUNCTION else ("--config-dir", "theirs")
    said = ended(distance, *where, *SMALL, "+solver@_global_=evil")
    assert said.code == 2
    assert said.error.startswith(f"{key} names code")
    assert not (folder / "imported").exists()


@pytest.mark.slow
def test_a_folder_may_hold_settings_and_the_command_line_name_code(
    ended: Callable, folder: Path
) -> None:
    (folder / "mine" / "solver").mkdir(parents=True)
    text = "schedule: converged\ntolerance: 1e-2\nrequire_convergence: false\n"
    (folder / "mine" / "solver" / "quick.yaml").write_text(text)
    assert ended(distance, "--config-dir", "mine", *SMALL, "solver=quick").code == 0
    callback = "hydra.experimental.callbacks.LogJobReturnCallback"
    more = (f"+hydra.callbacks.mine._target_={callback}", "+hydra.job.env_set.SOME=value")
    assert ended(distance, *SMALL, *more, "overwrite=true").code == 0


class Evil:
    def __reduce__(self):
        return (os.system, ("touch imported",))


@pytest.mark.parametrize("option", ["--experimental-rerun", "--exp"])
def test_a_pickled_run_is_not_opened(ended: Callable, folder: Path, option: str) -> None:
    (folder / "config.pickle").write_bytes(pickle.dumps(Evil()))
    said = ended(distance, option, "config.pickle")
    assert said.code == 2
    assert "unpickles a file" in said.error
    assert not (folder / "imported").exists()
