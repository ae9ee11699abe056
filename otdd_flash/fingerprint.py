"""What tells datasets apart: sums of digests of rows, which parts of a dataset can add up.

    rows = sum_i SHA-256(i, features_i, label_i, weight_i)  mod 2^256
    fingerprint = SHA-256(types, n, d, class names, rows)

A row's digest has its number in the whole dataset, so the order of rows counts. Blocks of any size,
files that are read a piece at a time and processes that hold some rows each give the same sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.features.file_features import FileFeatures
from otdd_flash.real_numbers import in_one_row

# Bytes of features that are looked at together, and the modulus.
BLOCK_BYTES = 1 << 24
MODULUS = 1 << 256


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
    types = [None if part is None else str(part.dtype) for part in (features, labels, weights)]
    total = digest_of_rows(features, labels, weights)
    header = repr((types, tuple(features.shape), list(class_names))).encode()
    return hashlib.sha256(header + total.to_bytes(32, "little")).hexdigest()


def digest_of_rows(
    features: Tensor, labels: Tensor | None, weights: Tensor | None, *, first: int = 0
) -> int:
    """The sum of the digests of rows, modulo 2^256; sums of parts are that of the whole.

    Args:
        features: (n, d).
        labels: (n,) or None.
        weights: (n,) or None.
        first: number of the first row in the whole dataset.
    """
    size = max(1, BLOCK_BYTES // (features.shape[1] * features.element_size()))
    total = 0
    for start in range(0, len(features), size):
        rows = slice(start, min(start + size, len(features)))
        numbers = torch.arange(first + rows.start, first + rows.stop)
        parts = [numbers, _read(features, rows)]
        parts += [part[rows].cpu() for part in (labels, weights) if part is not None]
        content = np.concatenate([_bytes(part) for part in parts], 1)
        total += sum(int.from_bytes(hashlib.sha256(row).digest(), "little") for row in content)
    return total % MODULUS


def _read(features: Tensor, rows: slice) -> Tensor:
    if not isinstance(features, FileFeatures):
        return features[rows].detach().cpu()
    return features.file.rows(rows)


def _bytes(part: Tensor) -> NDArray[np.uint8]:
    """The bytes of each row, (k, bytes)."""
    found: NDArray[np.uint8] = in_one_row(part).view(len(part), -1).view(torch.uint8).numpy()
    return found
