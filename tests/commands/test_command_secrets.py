"""Values of the environment: used by a run, and in none of its files and messages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from otdd_flash.distance import main as distance
from otdd_flash.flow import main as flow

SECRET = "hunter2-s3cr3t-token"
DATA = (
    *("source=arrays", "source.path=${oc.env:TOKEN}.npz", "target=arrays", "target.path=b.npz"),
    *("extractor=identity", "epsilon=${oc.env:EPSILON}", "data_root=${target.path}"),
    # And one to a key from the environment stays one.
    *("target.root=${oc.env:TOKEN}", "source.root=${target.root}"),
    *("cache_dir=null", "hydra.run.dir=run"),
)


@pytest.fixture(autouse=True)
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("EPSILON", "0.5")
    shutil.copy(folder / "a.npz", folder / f"{SECRET}.npz")


def _assert_nowhere(folder: Path, *texts: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    leaks = [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not leaks
    assert not any(SECRET in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(("main", "more"), [(distance, ()), (flow, ("flow.steps=1",))])
def test_results_keep_the_variable_and_not_its_value(
    ended: Callable, main: Callable, more: tuple[str, ...]
) -> None:
    more = (*more, "save_result=true", "report=table", "log=tensorboard", "log_level=INFO")
    said = ended(main, *DATA, *more)
    assert said.code == 0
    result = json.loads(Path("run/result.json").read_text())
    assert result["epsilon"] == 0.5
    assert result["source"] == "${oc.env:TOKEN}"
    config = result["config"]
    assert config["source"]["path"] == "${oc.env:TOKEN}.npz"
    assert config["target"]["root"] == "${oc.env:TOKEN}"
    assert config["epsilon"] == "${oc.env:EPSILON}"
    # A reference to what is no variable is resolved as before.
    assert config["data_root"] == "b.npz"
    assert config["source"]["root"] == "${target.root}"
    _assert_nowhere(Path("run"), said.out, said.err)


@pytest.mark.slow
def test_a_variable_that_jobs_get_is_shown_nowhere(ended: Callable) -> None:
    copied = ("hydra.job.env_copy=[TOKEN]", "hydra.output_subdir=.hydra")
    said = ended(distance, *DATA, "report=none", *copied)
    assert said.code == 0
    assert "TOKEN: ${oc.env:TOKEN}" in Path("run/.hydra/hydra.yaml").read_text()
    _assert_nowhere(Path("run"), said.out, said.err)


def test_errors_name_the_variable(ended: Callable, folder: Path) -> None:
    (folder / f"{SECRET}.npz").unlink()
    said = ended(distance, *DATA)
    assert said.code == 2
    assert "${oc.env:TOKEN}.npz" in said.error
    _assert_nowhere(Path("run"), said.out, said.err)


@pytest.mark.slow
def test_a_sweep_and_a_study_name_the_variable(ended: Callable) -> None:
    from otdd_flash.study.__main__ import main as study

    more = ("hydra.sweep.dir=sweep", "epsilon=0.5,1", "report=none")
    assert ended(distance, "-m", *(each for each in DATA if "epsilon" not in each), *more).code == 0
    assert "${oc.env:TOKEN}" in Path("sweep/summary.csv").read_text()
    tasks = "{name: arrays, path: '${oc.env:TOKEN}.npz', as: 'x ${oc.env:TOKEN}'}"
    given = (f"study.tasks=[{tasks},{{name: arrays, path: b.npz}}]", "transfer=null")
    settings = ("extractor=identity", "cache_dir=null", "hydra.run.dir=study", "report=table")
    said = ended(study, *given, *settings, "measures=[otdd]", "study.workers=1")
    assert said.code == 0
    assert "x ${oc.env:TOKEN}" in Path("study/pairs.csv").read_text()
    # The same study: what it is called is read as it is written.
    assert ended(study, *given, *settings, "measures=[otdd]", "study.resume=true").code == 0
    for place in ("sweep", "study"):
        _assert_nowhere(Path(place), said.out, said.err)
