"""Linear systems of a small plan, factorized once and solved for any right-hand side.

Scaled by the masses on both sides, the matrices of `schur` are

    (1 + delta) I - K^T K,    (1 + delta) I + K,    K = diag(r)^(-1/2) P diag(c)^(-1/2).

With fewer rows than columns, S w2 = t is solved for w1 first, with K K^T in place of K^T K:

    ((1 + delta) diag(r) - P diag(1 / c) P^T) w1 = -P (t / c)
    w2 = (t - P^T w1) / ((1 + delta) c)

Without damping the kernel of the first matrix is c^(1/2). Adding omega omega^T with
omega = c^(1/2) / |c^(1/2)| moves that eigenvalue to 1 and changes no other: the matrix is positive
definite and has a Cholesky factorization.

The kernel is larger for a plan of separate blocks, or nearly so: one that is almost a permutation,
at a small epsilon, or one of a self term with distances between classes. A pivot is then of the
size of rounding, `sound` is false, and conjugate gradients solve instead. Points without mass have
rows of the identity, and solutions of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.derivatives.conjugate_gradients import Metric

# Points of the smaller side, and entries, up to which a plan is stored and its systems factorized:
# 128 MiB, and as much again for the factor.
MOST_POINTS, MOST_ENTRIES = 3000, 1 << 24

# The same for a factorization on a CPU: for 1,000 points it takes as long as 100 iterations of
# conjugate gradients, of which ten are enough at an epsilon of a tenth of the mean cost.
MOST_POINTS_CPU = 512


def is_small(shape: Sequence[int]) -> bool:
    """Return whether a plan of this shape (n, m) is stored."""
    n, m = shape
    return min(n, m) <= MOST_POINTS and n * m <= MOST_ENTRIES


def is_decomposed(entries: Tensor) -> bool:
    """Return whether systems of a stored plan P (n, m) are factorized."""
    most = MOST_POINTS if entries.is_cuda else MOST_POINTS_CPU
    return is_small(entries.shape) and min(entries.shape) <= most


class Direct(Protocol):
    """A factorized matrix (m, m)."""

    @property
    def sound(self) -> Tensor:
        """Whether the factorization succeeded, (): positive definite by more than rounding."""
        ...

    def solve(self, right: Tensor) -> Tensor:
        """Solve for right-hand sides (m, s), float64, in the range of the matrix."""
        ...


class Cholesky:
    """The Cholesky factorization of a matrix scaled by masses.

    Args:
        scaled: (m, m) float64.
        metric: the masses that scale it.
        terms: number of terms in the sum of each entry, for a bound on the rounding of a pivot.
    """

    def __init__(self, scaled: Tensor, metric: Metric, terms: int) -> None:
        self._scale = metric.scale
        self._factor, failed = torch.linalg.cholesky_ex(scaled)
        rounding = (terms + len(scaled)) * torch.finfo(torch.float64).eps
        self.sound = (self._factor.diagonal().amin() > rounding**0.5) & (failed == 0)

    def solve(self, right: Tensor) -> Tensor:
        """Solve for right-hand sides (m, s); rows without mass are 0."""
        return torch.cholesky_solve(self._scale * right, self._factor).mul_(self._scale)


def of_columns(entries: Tensor, rows: Metric, columns: Metric, damping: float) -> Cholesky:
    """Factorize S + delta diag(c) of a plan P (n, m) with the metrics of its marginals."""
    scaled = (entries * rows.scale).mul_(columns.scale.T)
    n, m = entries.shape
    matrix = torch.addmm(_identity(m, damping, entries), scaled.T, scaled, alpha=-1)
    if columns.constants:
        matrix.addr_(columns.constant, columns.constant)
    return Cholesky(matrix, columns, n)


def of_self(entries: Tensor, rows: Metric, damping: float) -> Cholesky:
    """Factorize (1 + delta) diag(r) + P of a symmetric plan P (n, n) with its marginal's metric."""
    scaled = (entries * rows.scale).mul_(rows.scale.T)
    return Cholesky(scaled.add_(_identity(len(entries), damping, entries)), rows, 1)


class OfRows:
    """The factorization of `of_columns`, for a plan (n, m) with fewer rows than columns."""

    def __init__(self, entries: Tensor, rows: Metric, columns: Metric, damping: float) -> None:
        self._entries, self._by_column = entries, columns.inverse
        self._damped = 1 + damping
        self._rows = of_columns(entries.T, columns, rows, damping)
        self.sound = self._rows.sound

    def solve(self, right: Tensor) -> Tensor:
        moved = self._rows.solve(self._entries @ (-self._by_column * right))
        return self._by_column * (right - self._entries.T @ moved) / self._damped


def _identity(size: int, damping: float, like: Tensor) -> Tensor:
    found = torch.eye(size, dtype=like.dtype, device=like.device)
    return found if damping == 0 else found.mul_(1 + damping)
