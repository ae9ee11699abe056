"""What balancing takes and gives, on a CPU and in kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Problems(NamedTuple):
    """Matrices to balance.

    Attributes:
        matrices: x (B, n, m), or -x if `negated`.
        scale: 1 / t, (B,) or () float64.
        a: (B, n) or (n,) masses; None for 1.
        b: (B, m) or (m,), likewise.
        sizes: (B, 2) int32, rows and columns that there are; None for all.
        iterations: at least 1; with a tolerance the most there may be.
        tolerance: of |R 1 - a|, summed up with masses, else its largest; None for all iterations.
        negated: whether `matrices` holds -x.
    """

    matrices: Tensor
    scale: Tensor
    a: Tensor | None
    b: Tensor | None
    sizes: Tensor | None
    iterations: int
    tolerance: float | None
    negated: bool


class Balanced(NamedTuple):
    """R (B, n, m); t log phi (B, n), t log gamma (B, m), errors (B,); iterations (B,) int32."""

    matrices: Tensor
    rows: Tensor
    columns: Tensor
    errors: Tensor
    counts: Tensor


class Derivatives(NamedTuple):
    """By matrices (B, n, m), by 1 / t (B,), by a (B, n) and by b (B, m)."""

    matrices: Tensor
    scale: Tensor
    a: Tensor
    b: Tensor


def computed_in(matrices: Tensor) -> torch.dtype:
    """Return the type to compute in: float64 for matrices of float64, else float32."""
    return torch.promote_types(matrices.dtype, torch.float32)
