"""The solve of a comparison: all terms of its divergence, by the way that its size asks for.

Small ones have their terms side by side (`small`), equal clouds are one term, and others take their
terms in turn (`divergence`).
"""

from __future__ import annotations

from otdd_flash.errors import EpsilonOutOfRange
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.divergence import (
    Divergence,
    Known,
    Potentials,
    Pulled,
    Solved,
    solve_divergence,
    solve_identical,
)
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.schedules.geomloss import GeomlossSchedule, at_diameter
from otdd_flash.solver.small.route import backend_of, is_small, solve_small
from otdd_flash.solver.term.result import SolverProgress

# Most by which costs that float64 knows no better may move the plan and its marginals: what a solve
# has to reach by default.
MOST_GROWTH = 1e-3


def solve(
    comparison: Comparison,
    options: Schedule,
    *,
    start: Potentials | None = None,
    known: Known | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
    pulled: Pulled | None = None,
) -> Divergence:
    """Solve the divergence of two datasets, or without debiasing the cross term alone.

    Clouds of equal fingerprint are one cloud: a single self term.

    Args:
        comparison: two datasets, with class distances and epsilon.
        options: how to solve and when to stop.
        start: potentials to start from at this epsilon, by term.
        known: self terms that need no solve, though small ones get one with the others: the caller
            answers for their being of these clouds at this cost.
        progress: told of every iteration.
        solved: called after each term, as solved(name, operator, term).
        pulled: told instead, where a solve has the gradient by the points at hand.

    Raises:
        InputError: the block of W of a self term is not symmetric, an allocation fails, or epsilon
            is out of reach of the rounding of costs.
    """
    if isinstance(options, GeomlossSchedule):
        options = at_diameter(options, *(side.features for side in comparison.transformed))
    error = comparison.cost_error
    _check_error(comparison, error)
    identical = comparison.debias and comparison.identical
    with comparison.within_memory():
        small = None
        if not identical and isinstance(options, Converged) and is_small(comparison, options):
            small = solve_small(
                comparison, options, start=start, progress=progress, solved=solved, pulled=pulled
            )
        if small is not None:
            backend = backend_of(comparison)
            divergence = Divergence.of_terms(small, options, comparison.offset, backend)
        elif identical:
            divergence = solve_identical(
                comparison,
                comparison.epsilon,
                options,
                start=start,
                progress=progress,
                solved=solved,
            )
        else:
            # All of them, before the first takes its time.
            for term in comparison.terms:
                comparison.block(term)
            divergence = solve_divergence(
                comparison,
                comparison.epsilon,
                options,
                start=start,
                known=known,
                progress=progress,
                solved=solved,
            )
    return divergence.widened(error)


def _check_error(comparison: Comparison, error: float) -> None:
    """Refuse an epsilon at which the error of costs alone moves the marginals.

    Raises:
        EpsilonOutOfRange: it does.
    """
    if error > MOST_GROWTH * comparison.epsilon:
        raise EpsilonOutOfRange(
            f"{{given}} is too small for ground={comparison.ground.ground}, whose costs are off by "
            f"up to {error:.2g}: rounding alone moves the marginals by more than "
            f"{MOST_GROWTH:g}; centre the features, or raise {{name}} to about {{advised}}",
            comparison.epsilon,
            1.1 * error / MOST_GROWTH,
        )
