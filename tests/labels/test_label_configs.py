"""The config group `labels`: one file per method, all with the same keys."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import yaml

from otdd_flash.commands.settings import LabelSettings
from otdd_flash.labels import METRICS

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "labels"
DEFAULTS = {
    "full": False,
    "unbiased": True,
    "diagonal": False,
    "epsilon": "${epsilon}",
    "path": None,
}


def test_there_is_one_file_per_method():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(METRICS)


@pytest.mark.parametrize("method", METRICS)
def test_every_file_sets_its_method_and_every_key(method):
    keys = yaml.safe_load((FOLDER / f"{method}.yaml").read_text())
    assert keys == {"method": method, **DEFAULTS}


@pytest.mark.parametrize(
    ("method", "changed", "idle"),
    [
        ("means", {"unbiased": False}, "unbiased=False"),
        ("none", {"diagonal": True}, "diagonal=True"),
        ("gaussian", {"epsilon": 3.0}, "epsilon=3.0"),
        ("exact", {"path": "w.npz"}, "path=w.npz"),
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
