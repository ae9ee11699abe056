"""Conjugate gradients for a matrix whose rows belong to masses, with several right-hand sides.

The matrix is scaled by its masses (Jacobi), every direction goes by itself, and products of all of
them share one pass. Residuals keep no part outside the range: their sum is 0 where constants are
taken to 0.

Every step adds the rounding of its product to what the recursive residual does not know of (van der
Vorst & Ye 2000, Residual replacement strategies for Krylov subspace iterative methods for the
convergence of true residuals). A step that would bring it above the residual itself, such as a long
one where the matrix is 0 but for rounding, is not taken and ends the direction.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.engine.late_reader import LateReader

# Rows from which on a product takes longer than launching the next one.
MANY_ROWS = 1 << 14


class System(Protocol):
    """A symmetric, positive semi-definite matrix (m, m) whose rows belong to points."""

    @property
    def metric(self) -> Metric:
        """Its range, and the masses that it is scaled by; points without mass have rows of 0."""
        ...

    @property
    def precision(self) -> float:
        """Of its products, relative to what they multiply, both scaled."""
        ...

    @property
    def in_triton(self) -> bool:
        """Whether its products run in Triton."""
        ...

    def times(self, values: Tensor) -> Tensor:
        """Its product (m, s) with values (m, s), float64."""
        ...


def conjugate_gradients(
    system: System, right: Tensor, goal: Tensor, most: Tensor
) -> tuple[Tensor, Tensor]:
    """Solutions (m, s) from 0, and the iterations (s,) that each took.

    Args:
        system: the matrix.
        right: (m, s) float64, in the system's range.
        goal: (s,) size of the recursive residual to stop at.
        most: (s,) int64, iterations at the most.
    """
    iterates = Iterates(system, right, goal, most)
    reader: LateReader[None] = LateReader(wait=len(right) >= MANY_ROWS)
    reading = reader.exchange(iterates.active, None)
    while reading is None or any(reading.numbers):
        iterates.advance(system.times(iterates.direction))
        reading = reader.exchange(iterates.active, None)
    return iterates.values, iterates.iterations


class Metric:
    """The range of a system's matrix, and sizes scaled by its masses.

    Args:
        masses: (m,) float64.
        constants: whether the matrix takes constants to 0.

    Attributes:
        masses: (m, 1).
        inverse: one over them, 0 where there is none.
        total: of the masses, ().
        constants: as said.
    """

    def __init__(self, masses: Tensor, *, constants: bool) -> None:
        self.masses, self.constants = masses[:, None], constants
        self.inverse, self.total = inverse(self.masses), self.masses.sum()
        self._present = self.masses > 0

    def in_range(self, values: Tensor) -> Tensor:
        """Values (m, s) less their part outside the range, 0 where there is no mass."""
        values = torch.where(self._present, values, 0)
        if not self.constants:
            return values
        return torch.addcmul(values, self.masses, values.sum(0) / self.total, value=-1)

    def size(self, values: Tensor) -> Tensor:
        """Sizes (s,) of values (m, s), scaled by masses^(-1/2)."""
        return (values.square() * self.inverse).sum(0).sqrt()


class Iterates:
    """Where s directions are; vectors (m, s) float64 whose columns are contiguous.

    Attributes:
        values: solutions so far.
        left: recursive residuals.
        direction: whose image is wanted next.
        size: of the residuals, scaled and squared, (s,).
        unknown: what rounding may have added to the residuals, (s,).
        iterations: (s,) int64.
        active: which go on, (s,) bool.
    """

    def __init__(self, system: System, right: Tensor, goal: Tensor, most: Tensor) -> None:
        self._metric = metric = system.metric
        self._precision, self._goal, self._most = system.precision, goal, most
        self.left = right.T.clone(memory_format=torch.contiguous_format).T
        self.values = torch.zeros_like(self.left)
        self.direction = metric.inverse * self.left
        self.size = (self.left * self.direction).sum(0)
        self.unknown = torch.zeros_like(self.size)
        self.iterations = torch.zeros_like(most)
        self.active = (self.size > goal.square()) & (most > 0)
        self._in_triton = system.in_triton

    def advance(self, image: Tensor) -> None:
        """Take the step that the image (m, s) of the directions leads to."""
        (self.step_in_triton if self._in_triton else self.step)(image)

    def step(self, image: Tensor) -> None:
        """In PyTorch."""
        metric = self._metric
        energy = (self.direction * image).sum(0)
        length = (self.direction.square() * metric.masses).sum(0).sqrt()
        positive = energy > 0
        step = torch.where(positive, self.size / torch.where(positive, energy, 1), 0)
        self.unknown += self._precision * step * length
        self.active &= positive & (self.unknown <= self.size.sqrt())
        step = torch.where(self.active, step, 0)
        self.values += step * self.direction
        self.left = metric.in_range(self.left - step * image)
        scaled = metric.inverse * self.left
        after = (self.left * scaled).sum(0)
        kept = torch.where(self.active, after / torch.where(self.active, self.size, 1), 0)
        self.direction = scaled + kept * self.direction
        self.iterations += self.active
        self.size = torch.where(self.active, after, self.size)
        self.active &= (self.size > self._goal.square()) & (self.iterations < self._most)

    def step_in_triton(self, image: Tensor) -> None:
        """The same in one launch."""
        from otdd_flash.kernels.linear.cg_step import cg_step

        cg_step(
            image,
            self._metric.masses,
            self._metric.total,
            (self.values, self.left, self.direction),
            (self.size, self.unknown, self.iterations, self.active),
            (self._goal, self._most),
            self._precision,
            constants=self._metric.constants,
        )


def inverse(masses: Tensor) -> Tensor:
    """One over masses, 0 where there is none."""
    return torch.where(masses > 0, 1 / masses, 0)
