"""`python -m otdd_flash.shift`: files, exit codes, windows and refusals."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

import otdd_flash as otdd
from otdd_flash.shift.__main__ import main

SMALL = (
    *("reference=blobs", "sample=blobs", "extractor=identity", "max_samples=40", "cache_dir=null"),
    *("sample.split=test", "overwrite=true", "hydra.run.dir=run", "permutations=39"),
    "report=table",
)


@pytest.fixture
def shift(ended: Callable) -> Callable:
    """`shift(*arguments)` runs the command on a small problem."""

    def run(*arguments: str):
        given = {argument.partition("=")[0] for argument in arguments}
        return ended(main, *(s for s in SMALL if s.partition("=")[0] not in given), *arguments)

    return run


def result() -> dict:
    return json.loads(Path("run/result.json").read_text())


def test_a_run_writes_its_result_its_tables_and_says_it_in_words(shift):
    done = shift()
    assert done.code == 0, done.err
    found = result()
    assert 0 < found["p_value"] <= 1
    assert found["permutations"] == 39
    assert found["bounds"][0] <= found["statistic"] <= found["bounds"][1]
    assert {path.suffix for path in Path("run").iterdir()} >= {".json", ".csv"}
    assert len(Path("run/null.csv").read_text().splitlines()) == 40
    assert len(Path("run/rows.csv").read_text().splitlines()) == 81
    assert len(Path("run/classes.csv").read_text().splitlines()) == 1 + len(
        found["parts"]["classes"]
    )
    for sentence in found["sentences"]:
        assert sentence in done.out.replace("\n", " ").replace("  ", " ")


def test_a_shift_ends_a_pipeline_with_code_5_after_all_is_written(shift):
    rng = np.random.default_rng(0)
    np.savez("one.npz", x=rng.normal(size=(20, 2)), y=np.arange(20) % 2)
    np.savez("other.npz", x=rng.normal(size=(20, 2)) + 3, y=np.arange(20) % 2)
    paths = (
        *("reference=arrays", "reference.path=one.npz", "sample=arrays", "sample.path=other.npz"),
        *("sample.split=all", "max_samples=null"),
    )
    assert shift(*paths).code == 0
    failed = shift(*paths, "fail_on_shift=0.05")
    assert failed.code == 5
    assert "the data have shifted: p = 0.025" in failed.error
    assert result()["p_value"] == 0.025
    assert json.loads(Path("run/error.json").read_text())["exit_code"] == 5
    assert shift(*paths, "sample.path=one.npz", "fail_on_shift=0.05").code == 0
    low = shift(*paths, "fail_on_shift=0.01")
    assert low.code == 2
    assert "set permutations=99" in low.error


def test_windows_are_tested_in_the_order_of_the_file(shift):
    rng = np.random.default_rng(1)
    np.savez("one.npz", x=rng.normal(size=(25, 2)))
    later = rng.normal(size=(30, 2))
    later[20:] += 4
    np.savez("other.npz", x=later)
    paths = (
        *("reference=arrays", "reference.path=one.npz", "sample=arrays", "sample.path=other.npz"),
        *("sample.split=all", "max_samples=null", "labels=none", "window=10"),
    )
    done = shift(*paths)
    assert done.code == 0, done.err
    found = result()
    assert [each["shifted"] for each in found["windows"]] == [False, False, True]
    assert found["p_value"] == found["windows"][2]["p_value"]
    assert len(Path("run/windows.csv").read_text().splitlines()) == 4
    assert "window 3: p = " in done.out
    assert shift(*paths, "fail_on_shift=0.05").code == 5


def test_groups_come_from_files_and_bad_settings_are_refused(shift, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    np.save("a.npy", np.arange(40) // 4)
    np.save("b.npy", 100 + np.arange(40) // 4)
    assert shift("groups=[a.npy,'~/b.npy']").code == 0
    assert result()["groups"] == [10, 10]
    for arguments, words in (
        (["groups=[a.npy]"], "groups must be two files"),
        (["groups=[a.npy,c.npy]"], "cannot read c.npy"),
        (["groups=[a.npy,'']"], "groups must name a file or folder, got ''"),
        (["permutations=5"], "permutations must lie in [19"),
        (["window=10"], "leave sample.max_samples out"),
        (["labels=given", "labels.path=W.npz"], "no class distances at W.npz"),
        (["sample.pseudo_labels=kmeans"], "clusters differ without a shift"),
        (["labels.full=true"], "labels.full=true has no meaning here"),
        (["epsilon=0.1", "epsilon_relative=0.1"], "epsilon"),
        (["alpha=2"], "alpha must lie in"),
    ):
        refused = shift(*arguments)
        assert refused.code == 2, (arguments, refused.err)
        assert words in refused.error, arguments


@pytest.mark.slow
def test_pictures_are_drawn_and_defaults_are_those_of_the_library(shift, composed):
    assert shift("report=full").code == 0
    assert Path("run/shift.png").stat().st_size > 5000
    root = OmegaConf.to_container(composed(name="shift"), resolve=True)
    given = inspect.signature(otdd.shift_test).parameters
    shared = {*root} & {*given} - {"reference", "sample", "labels", "cache_dir"}
    assert shared >= {"permutations", "alpha", "parts", "stop_after", "min_effect", "epsilon"}
    assert {key: root[key] for key in shared} == {key: given[key].default for key in shared}


def test_a_sweep_collects_p_values(shift):
    done = shift("-m", "permutations=19,39", "hydra.sweep.dir=sweep")
    assert done.code == 0, done.err
    lines = Path("sweep/summary.csv").read_text().splitlines()
    assert "p_value" in lines[0]
    assert len(lines) == 3
