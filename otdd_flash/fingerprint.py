"""What tells datasets apart: sums of digests of rows, which parts of a dataset can add up.

    rows = sum_i SHA-256(i, features_i, label_i, weight_i)  mod 2^256
    fingerprint = SHA-256(version, n, d, which parts there are, class names, rows)

A row's digest has its number in the whole dataset, so the order of rows counts. Blocks of any size,
files that are read a piece at a time and processes that hold some rows each give the same sum.

Values alone count, not the type that holds them: a row whose features are all numbers of float32 is
digested in float32, any other in float64, and -0 as 0. What is solved at another precision has
the same fingerprint, so that a key of what was computed needs the precision as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.features.file_features import FileFeatures
from otdd_flash.real_numbers import in_one_row

# Bytes of features that are looked at together, and the modulus.
BLOCK_BYTES = 1 << 24
MODULUS = 1 << 256

# Of what is digested: fingerprints of another version say nothing of these.
VERSION = 2


def fingerprint(
    features: Tensor, labels: Tensor | None, weights: Tensor | None, class_names: Sequence[str]
) -> str:
    """The fingerprint of samples, in row order.

    Args:
        features: (n, d), on any device or in a file.
        labels: (n,) class indices, or None.
        weights: (n,) masses, or None.
        class_names: of the classes.
    """
    total = 0
    for rows in _blocks(features):
        values = _read(features, rows)
        values = values if values.dtype == torch.float64 else values.to(torch.float32)
        others = [part[rows].cpu().numpy() for part in (labels, weights) if part is not None]
        columns = [np.arange(rows.start, rows.stop), values.numpy(), *others]
        narrow = np.ones(len(values), np.bool_)
        if values.dtype == torch.float64:
            narrow = (values.to(torch.float32) == values).all(1).numpy()
        for chosen, kind in ((narrow, "<f4"), (~narrow, "<f8")):
            # Rows of one kind, as nearly always, are not copied.
            some = columns if chosen.all() else [column[chosen] for column in columns]
            total += _sum_of_values(some, kind)
    there = [part is not None for part in (labels, weights)]
    header = repr((VERSION, tuple(features.shape), there, list(class_names))).encode()
    return hashlib.sha256(header + (total % MODULUS).to_bytes(32, "little")).hexdigest()


def digest_of_rows(features: Tensor, *, first: int = 0) -> int:
    """Sum the digests of rows as they are stored, modulo 2^256; sums of parts add up.

    Args:
        features: (n, d).
        first: number of the first row in the whole matrix.
    """
    total = 0
    for rows in _blocks(features):
        numbers = torch.arange(first + rows.start, first + rows.stop)
        total += _sum_of_digests(
            np.concatenate([_bytes(numbers), _bytes(_read(features, rows))], 1)
        )
    return total % MODULUS


def _blocks(features: Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_BYTES // (features.shape[1] * features.element_size()))
    for start in range(0, len(features), size):
        yield slice(start, min(start + size, len(features)))


def _sum_of_values(columns: Sequence[NDArray[Any]], dtype: str) -> int:
    """Sum the digests of rows: numbers (k,), features (k, d) in a type, labels, weights."""
    numbers, values, *others = columns
    kinds = [(dtype, values.shape[1:]), *(other.dtype.newbyteorder("<") for other in others)]
    places = [f"{place}" for place in range(len(columns))]
    content = np.empty(len(numbers), list(zip(places, ["<i8", *kinds], strict=True)))
    # -0 becomes 0.
    np.add(values, 0, out=content["1"], casting="same_kind")
    for place, column in zip(places, columns, strict=True):
        if place != "1":
            content[place] = column
    return _sum_of_digests(content.view(np.uint8).reshape(len(content), content.itemsize))


def _sum_of_digests(content: NDArray[np.uint8]) -> int:
    return sum(int.from_bytes(hashlib.sha256(row).digest(), "little") for row in content)


def _read(features: Tensor, rows: slice) -> Tensor:
    if not isinstance(features, FileFeatures):
        return features[rows].detach().cpu()
    return features.file.rows(rows)


def _bytes(part: Tensor) -> NDArray[np.uint8]:
    """The bytes of each row, (k, bytes)."""
    found: NDArray[np.uint8] = in_one_row(part).view(len(part), -1).view(torch.uint8).numpy()
    return found
