"""Fingerprints are of values: not of where or in what they are, nor of how they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

import otdd_flash as otdd
from otdd_flash import fingerprint

FEATURES = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(50) % 4
NAMES = ("a", "b", "c", "d")


def in_file(name: str, write: Callable[[Path], None], folder: Path) -> Any:
    write(folder / name)
    return otdd.features_file(folder / name)


@pytest.mark.parametrize(("rows", "stored"), [(1, False), (7, True)])
def test_blocks_and_files_change_nothing(
    rows: int, stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = otdd.LabeledSamples(FEATURES, LABELS, NAMES).fingerprint
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 12 * rows)
    features = FEATURES
    if stored:
        features = in_file("x.npy", lambda path: np.save(path, FEATURES.numpy()), tmp_path)
    assert otdd.LabeledSamples(features, LABELS, NAMES).fingerprint == whole


def test_names_cannot_pass_for_others() -> None:
    one, other = (
        otdd.LabeledSamples(FEATURES, torch.zeros(50, dtype=torch.int64), names).fingerprint
        for names in (("a", "b"), ("a\0b",))
    )
    assert one != other


HALF = FEATURES.half().numpy()


def by_columns(array: Any) -> Any:
    return {str(place): array[:, place] for place in range(array.shape[1])}


# The same numbers, which float16 holds.
HELD: dict[str, Callable[[Path], Any]] = {
    "float16": lambda _: HALF,
    "float64": lambda _: HALF.astype(np.float64),
    "longdouble": lambda _: HALF.astype(np.longdouble),
    "the other byte order": lambda _: HALF.astype(np.dtype(np.float64).newbyteorder()),
    "by columns": lambda _: np.asfortranarray(HALF.astype(np.float32)),
    "turned": lambda _: HALF[::-1].copy()[::-1],
    "read-only": lambda _: np.frombuffer(HALF.tobytes(), np.float16).reshape(50, 3),
    "nothing masked": lambda _: np.ma.masked_array(HALF, np.zeros_like(HALF, bool)),
    "a parameter": lambda _: torch.nn.Parameter(torch.from_numpy(HALF)),
    "objects": lambda _: HALF.astype(object),
    "a table": lambda _: pd.DataFrame(HALF.astype(np.float64)),
    "an Arrow table": lambda _: pa.table(by_columns(HALF.astype(np.float32))),
    ".npy of float16": lambda folder: in_file("x.npy", lambda path: np.save(path, HALF), folder),
    ".safetensors": lambda folder: in_file(
        "x.safetensors", lambda path: save_file({"x": torch.from_numpy(HALF)}, path), folder
    ),
}


WEIGHTS = np.arange(1, 51)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.filterwarnings("error")
def test_one_content_has_one_fingerprint_whatever_holds_it(held: str, tmp_path: Path) -> None:
    weights = WEIGHTS.astype(np.float32)
    given = otdd.LabeledSamples.from_arrays(HELD[held](tmp_path), LABELS.to(torch.int8), weights)
    plain = otdd.LabeledSamples.from_arrays(HALF, LABELS.numpy(), WEIGHTS)
    assert given.fingerprint == plain.fingerprint


@pytest.mark.parametrize("held", [".npy of float16", "float64"])
def test_one_content_is_at_distance_0_from_itself_whatever_holds_it(
    held: str, tmp_path: Path
) -> None:
    """Float16 in a file was at 0 in [-1e-5, 1.4e-3] from itself in memory."""
    pair = [
        otdd.LabeledSamples.from_arrays(features, LABELS, WEIGHTS)
        for features in (HELD[held](tmp_path), HALF)
    ]
    for one, other in (pair, reversed(pair)):
        found = otdd.dataset_distance(one, other, labels="means")
        assert (found.value, found.bounds) == (0, (0, 0))
    assert otdd.pairwise_distances(pair, labels="none").values.tolist() == [[0, 0]] * 2
    assert otdd.sliced_distances(pair, projections=5).values.tolist() == [[0, 0]] * 2


def test_a_rounded_copy_is_other_content_unless_nothing_was_rounded() -> None:
    """Rows of both kinds in one block."""
    double = FEATURES.double()
    double[7, 1] += 1e-12
    rounded = double.float()
    prints = [otdd.LabeledSamples(each, LABELS, NAMES).fingerprint for each in (double, rounded)]
    assert prints[0] != prints[1]
    assert prints[1] == otdd.LabeledSamples(FEATURES.double(), LABELS, NAMES).fingerprint
    huge = torch.full((2, 1), 1e300, dtype=torch.float64)
    prints = [otdd.LabeledSamples(k * huge, None, ()).fingerprint for k in (1, 2)]
    assert prints[0] != prints[1]
