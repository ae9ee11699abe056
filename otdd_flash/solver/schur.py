"""How potentials answer to a change of the cost: one linear system for a plan P with sums r and c.

    diag(r) w1 + P w2   = s1
    P^T w1 + diag(c) w2 = s2

By w1 = (s1 - P w2) / r there is left the Schur complement

    S w2 = s2 - P^T (s1 / r),      S = diag(c) - P^T diag(1 / r) P.

It is symmetric and positive but for constants, whose image is 0; scaled by c^(-1/2) on both sides
its eigenvalues lie in [0, 1]. Between a cloud and itself, where both potentials are one, the system
is (diag(r) + P) w = s, scaled with eigenvalues in [0, 2], in [1, 2] for squared distances.

Both are solved by conjugate gradients scaled by the masses (Jacobi), every direction by itself, the
products of all in one pass. Residuals keep no part outside the range of S: their sum is 0. Products
may be those of a rounded plan with its own sums; then the residual of the plan itself corrects the
solution (iterative refinement, as Higham 2002, Accuracy and stability of numerical algorithms).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.arguments import CG_OPTIONS
from otdd_flash.checks import check_fields
from otdd_flash.operators.plan import Products

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


class System(Protocol):
    """A symmetric, positive semi-definite matrix (m, m) whose rows belong to points.

    Attributes:
        masses: (m,) float64, by which it is scaled; points without mass have rows of 0.
        constants: whether it takes constants to 0.
        precision: of its products, relative to what they multiply, both scaled.
    """

    masses: Tensor
    constants: bool
    precision: float

    def times(self, values: Tensor) -> Tensor:
        """Its product (m, s) with values (m, s), float64."""
        ...


class SchurSystem:
    """S + delta diag(c) of a plan between two clouds."""

    def __init__(self, plan: Products, damping: float = 0.0) -> None:
        self._plan, self.masses, self.precision = plan, plan.columns, plan.precision
        self.constants, self._scale = damping == 0, 1 + damping

    def times(self, values: Tensor) -> Tensor:
        """S w (m, s)."""
        image = self._plan.times(values).mul_(inverse(self._plan.rows)[:, None])
        scaled = (self._scale * self.masses)[:, None] * values
        return scaled.sub_(self._plan.transposed_times(image))


class SelfSystem:
    """(1 + delta) diag(r) + P of a symmetric plan."""

    constants = False

    def __init__(self, plan: Products, damping: float = 0.0) -> None:
        self._plan, self.masses, self.precision = plan, plan.rows, plan.precision
        self._scale = 1 + damping

    def times(self, values: Tensor) -> Tensor:
        """(diag(r) + P) w (n, s)."""
        return (self._scale * self.masses)[:, None] * values + self._plan.times(values)


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

    A direction is given up where the recomputed residual no longer halves from one correction to
    the next, or where rounding makes the matrix seem to have no positive direction left.

    Args:
        system: the matrix.
        rounded: the same, or one near it whose products take less time.
        right: in the range of the matrix, but for rounding.
        options: when to stop.
    """
    right = _in_range(system, right)
    size = _size(system, right)
    target = options.tolerance * size
    values, left, now = torch.zeros_like(right), right, size
    iterations = torch.zeros_like(size, dtype=torch.int64)
    pending = now > target
    for _ in range(1 + REFINEMENTS):
        if not bool(pending.any()):
            break
        goal = torch.where(pending, AIM * target, torch.inf)
        most = options.max_iterations - iterations
        correction, taken = conjugate_gradients(rounded, left, goal, most)
        iterations += taken
        corrected = values + correction
        after = _in_range(system, right - system.times(corrected))
        found = _size(system, after)
        better = pending & (found < now)
        values, left = (
            torch.where(better, new, old) for new, old in ((corrected, values), (after, left))
        )
        # In float64 nothing is lost by going on from where it is; in less, rounding decides.
        pending &= (found <= now / 2) & (found > target) & (iterations < options.max_iterations)
        now = torch.where(better, found, now)
    residual = torch.where(size > 0, now / size.clamp_min(torch.finfo(size.dtype).tiny), 0)
    return Solution(values, left, residual, iterations, now <= target)


def conjugate_gradients(
    system: System, right: Tensor, goal: Tensor, most: Tensor
) -> tuple[Tensor, Tensor]:
    """Solutions (m, s) from 0, and the iterations (s,) that each took.

    Every step adds the rounding of its product to what the recursive residual does not know of
    (van der Vorst & Ye 2000, Residual replacement strategies for Krylov subspace iterative methods
    for the convergence of true residuals). A step that would bring it above the residual itself,
    such as a long one where the matrix is 0 but for rounding, is not taken and ends the direction.

    Args:
        system: the matrix.
        right: (m, s) float64.
        goal: (s,) size of the recursive residual to stop at.
        most: (s,) int64, iterations at the most.
    """
    scale = inverse(system.masses)[:, None]
    values, left = torch.zeros_like(right), _in_range(system, right)
    scaled = scale * left
    direction, size = scaled, (left * scaled).sum(0)
    iterations, unknown = torch.zeros_like(most), torch.zeros_like(size)
    active = (size > goal.square()) & (most > 0)
    while bool(active.any()):
        image = system.times(direction)
        energy = (direction * image).sum(0)
        length = (direction.square() * system.masses[:, None]).sum(0).sqrt()
        positive = energy > 0
        step = torch.where(positive, size / torch.where(positive, energy, 1), 0)
        unknown += system.precision * step * length
        active &= positive & (unknown <= size.sqrt())
        step = torch.where(active, step, 0)
        values += step * direction
        left = _in_range(system, left - step * image)
        scaled = scale * left
        after = (left * scaled).sum(0)
        kept = torch.where(active, after / torch.where(active, size, 1), 0)
        direction = scaled + kept * direction
        iterations += active
        size = torch.where(active, after, size)
        active &= (size > goal.square()) & (iterations < most)
    return values, iterations


def inverse(masses: Tensor) -> Tensor:
    """One over masses, 0 where there is none."""
    return torch.where(masses > 0, 1 / masses, 0)


def _in_range(system: System, values: Tensor) -> Tensor:
    """Values (m, s) less their part outside the range of the matrix, 0 where there is no mass."""
    masses = system.masses[:, None]
    values = torch.where(masses > 0, values, 0)
    if not system.constants:
        return values
    return values - masses * (values.sum(0) / masses.sum())


def _size(system: System, values: Tensor) -> Tensor:
    """Sizes (s,) of values (m, s), scaled by masses^(-1/2)."""
    return (values.square() * inverse(system.masses)[:, None]).sum(0).sqrt()
