"""`python -m otdd_flash.mix`: files, both weights, drawn rows, refusals and exit codes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from spying import calls_of

from otdd_flash.commands import mix as command
from otdd_flash.mix import main

BLOBS = "name: blobs, samples: 60, num_classes: 3"
SOURCES = ", ".join(f"{{{BLOBS}, seed: {k}, as: b{k}}}" for k in range(3))
TARGET = ("target=blobs", "target.samples=50", "target.num_classes=3", "target.seed=1")
COMMON = ("extractor=identity", "cache_dir=null", "hydra.run.dir=run", "overwrite=true")


@pytest.fixture
def mix(ended: Callable) -> Callable:
    """`mix(*arguments)` runs the command on small datasets."""
    return lambda *arguments: ended(main, *TARGET, f"sources=[{SOURCES}]", *COMMON, *arguments)


def read(name: str = "mixture.json") -> dict:
    return json.loads(Path("run", name).read_text(encoding="utf-8"))


def test_the_files_of_a_run(mix):
    said = mix("rows=30")
    assert said.code == 0, said.err
    assert {"mixture.json", "mixture.csv", "mixture.html", "mixture.png", "mixture.npz"} <= {
        path.name for path in Path("run").iterdir()
    }
    content = read()
    assert content["weights"]["b1"] > 0.9
    assert content["other"]["debias"] is True
    assert content["debias"] is False
    assert set(content["seconds"]) >= {"load", "extract", "mix"}
    assert "debiased weight" in said.out
    assert "of all allowed weights" in said.out
    with Path("run/mixture.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("source", "weight", "lower", "upper", "marginal_cost", "limit", "rows")
    ]
    assert [row["source"] for row in rows] == ["b0", "b1", "b2"]
    assert float(rows[1]["weight"]) == content["weights"]["b1"]
    page = Path("run/mixture.html").read_text(encoding="utf-8")
    assert page.count("<rect") == 3
    assert ">debiased weight</th>" in page
    # Rows are not sorted by bars.
    assert page.count("<th></th>") == 1
    assert page.count("<th data-sorts") == page.count("</th>") - 1
    assert content["labels"] == content["other"]["labels"] == "gaussian"
    assert content["epsilon"] == content["other"]["epsilon"]
    drawn = np.load("run/mixture.npz")
    assert drawn["x"].shape[0] == drawn["y"].shape[0] == 30
    assert Path("run/mixture/state.json").is_file()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("subsample", ["null", "39"])
def test_limits_subsamples_and_a_quiet_run(mix, subsample):
    given = ("max_weights={b1: 0.5}", "both=false", f"subsample={subsample}", "report=none")
    said = mix(*given, "max_rows=60")
    assert said.code == 0, said.err
    content = read()
    assert content["weights"]["b1"] == pytest.approx(0.5, abs=1e-6)
    assert content["limits"]["b1"] == 0.5
    assert "other" not in content
    if subsample != "null":
        lower, upper = content["intervals"]["b1"]
        assert 0 <= lower <= 0.5 <= upper <= 1
    assert [line.split()[1] for line in said.out.splitlines()] == ["b0", "b1", "b2"]
    assert not Path("run/mixture.csv").exists()
    # max_rows draws them, too.
    assert len(np.load("run/mixture.npz")["x"]) == 60
    # A run directory with a mixture is not overwritten unasked.
    assert mix("overwrite=false").code == 2


REFUSED = {
    "sources=3": "sources must be a list of datasets",
    "sources=[]": "sources must be a list of datasets such as [{name: mnist}], got []",
    "sources=[{samples: 3}]": "sources[0] must be a dataset's name, or its keys such as "
    "{name: mnist}, got {'samples': 3}",
    f"sources=[{{{BLOBS}}}, {{{BLOBS}}}]": "two datasets of sources are called",
    "max_weights={z: 1}": "max_weights names 'z'",
    "labels=given": "labels=given is for two datasets",
    "labels.full=true": "labels.full is for two datasets",
    "ground=gromov": "unknown ground 'gromov'",
    "extractor.standardize=true": "extractor.standardize is for two datasets",
    "rows=1000": "which has 60; draw",
    "bound_width=0": "bound_width must be positive",
}


def test_weights_are_written_before_too_many_rows_are_refused(mix):
    said = mix("rows=70", "both=false")
    assert said.code == 2
    assert "ask for the mixture with max_rows=70" in said.error
    assert read()["weights"]["b1"] > 0.98


@pytest.mark.parametrize("given", REFUSED)
def test_refusals(mix, given):
    said = mix(given, "both=false")
    assert said.code == 2, said.err
    assert REFUSED[given] in said.error


@pytest.mark.parametrize("given", [given for given in REFUSED if given.startswith("sources=")])
def test_faulty_sources_are_refused_before_anything_is_loaded(mix, monkeypatch, given):
    built = calls_of(monkeypatch, command, "build")
    said = mix(given)
    assert said.code == 2, said.err
    assert REFUSED[given] in said.error
    assert not built
