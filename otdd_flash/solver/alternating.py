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

    Args:
        operator: the cost (n, m) and the masses.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        start: (m,) column potential to start from at the final epsilon, without scaling.
        progress: called after every iteration as progress("xy", iteration, marginal error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    g = torch.zeros_like(operator.b, dtype=operator.dtype) if start is None else start
    level_tolerance = max(LEVEL_TOLERANCE, 10 * options.tolerance)
    level = epsilon if start is not None else max(epsilon, operator.mean_cost)
    # Most hopeless tolerances show before the first iteration, by the size of the costs alone.
    at_rest = torch.zeros_like(operator.a), torch.zeros_like(operator.b)
    floor = rounding_floor(operator, *at_rest, epsilon)
    check_reachable(options.tolerance, floor, epsilon, operator.dtype)
    for iteration in range(1, options.max_iterations + 1):
        f = operator.softmin_rows(g, level)
        updated = operator.softmin_columns(f, level)
        floor = rounding_floor(operator, f, g, level)
        error = _column_error(operator.b, g, updated, level) + floor
        if progress is not None:
            progress("xy", iteration, error)
        if level > epsilon:
            g = updated
            if error <= level_tolerance:
                level = max(epsilon, level * SCALING)
            continue
        check_reachable(options.tolerance, floor, epsilon, operator.dtype)
        if error <= options.tolerance:
            break
        g = updated
    return TransportTerm.from_certificate(
        certify(operator, g, epsilon),
        epsilon,
        iterations=iteration,
        passes=2 * iteration + 2,
        tolerance=options.tolerance,
    )


def _column_error(b: Tensor, g: Tensor, updated: Tensor, epsilon: float) -> float:
    """||c - b||_1 of the plan of (f, g), from the update of g."""
    return float((column_marginal(b, g, updated, epsilon) - b).abs().sum())
