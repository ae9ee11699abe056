"""Paths that users give: none is empty, `~` is the home folder, also in arguments of commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import otdd_flash as otdd
from otdd_flash.checks import path
from otdd_flash.commands.arguments import refused_argument, twice_given, with_folders
from otdd_flash.data.writing import write_npz
from otdd_flash.errors import InputError
from otdd_flash.report.distance import write_report
from otdd_flash.report.study.writing import write_study_report
from tests.refusals import naming

X = np.arange(12.0).reshape(6, 2)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def samples(name: str = "") -> otdd.LabeledSamples:
    return otdd.LabeledSamples.of((X + len(name), np.arange(6) % 2))


def distance(**more: Any) -> otdd.DistanceResult:
    return otdd.dataset_distance(samples(), samples("other"), epsilon=1.0, **more)


def test_a_path_is_the_one_that_a_shell_would_take(home: Path) -> None:
    for given, expected in (("~/x", f"{home}/x"), ("a/~/x", "a/~/x"), ("./~x", "./~x")):
        assert path("cache_dir", given) == expected
    assert path("cache_dir", Path("~")) == home
    for given, match in (
        ("", "cache_dir must name a file or folder, got ''; or leave it out"),
        ("a\0b", "must name a file"),
        ("~nobody-of-this-name/x", r"no user 'nobody-of-this-name'; write /.*/work/~nobody"),
        (3, "must be a path"),
    ):
        with naming(given), pytest.raises(InputError, match=match):
            path("cache_dir", given)


# Calls that write below a folder, or read from it.
CALLS: dict[str, Any] = {
    "cache_dir": lambda folder: distance(labels="exact", cache_dir=folder),
    "save": lambda folder: distance().save(folder),
    "pairwise": lambda folder: pairs().save(folder),
    "table": lambda folder: distance().class_distances.save(folder and f"{folder}/W.npz"),
    "report": lambda folder: write_report(distance(), folder, content="table"),
    "study": lambda folder: study().run(folder),
    "study report": lambda folder: write_study_report(study().run("there", resume=True), folder),
    "write_npz": lambda folder: write_npz(samples(), folder and f"{folder}/x.npz"),
}


def study() -> otdd.Study:
    return otdd.Study({"a": samples(), "b": samples("b")}, ["frechet"], transfer=None)


def pairs() -> otdd.PairwiseResult:
    return otdd.pairwise_distances([samples(), samples("b")], epsilon=1.0)


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("name", CALLS)
def test_folders_of_library_calls(home: Path, name: str) -> None:
    CALLS[name]("~/below")
    assert any((home / "below").iterdir())
    with pytest.raises(InputError, match="must name a file or folder"):
        CALLS[name]("")
    assert [entry.name for entry in Path().iterdir() if entry.name != "there"] == []


@pytest.mark.parametrize("key", ["hydra.run.dir", "++hydra.sweep.subdir"])
def test_folders_of_runs_before_hydra_reads_them(home: Path, key: str) -> None:
    for given in ("~/x", "'~/x'", '"~/x"'):
        assert with_folders(["epsilon=1", f"{key}={given}"]) == ["epsilon=1", f"{key}='{home}/x'"]
    kept = [f"{key}=plain", f"{key}='it is'", "source.path=~/x", "-m"]
    assert with_folders(kept) == kept
    for empty in ("", "''", '""', " "):
        with pytest.raises(InputError, match=r"hydra\.\w+\.\w+ must name a file or folder"):
            with_folders([f"{key}={empty}"])


def test_a_group_takes_one_choice() -> None:
    for given in ("[exact,means]", "'[exact, means]'", "means,[exact,none]", "{a:1}"):
        for argument in (f"labels={given}", f"++labels={given}"):
            found = refused_argument(["epsilon=1", argument])
            assert found is not None
            assert found.startswith(f"labels takes one choice, got {given}; write labels=CHOICE")
    assert refused_argument(["labels.key=[1,2]", "study.tasks=[{name: mnist}]"]) is None


def test_a_key_that_is_given_twice_is_said() -> None:
    assert twice_given(["labels=exact", "epsilon=1", "labels=means"]) == [
        "labels is given 2 times: labels=means, the last one, is taken"
    ]
    assert twice_given(["-m", "epsilon=1,2", "~x", "seed=1"]) == []
