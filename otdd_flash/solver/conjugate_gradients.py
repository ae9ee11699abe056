"""Conjugate gradients for a matrix whose rows belong to masses, with several right-hand sides.

The matrix is scaled by its masses, or preconditioned by what is near its inverse (`low_rank`),
every direction goes by itself, and products of all of them share one pass. Residuals keep no part
outside the range: their sum is 0 where constants are taken to 0.

Every step adds the rounding of its product to what the recursive residual does not know of (van der
Vorst & Ye 2000, Residual replacement strategies for Krylov subspace iterative methods for the
convergence of true residuals). A step that would bring it above the residual itself, such as a long
one where the matrix is 0 but for rounding, is not taken and ends the direction.

Iterations may be of a matrix near the one that is to be solved with. The residual of the latter
corrects what they give: iterations start again from it.
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
    from otdd_flash.solver.direct import Direct
    from otdd_flash.solver.low_rank import LowRank

# What part of the tolerance conjugate gradients aim at: corrections then rarely follow.
AIM = 0.5

# Rows from which on a product takes longer than launching the next one.
MANY_ROWS = 1 << 14


class System(Protocol):
    """A symmetric, positive semi-definite matrix (m, m) whose rows belong to points."""

    @property
    def metric(self) -> Metric:
        """The range of the matrix and the masses that scale it; rows without mass are 0."""
        ...

    @property
    def precision(self) -> float:
        """The error of its products, relative to what they multiply, both scaled."""
        ...

    @property
    def layout(self) -> Layout | None:
        """The order of points that tensor cores multiply in; None if they take no part."""
        ...

    @property
    def direct(self) -> Direct | None:
        """The matrix decomposed, if it is a small one."""
        ...

    def preconditioner(self) -> LowRank | None:
        """Near its inverse, for iterations that the masses leave slow; None where they do not."""
        ...

    def times(self, values: Tensor) -> Tensor:
        """Its product (m, s) with values (m, s), float64."""
        ...

    def image(self, packed: Tensor, scales: Tensor) -> Image:
        """Return the product with values packed as halves in its layout, with scales (s,)."""
        ...


class Metric:
    """The range of a system's matrix, and sizes scaled by its masses.

    Args:
        masses: (m,) float64.
        constants: whether the matrix takes constants to 0.

    Attributes:
        masses: (m, 1).
        constants: whether the matrix takes constants to 0.
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
        """Masses^(1/2) (m,) over their length: constants, scaled."""
        return (self.masses[:, 0] / self.total).sqrt_()

    def in_range(self, values: Tensor) -> Tensor:
        """Values (m, s) less their part outside the range, 0 where there is no mass."""
        return self.less_constants(torch.where(self.masses > 0, values, 0))

    def less_constants(self, values: Tensor) -> Tensor:
        """Values (m, s) less their part outside the range, for some that are 0 where masses are."""
        if not self.constants:
            return values
        return torch.addcmul(values, self.masses, values.sum(0) / self.total, value=-1)

    def size(self, values: Tensor) -> Tensor:
        """Sizes (s,) of values (m, s), scaled by masses^(-1/2)."""
        found: Tensor = torch.linalg.vector_norm(values * self.scale, dim=0)
        return found


class Limits(NamedTuple):
    """The limits of iterations.

    Attributes:
        tolerance: of residuals over right-hand sides.
        iterations: at the most, of every direction.
    """

    tolerance: float
    iterations: int


class Near(NamedTuple):
    """The system to iterate on, and its preconditioner.

    Attributes:
        system: the matrix, or one near it.
        preconditioner: near its inverse with its masses; None for these alone.
        most: iterations of a correction, at the most; None for those of all corrections.
    """

    system: System
    preconditioner: LowRank | None = None
    most: int | None = None


class Iterates:
    """The state of s directions in PyTorch: vectors (m, s), numbers (s,), float64 unless noted.

    Args:
        metric: of the system that is solved.
        limits: when to stop.

    Attributes:
        values: the best solutions so far.
        left: their residuals.
        size: of the right-hand sides, scaled.
        now: of the residuals.
        taken: iterations so far, int64.
        pending: whether a correction is wanted, bool.
        missed: whether a target is not met and iterations are left, bool.
        correction: what iterations add to the values.
        residual: the recursive one.
        direction: whose image is wanted next.
        square: of the size of the recursive residual.
        energy: <residual, preconditioned residual>: the square, without a preconditioner.
        unknown: what rounding may have added to that residual.
        iterations: of this correction, int64.
        active: which go on, bool.
    """

    def __init__(self, metric: Metric, limits: Limits) -> None:
        self._metric, self._limits = metric, limits

    def begin(self, right: Tensor, near: Near) -> None:
        """Iterate from right-hand sides (m, s) on."""
        self._right = self.left = self._metric.in_range(right)
        self.values = torch.zeros_like(right)
        self.size = self.now = self._metric.size(self.left)
        self.target = self._limits.tolerance * self.size
        self.taken = torch.zeros_like(self.size, dtype=torch.int64)
        self.resume(near)

    def resume(self, near: Near) -> None:
        """Iterate on as `near` says, where the tolerance is not met."""
        self._near = near
        self._start(torch.ones_like(self.target, dtype=torch.bool))

    def repeat(self) -> None:
        self.step()

    def wanted(self) -> tuple[bool, bool]:
        """Whether any correction is wanted, and whether any target is missed."""
        return bool(self.pending.any()), bool(self.missed.any())

    def _start(self, more: Tensor) -> None:
        """Iterate from the residuals that are left, where there is more to do."""
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
        """Take a step of all active directions."""
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
        """Take the correction if the residual is smaller then; start again if it halves.

        Unless it took as many iterations as there may be: another way is wanted then.
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
    """One over masses, 0 where there is none."""
    return _finite(masses.reciprocal())


def _finite(powers: Tensor) -> Tensor:
    """Negative powers of masses, in place 0 where they are infinite."""
    return powers.nan_to_num_(nan=torch.nan, posinf=0, neginf=0)
