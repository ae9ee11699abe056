"""The ways of measuring class distances: what identifies them, their keys, what a new one takes."""

from __future__ import annotations

import math
import sqlite3
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
import yaml
from ring_package import files_between, install, shown_module

import otdd_flash as otdd
from otdd_flash.commands.settings import LabelSettings
from otdd_flash.labels import METRICS, metric_named, metric_of
from otdd_flash.labels.pair_cache import FILE
from otdd_flash.labels.pairs import PairDistances

Shrunk = shown_module("shrunk").Shrunk


class InFloat32(Shrunk):
    def measure(self, *given):
        return PairDistances(*(part.float() for part in super().measure(*given)))


def test_a_new_metric_takes_one_line_of_the_registry(blobs, monkeypatch):
    monkeypatch.setitem(METRICS, "shrunk", Shrunk)
    pair = blobs((5, 6), 3, name="left"), blobs((4,), 3, seed=1, name="right")
    expected = otdd.class_distances(pair, Shrunk()).full
    # Left in float32 by the metric, they are float64 as all are.
    rounded = otdd.class_distances(pair, InFloat32()).full
    torch.testing.assert_close(rounded, expected, rtol=1e-6, atol=0)
    result = otdd.dataset_distance(*pair, labels="shrunk", epsilon=20.0)
    assert result.method == "shrunk"
    torch.testing.assert_close(result.class_distances.full, expected)
    assert otdd.pairwise_distances(pair, labels="shrunk", epsilon=20.0).method == "shrunk"
    flown = otdd.gradient_flow(*pair, otdd.Flow(1), labels=Shrunk(), epsilon=20.0)
    assert flown.settings["labels.method"] == "shrunk"


@pytest.mark.parametrize("shrinkage", [1e-9, 0.3, 0.9])
def test_the_metric_of_the_page_is_that_of_shrunk_gaussians(blobs, shrinkage) -> None:
    """Against square roots by Schur decompositions, with weights."""
    dim, draw = 5, np.random.default_rng(0)
    left = blobs((7, 3), dim, weights=draw.uniform(0.1, 1, 10), name="left")
    right = blobs((8, 40), dim, seed=1, name="right")
    moments = []
    for samples in (left, right):
        for c in range(2):
            rows = (samples.labels == c).numpy()
            points, w = samples.features.numpy()[rows], samples.masses.numpy()[rows]
            w = w / w.sum()
            s = np.cov(points.T, aweights=w, ddof=0)
            s = (1 - shrinkage) * s + shrinkage * np.trace(s) / dim * np.eye(dim)
            moments.append((w @ points, s))
    found = otdd.class_distances([left, right], Shrunk(shrinkage)).full
    for i, (m, s) in enumerate(moments):
        for j, (n, t) in enumerate(moments):
            root = scipy.linalg.sqrtm(s)
            fidelity = np.trace(scipy.linalg.sqrtm(root @ t @ root)).real
            expected = ((m - n) ** 2).sum() + np.trace(s) + np.trace(t) - 2 * fidelity
            assert float(found[i, j]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_metric_of_the_page_by_its_function_and_by_its_name(
    blobs, tmp_path, monkeypatch
) -> None:
    sizes, narrow = ((5, 6), (4, 9)), np.float32
    pair = [blobs(each, 3, seed, dtype=narrow) for seed, each in enumerate(sizes)]
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    install(site, files_between("## A class distance", "## A cost"))
    named = otdd.class_distances(pair, "shrunk", cache_dir=tmp_path)
    again = otdd.class_distances(pair, "shrunk", cache_dir=tmp_path)
    called = otdd.class_distances(pair, shown_module("shrunk").shrunk)
    assert torch.equal(named.full, again.full)
    assert torch.equal(named.full, called.full)
    with sqlite3.connect(tmp_path / FILE) as database:
        assert database.execute("SELECT count(*) FROM pairs").fetchone() == (6,)
    result = otdd.dataset_distance(*pair, labels="shrunk", epsilon=20.0)
    assert result.method == "shrunk"
    torch.testing.assert_close(result.class_distances.full, named.full, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("metric", "recipe"),
    [
        (otdd.labels.Gaussian(), "gaussian unbiased=True on cuda"),
        (otdd.labels.Gaussian(unbiased=False), "gaussian unbiased=False on cuda"),
        (otdd.labels.Sinkhorn(1), "sinkhorn epsilon=1.0 tolerance=0.001 on cuda"),
        (otdd.labels.Sinkhorn(0.5, 1e-4), "sinkhorn epsilon=0.5 tolerance=0.0001 on cuda"),
        (otdd.labels.Exact(), "exact"),
        (otdd.labels.Means(), None),
    ],
)
def test_recipes_are_those_of_caches_that_there_are(metric, recipe):
    """Other words for the same would make every entry of every user's cache unknown."""
    assert metric.recipe(torch.device("cuda:1")) == recipe


def test_a_name_stands_for_a_metric_with_its_defaults():
    assert metric_of("upper_bound") == otdd.labels.UpperBound()
    table = otdd.ClassDistances(*([[0.0]],) * 3)
    everything = {"unbiased": False, "diagonal": True, "epsilon": 2, "tolerance": 0.1}
    everything |= {"table": table, "scale": [2, 3], "parents": {"a": "b"}, "power": 0.5}
    assert [metric_named(name, everything) for name in METRICS] == [
        otdd.labels.Gaussian(unbiased=False, diagonal=True),
        otdd.labels.Sinkhorn(2.0, 0.1),
        otdd.labels.Exact(),
        otdd.labels.Means(),
        otdd.labels.UpperBound(unbiased=False),
        otdd.labels.NoLabels(),
        otdd.labels.Continuous((2.0, 3.0)),
        otdd.labels.Tree({"a": "b"}, power=0.5),
        otdd.labels.Given(table),
    ]


FOLDER = Path(__file__).resolve().parents[2] / "conf" / "labels"
DEFAULTS = {
    "full": False,
    "unbiased": True,
    "diagonal": False,
    "epsilon": "${epsilon}",
    "path": None,
    "scale": "pooled",
    "power": 1.0,
    "add": None,
}


def test_every_method_has_a_file_that_sets_every_key():
    files = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")}
    assert files == {method: {"method": method, **DEFAULTS} for method in METRICS}


@pytest.mark.parametrize(
    ("method", "changed", "idle"),
    [
        ("means", {"unbiased": False}, "unbiased=False"),
        ("gaussian", {"epsilon": 3.0}, "epsilon=3.0"),
        ("gaussian", {"unbiased": False, "diagonal": True}, None),
        ("sinkhorn", {"epsilon": 3.0}, None),
        ("means", {"epsilon": math.nan}, "epsilon=nan"),
    ],
)
def test_a_key_that_the_method_does_not_have_is_said(method, changed, idle) -> None:
    usual = {"full": False, "unbiased": True, "diagonal": False, "epsilon": 0.1, "path": None}
    settings = LabelSettings(method, **{**usual, **changed})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        settings.metric(1e-3, 0.1)
    expected = [] if idle is None else [f"labels.{idle} does nothing with labels={method}"]
    assert [str(one.message) for one in said] == expected
