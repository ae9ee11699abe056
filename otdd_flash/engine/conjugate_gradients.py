"""Conjugate gradients for a matrix scaled by masses, with several right-hand sides at once.

The preconditioner is the diagonal of masses, plus a low-rank part where the masses alone are slow.
Each right-hand side has its own iteration; their products with the matrix share one pass. Residuals
are projected onto the range: where constants are in the kernel, their sum is kept at 0.

The recursive residual drifts from the true one by the rounding of every product (van der Vorst & Ye
2000, Residual replacement strategies for Krylov subspace iterative methods for the convergence of
true residuals). The drift is bounded as it grows. A step that would take the bound above the
residual itself, such as a long one where the matrix is 0 but for rounding, is not made, and the
iteration of that right-hand side ends.

Iterations may use a nearby matrix with faster products. The true residual of the matrix itself then
corrects their result: iterations restart from it.

`derivatives.plan_system` makes `Iterates` and implements `System`; `solver.matrix.transport` calls
`inverse`. `conjugate_gradients_kernels` does the same in Triton, with `Limits`, `Metric`, `Near`
and `AIM` of this module, so a change of the iterations must be made there too
(`tests/kernels/test_linear.py` compares both).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    # It needs Triton, which computers without a GPU may lack.
    from otdd_flash.kernels.linear.cg_step import Image
    from otdd_flash.kernels.points.packed_points import Layout

# Iterations aim at this share of the tolerance, so that corrections are rarely needed.
AIM = 0.5

# Rows from which a product takes longer than the launch of the next one.
MANY_ROWS = 1 << 14


class System(Protocol):
    """A symmetric, positive semi-definite matrix (m, m) whose rows belong to points."""

    @property
    def metric(self) -> Metric:
        """The masses that scale the matrix, and its range; rows without mass are 0."""
        ...

    @property
    def precision(self) -> float:
        """The relative error of its products, in the norm scaled by the masses."""
        ...

    @property
    def layout(self) -> Layout | None:
        """The packed order of points in products on tensor cores; None without these."""
        ...

    def preconditioner(self) -> Preconditioner | None:
        """Return an approximate inverse for slow iterations; None if the masses suffice."""
        ...

    def times(self, values: Tensor) -> Tensor:
        """Return the product (m, s) with values (m, s), float64."""
        ...

    def image(self, packed: Tensor, scales: Tensor) -> Image:
        """Return the product with values packed in float16 in its layout, with scales (s,)."""
        ...


class Preconditioner(Protocol):
    """An approximate inverse of a matrix: that of the masses, and a part of low rank beside it."""

    def times(self, residual: Tensor, inverse: Tensor) -> Tensor:
        """Return its product (m, s) with residuals (m, s), for `inverse` (m, 1) of the masses."""
        ...


class Metric:
    """The norm scaled by a matrix's masses, and the projection onto its range.

    Args:
        masses: (m,) float64.
        constants: whether constants are in the kernel of the matrix.

    Attributes:
        masses: (m, 1).
        constants: whether constants are in the kernel of the matrix.
    """

    def __init__(self, masses: Tensor, *, constants: bool) -> None:
        self.masses, self.constants = masses[:, None], constants

    @cached_property
    def total(self) -> Tensor:
        """The sum of the masses, ()."""
        return self.masses.sum()

    @cached_property
    def inverse(self) -> Tensor:
        """One over the masses (m, 1), 0 where there is none."""
        return inverse(self.masses)

    @cached_property
    def scale(self) -> Tensor:
        """Masses^(-1/2) (m, 1), 0 where there is none."""
        return _finite(self.masses.rsqrt())

    @cached_property
    def constant(self) -> Tensor:
        """masses^(1/2) (m,) of norm 1: the scaled constant vector."""
        return (self.masses[:, 0] / self.total).sqrt_()

    def in_range(self, values: Tensor) -> Tensor:
        """Project values (m, s) onto the range; 0 where there is no mass."""
        return self.less_constants(torch.where(self.masses > 0, values, 0))

    def less_constants(self, values: Tensor) -> Tensor:
        """Project values (m, s) that are 0 where there is no mass onto the range."""
        if not self.constants:
            return values
        return torch.addcmul(values, self.masses, values.sum(0) / self.total, value=-1)

    def size(self, values: Tensor) -> Tensor:
        """Return the norms (s,) of values (m, s), scaled by masses^(-1/2)."""
        found: Tensor = torch.linalg.vector_norm(values * self.scale, dim=0)
        return found


class Limits(NamedTuple):
    """The limits of iterations.

    Attributes:
        tolerance: relative residual.
        iterations: the most of every right-hand side.
    """

    tolerance: float
    iterations: int


class Near(NamedTuple):
    """The system to iterate on, and its preconditioner.

    Attributes:
        system: the matrix, or one near it.
        preconditioner: the low-rank part beside the masses; None for the masses alone.
        most: iterations between two corrections, at the most; None: no limit but that of all.
    """

    system: System
    preconditioner: Preconditioner | None = None
    most: int | None = None


class Iterates:
    """The state of s iterations in PyTorch: vectors (m, s), numbers (s,), float64 unless noted.

    Args:
        metric: of the system that is solved.
        limits: when to stop.

    Attributes:
        values: the best solutions so far.
        left: their residuals.
        size: scaled norm of the right-hand sides.
        now: scaled norm of the residuals `left`.
        taken: iterations so far, int64.
        pending: whether a correction is due, bool.
        missed: whether the tolerance is missed and iterations are left, bool.
        correction: the sum of steps since the last correction.
        residual: the recursive residual.
        direction: the search direction.
        square: squared scaled norm of the recursive residual.
        energy: <residual, preconditioned residual>; `square` without a low-rank part.
        unknown: bound on the drift of the recursive residual, by rounding.
        iterations: since the last correction, int64.
        active: which iterations go on, bool.
    """

    def __init__(self, metric: Metric, limits: Limits) -> None:
        self._metric, self._limits = metric, limits

    def begin(self, right: Tensor, near: Near) -> None:
        """Start from 0 for right-hand sides (m, s)."""
        self._right = self.left = self._metric.in_range(right)
        self.values = torch.zeros_like(right)
        self.size = self.now = self._metric.size(self.left)
        self.target = self._limits.tolerance * self.size
        self.taken = torch.zeros_like(self.size, dtype=torch.int64)
        self.resume(near)

    def resume(self, near: Near) -> None:
        """Restart with the system and preconditioner of `near`, where the tolerance is missed."""
        self._near = near
        self._start(torch.ones_like(self.target, dtype=torch.bool))

    def repeat(self) -> None:
        self.step()

    def wanted(self) -> tuple[bool, bool]:
        """Return whether any correction is due, and whether any tolerance is missed."""
        return bool(self.pending.any()), bool(self.missed.any())

    def _start(self, more: Tensor) -> None:
        """Restart from the true residuals, where `more` and the tolerance is missed."""
        self.missed = (self.now > self.target) & (self.taken < self._limits.iterations)
        self.pending = pending = more & self.missed
        self.correction, self.residual = torch.zeros_like(self.left), self.left
        self.direction = self._preconditioned(self.left)
        self.square = self._near.system.metric.size(self.left).square()
        self.energy = (self.left * self.direction).sum(0)
        self.unknown = torch.zeros_like(self.energy)
        self.iterations = torch.zeros_like(self.taken)
        self._goal = (AIM * self.target).square()
        self._most = self._limits.iterations - self.taken
        if self._near.most is not None:
            self._most = self._most.clamp_max(self._near.most)
        self.active = pending & (self.square > self._goal)

    def _preconditioned(self, residual: Tensor) -> Tensor:
        near, inverse = self._near, self._near.system.metric.inverse
        if near.preconditioner is not None:
            return near.preconditioner.times(residual, inverse)
        return inverse * residual

    def step(self) -> None:
        """Make a step of conjugate gradients for all active right-hand sides."""
        near = self._near.system
        metric, image = near.metric, near.times(self.direction)
        energy = (self.direction * image).sum(0)
        length = (self.direction.square() * metric.masses).sum(0).sqrt()
        positive = energy > 0
        step = torch.where(positive, self.energy / torch.where(positive, energy, 1), 0)
        self.unknown = self.unknown + near.precision * step * length
        active = self.active & positive & (self.unknown <= self.square.sqrt())
        step = torch.where(active, step, 0)
        self.correction = self.correction + step * self.direction
        self.residual = metric.in_range(self.residual - step * image)
        preconditioned = self._preconditioned(self.residual)
        after = (self.residual * preconditioned).sum(0)
        kept = torch.where(active, after / torch.where(active, self.energy, 1), 0)
        self.direction = preconditioned + kept * self.direction
        self.iterations = self.iterations + active
        self.square = torch.where(active, metric.size(self.residual).square(), self.square)
        self.energy = torch.where(active, after, self.energy)
        self.active = active & (self.square > self._goal) & (self.iterations < self._most)

    def correct(self, system: System) -> None:
        """Add the correction if it lowers the true residual; restart if it halves it.

        Do not restart after as many iterations as a correction may have: a better preconditioner,
        or another system, is due then.
        """
        corrected = self.values + self.correction
        left = self._metric.in_range(self._right - system.times(corrected))
        found = self._metric.size(left)
        self.taken = self.taken + self.iterations
        halved = self.pending & (found <= self.now / 2) & (self.iterations < self._most)
        better = self.pending & (found < self.now)
        self.values = torch.where(better, corrected, self.values)
        self.left = torch.where(better, left, self.left)
        self.now = torch.where(better, found, self.now)
        self._start(halved)


def inverse(masses: Tensor) -> Tensor:
    """Return 1 / masses, 0 where a mass is 0."""
    return _finite(masses.reciprocal())


def _finite(powers: Tensor) -> Tensor:
    """Replace infinite values, powers of a mass of 0, by 0 in place."""
    return powers.nan_to_num_(nan=torch.nan, posinf=0, neginf=0)
