"""How potentials answer to a change of the cost: one linear system for a plan P with sums r and c.

    diag(r) w1 + P w2   = s1
    P^T w1 + diag(c) w2 = s2

By w1 = (s1 - P w2) / r there is left the Schur complement

    S w2 = s2 - P^T (s1 / r),      S = diag(c) - P^T diag(1 / r) P.

It is symmetric and positive but for constants, whose image is 0; scaled by c^(-1/2) on both sides
its eigenvalues lie in [0, 1]. Between a cloud and itself, where both potentials are one, the system
is (diag(r) + P) w = s, scaled with eigenvalues in [0, 2], in [1, 2] for squared distances.

Both are solved by `conjugate_gradients`. Products may be those of a rounded plan with its own sums;
then the residual of the plan itself corrects the solution (iterative refinement, as Higham 2002,
Accuracy and stability of numerical algorithms).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.arguments.transport import CG_OPTIONS
from otdd_flash.checks import check_fields
from otdd_flash.operators.plan import Products
from otdd_flash.solver.conjugate_gradients import Metric, System, conjugate_gradients, inverse

# Corrections by the residual of the plan itself.
REFINEMENTS = 3

# What part of the tolerance conjugate gradients aim at: corrections then rarely follow.
AIM = 0.5


@dataclass(frozen=True)
class CGOptions:
    """When conjugate gradients stop.

    Attributes:
        tolerance: of the residual over the right-hand side, both scaled by the masses.
        max_iterations: for every direction and system.
        damping: delta >= 0 solves with S + delta diag(c), or (1 + delta) diag(r) + P: for systems
            that are nearly singular. It changes the solution.

    Raises:
        InputError: a tolerance outside of (0, 1), no iteration, a negative damping.
    """

    tolerance: float = 1e-5
    max_iterations: int = 1000
    damping: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, CG_OPTIONS, "cg.")


DEFAULTS = CGOptions()


class SchurSystem:
    """S + delta diag(c) of a plan between two clouds."""

    def __init__(self, plan: Products, damping: float = 0.0) -> None:
        self._plan, self.precision, self.in_triton = plan, plan.precision, plan.in_triton
        self._damping = damping

    @cached_property
    def metric(self) -> Metric:
        """Of column sums c; constants go to 0 without damping."""
        return Metric(self._plan.columns, constants=self._damping == 0)

    @cached_property
    def _by_row(self) -> Tensor:
        return inverse(self._plan.rows)[:, None]

    @cached_property
    def _scaled_masses(self) -> Tensor:
        return (1 + self._damping) * self.metric.masses

    def times(self, values: Tensor) -> Tensor:
        """S w (m, s)."""
        image = self._plan.times(values).mul_(self._by_row)
        taken = self._plan.transposed_times(image)
        return torch.addcmul(taken.neg_(), self._scaled_masses, values)


class SelfSystem:
    """(1 + delta) diag(r) + P of a symmetric plan."""

    def __init__(self, plan: Products, damping: float = 0.0) -> None:
        self._plan, self.precision, self.in_triton = plan, plan.precision, plan.in_triton
        self._damping = damping

    @cached_property
    def metric(self) -> Metric:
        """Of row sums r."""
        return Metric(self._plan.rows, constants=False)

    @cached_property
    def _scaled_masses(self) -> Tensor:
        return (1 + self._damping) * self.metric.masses

    def times(self, values: Tensor) -> Tensor:
        """(diag(r) + P) w (n, s)."""
        return torch.addcmul(self._plan.times(values), self._scaled_masses, values)


class Solution(NamedTuple):
    """Of one system with s right-hand sides.

    Attributes:
        values: (m, s) float64.
        left: the residual (m, s) of `values`, recomputed.
        residual: its size over that of the right-hand side, (s,).
        iterations: of conjugate gradients, (s,) int64.
        converged: (s,) bool.
    """

    values: Tensor
    left: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor


def solve(system: System, rounded: System, right: Tensor, options: CGOptions) -> Solution:
    """Solve for right-hand sides (m, s), float64.

    Where the recomputed residual no longer halves from one correction to the next, the matrix near
    it is too far away and iterations go on with the matrix itself; then rounding makes it seem to
    have no positive direction left, and the direction is given up.

    Args:
        system: the matrix.
        rounded: the same, or one near it whose products take less time.
        right: in the range of the matrix, but for rounding.
        options: when to stop.
    """
    metric = system.metric
    right = metric.in_range(right)
    size = metric.size(right)
    target = options.tolerance * size
    values, left, now = torch.zeros_like(right), right, size
    iterations = torch.zeros_like(size, dtype=torch.int64)
    for near in (rounded,) if rounded is system else (rounded, system):
        pending = (now > target) & (iterations < options.max_iterations)
        for _ in range(1 + REFINEMENTS):
            if not bool(pending.any()):
                break
            goal = torch.where(pending, AIM * target, torch.inf)
            most = options.max_iterations - iterations
            correction, taken = conjugate_gradients(near, left, goal, most)
            iterations += taken
            corrected = values + correction
            after = metric.in_range(right - system.times(corrected))
            found = metric.size(after)
            better = pending & (found < now)
            values, left = (
                torch.where(better, new, old) for new, old in ((corrected, values), (after, left))
            )
            pending &= (found <= now / 2) & (found > target)
            pending &= iterations < options.max_iterations
            now = torch.where(better, found, now)
    residual = torch.where(size > 0, now / size.clamp_min(torch.finfo(size.dtype).tiny), 0)
    return Solution(values, left, residual, iterations, now <= target)
