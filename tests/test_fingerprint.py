"""Fingerprints do not know where rows are or how many are looked at together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash import fingerprint

FEATURES = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(50) % 4
NAMES = ("a", "b", "c", "d")


@pytest.mark.parametrize("rows", [1, 7, 50, 64])
@pytest.mark.parametrize("in_file", [False, True])
def test_blocks_and_files_change_nothing(
    rows: int, in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = otdd.LabeledSamples(FEATURES, LABELS, NAMES).fingerprint
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 12 * rows)
    features = FEATURES
    if in_file:
        np.save(tmp_path / "x.npy", FEATURES.numpy())
        features = otdd.features_file(tmp_path / "x.npy")
    assert otdd.LabeledSamples(features, LABELS, NAMES).fingerprint == whole


def test_parts_add_up() -> None:
    digest = fingerprint.digest_of_rows
    whole = digest(FEATURES, LABELS, None)
    parts = [
        digest(FEATURES[start:stop], LABELS[start:stop], None, first=start)
        for start, stop in ((20, 50), (0, 13), (13, 20))
    ]
    assert sum(parts) % 2**256 == whole
    assert sum(parts) - parts[0] + digest(FEATURES[20:], LABELS[20:], None) != whole


def test_names_cannot_pass_for_others() -> None:
    one, other = (
        otdd.LabeledSamples(FEATURES, torch.zeros(50, dtype=torch.int64), names).fingerprint
        for names in (("a", "b"), ("a\0b",))
    )
    assert one != other
