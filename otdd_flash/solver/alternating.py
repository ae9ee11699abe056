"""Sinkhorn's alternating updates for a cross term, with epsilon scaling and warm starts.

    f <- T(g),  g <- T'(f),      T(g)_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon)

Each update makes one marginal exact. The update of g also tells how far the plan before it was from
the column masses, so checking convergence costs nothing. Epsilon starts at the mean cost, where a
few iterations suffice, and halves each time the marginal error falls to 0.01 or ten times the
tolerance; each level starts from the potentials of the level before (Schmitzer 2019, Stabilized
sparse scaling algorithms for entropy regularized transport problems).
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.solver.certificate import certify, column_marginal, rounding_floor
from otdd_flash.solver.options import Progress, SolverOptions
from otdd_flash.solver.term import TransportTerm, check_reachable

SCALING = 0.5
LEVEL_TOLERANCE = 0.01


def solve_alternating(
    operator: Operator,
    epsilon: float,
    options: SolverOptions,
    *,
    start: Tensor | None = None,
    progress: Progress | None = None,
) -> TransportTerm:
    """OT_epsilon between the two sides of an operator.

    An operator that rounds the points iterates first; its refined form, which knows the original
    points, starts from there and ends the solve.

    Args:
        operator: the cost (n, m) and the masses.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        start: (m,) column potential to start from at the final epsilon, without scaling.
        progress: called after every iteration as progress("xy", iteration, marginal error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    # Most hopeless tolerances show before the first iteration, by the size of the costs alone.
    at_rest = torch.zeros_like(operator.a), torch.zeros_like(operator.b)
    floor = rounding_floor(operator, *at_rest, epsilon)
    check_reachable(options.tolerance, floor, epsilon, operator.dtype)
    solve = _Solve(epsilon, options, progress)
    if start is None:
        g = torch.zeros_like(operator.b, dtype=operator.dtype)
        g = solve.iterate(operator, g, max(epsilon, operator.mean_cost))
    else:
        g = solve.iterate(operator, start, epsilon)
    refined = operator.refined
    if refined is not operator:
        g = solve.iterate(refined, g, epsilon)
    return TransportTerm.from_certificate(
        certify(refined, g, epsilon),
        epsilon,
        iterations=solve.iterations,
        passes=2 * solve.iterations + 2,
        tolerance=options.tolerance,
    )


class _Solve:
    """The iterations of one term, counted over all operators that take part."""

    def __init__(self, epsilon: float, options: SolverOptions, progress: Progress | None) -> None:
        self.epsilon, self.options, self.progress = epsilon, options, progress
        self.iterations = 0

    def iterate(self, operator: Operator, g: Tensor, level: float) -> Tensor:
        """Alternate from g (m,), down from epsilon = level, until converged or out of budget."""
        tolerance = self.options.tolerance
        level_tolerance = max(LEVEL_TOLERANCE, 10 * tolerance)
        while self.iterations < self.options.max_iterations:
            f = operator.softmin_rows(g, level)
            updated = operator.softmin_columns(f, level)
            floor = rounding_floor(operator, f, g, level)
            error = _column_error(operator.b, g, updated, level) + floor
            self.iterations += 1
            if self.progress is not None:
                self.progress("xy", self.iterations, error)
            if level > self.epsilon:
                if error <= level_tolerance:
                    level = max(self.epsilon, level * SCALING)
            else:
                check_reachable(tolerance, floor, self.epsilon, operator.dtype)
                if error <= tolerance:
                    break
            g = updated
        return g


def _column_error(b: Tensor, g: Tensor, updated: Tensor, epsilon: float) -> float:
    """||c - b||_1 of the plan of (f, g), from the update of g."""
    return float((column_marginal(b, g, updated, epsilon) - b).abs().sum())
