"""The config group `labels`: one file per method, all with the same keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

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
