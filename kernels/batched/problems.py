"""The records that balancing takes and fills, on a CPU and in kernels alike.

Balancing scales the rows and columns of many small matrices until they sum to masses a and b:

    R = diag(a o phi) exp(x / t) diag(b o gamma),    R 1 = a,    R^T 1 = b.

All masses are 1 for doubly stochastic matrices. Plans of given costs have x = -C and t = epsilon.

`otdd_flash.batched.plans` and `doubly_stochastic` make `Problems`. `batched.balance` takes their
fields one by one, allocates `Balanced` and `Derivatives` by `empty`, and passes them to
`batched.cpu` or to the kernels of this folder, which fill them. `batched.relaxed` reads `Problems`
and returns `Balanced`, too. A new field needs an argument in `balance`. This module must not import
Triton, because a CPU needs none (`tests/test_without_triton.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Problems(NamedTuple):
    """Matrices to balance.

    Attributes:
        matrices: x (B, n, m), or -x if `negated`; n and m up to 128, float16 to float64, of any
            strides.
        scale: 1 / t, (B,) or () float64.
        a: masses of the rows (B, n) or (n,); None for 1, then b is as well.
        b: masses of the columns (B, m) or (m,).
        sizes: (B, 2) int32, rows and columns in use; None for all. Beyond them masses are 0.
        iterations: at least 1; with a tolerance the most there may be.
        tolerance: of |R 1 - a|, its sum with masses, else its maximum; None for all iterations.
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


class Cotangents(NamedTuple):
    """Cotangents of R (B, n, m) of any strides, of t log phi (B, n) and of t log gamma (B, m).

    The latter two are None for 0.
    """

    matrices: Tensor
    rows: Tensor | None
    columns: Tensor | None


class Balanced(NamedTuple):
    """R (B, n, m); t log phi (B, n), t log gamma (B, m), errors (B,); iterations (B,) int32."""

    matrices: Tensor
    rows: Tensor
    columns: Tensor
    errors: Tensor
    counts: Tensor

    @staticmethod
    def empty(matrices: Tensor, *, stops: bool, potentials: bool) -> Balanced:
        """Allocate all; the middle three are empty without `potentials`, counts without `stops`."""
        (count, n, m), dtype = matrices.shape, computed_in(matrices)
        return Balanced(
            matrices.new_empty((count, n, m)),
            matrices.new_empty((count, n) if potentials else 0, dtype=dtype),
            matrices.new_empty((count, m) if potentials else 0, dtype=dtype),
            matrices.new_empty((count,) if potentials else 0, dtype=dtype),
            matrices.new_empty((count,) if stops else 0, dtype=torch.int32),
        )


class Derivatives(NamedTuple):
    """By matrices (B, n, m), by 1 / t (B,), by a (B, n) and by b (B, m)."""

    matrices: Tensor
    scale: Tensor
    a: Tensor
    b: Tensor

    @staticmethod
    def empty(matrices: Tensor, *, masses: bool, with_scale: bool) -> Derivatives:
        """Allocate; those by masses are empty without `masses`, by 1 / t without `with_scale`."""
        (count, n, m), dtype = matrices.shape, computed_in(matrices)
        return Derivatives(
            matrices.new_empty((count, n, m)),
            matrices.new_empty((count,) if with_scale else 0, dtype=dtype),
            matrices.new_empty((count, n) if masses else 0, dtype=dtype),
            matrices.new_empty((count, m) if masses else 0, dtype=dtype),
        )


def computed_in(matrices: Tensor) -> torch.dtype:
    """Return the type to compute in: float64 for matrices of float64, else float32."""
    return torch.promote_types(matrices.dtype, torch.float32)


def within(sizes: Tensor, side: int, size: int) -> Tensor:
    """Which of `size` rows (side 0) or columns (1) each problem of `sizes` has, (B, size) flags."""
    return torch.arange(size, device=sizes.device) < sizes[:, side, None]
