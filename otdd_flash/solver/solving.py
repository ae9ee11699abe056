"""The solve of a comparison of two datasets: the choice of a route by its size.

The terms of small problems are solved all at once (`small`), equal clouds are one term, and other
problems solve their terms in turn (`divergence`). Distances, losses and derivatives all call
`solve`; given matrices have their own, `solver.matrix.transport`.
"""

from __future__ import annotations

from otdd_flash.errors import EpsilonOutOfRange
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.divergence import (
    Divergence,
    GradientCallbacks,
    Potentials,
    Solved,
    SolvedTerms,
    solve_divergence,
    solve_identical,
)
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.schedules.exact import Exact
from otdd_flash.solver.schedules.geomloss import GeomlossSchedule, at_diameter
from otdd_flash.solver.small.route import backend_of, is_small, solve_small
from otdd_flash.solver.term.result import SolverProgress

# The largest effect on the marginals that the rounding of costs in float64 may have: as large as
# the default tolerance.
MOST_GROWTH = 1e-3


def solve(
    comparison: Comparison,
    options: Schedule,
    *,
    start: Potentials | None = None,
    known: SolvedTerms | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
    gradient_callbacks: GradientCallbacks | None = None,
) -> Divergence:
    """Solve the divergence of two datasets, or without debiasing the cross term alone.

    Clouds of equal fingerprint are one cloud: a single self term.

    Args:
        comparison: two datasets, with class distances and epsilon.
        options: how to solve and when to stop.
        start: potentials to start from at this epsilon, by term.
        known: self terms that are solved already, though small problems solve them again; the
            caller guarantees that they are of these clouds at this cost.
        progress: called in every iteration.
        solved: called after each term, as solved(name, operator, term).
        gradient_callbacks: called instead, if the solve computes the gradients by points itself.

    Raises:
        InputError: the block of W of a self term is not symmetric, an allocation fails, or epsilon
            is out of reach of the rounding of costs.
    """
    if isinstance(options, Exact):
        from otdd_flash.solver.exact.solve import solve_exact

        with comparison.within_memory():
            return solve_exact(comparison, options, progress=progress)
    if isinstance(options, GeomlossSchedule):
        options = at_diameter(options, *(side.features for side in comparison.transformed))
    error = comparison.cost_error
    _check_error(comparison, error)
    identical = comparison.debias and comparison.identical
    with comparison.within_memory():
        small = None
        if not identical and isinstance(options, Converged) and is_small(comparison, options):
            small = solve_small(
                comparison,
                options,
                start=start,
                progress=progress,
                solved=solved,
                gradient_callbacks=gradient_callbacks,
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
            # Check all blocks of W before the first term is solved.
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
    """Refuse an epsilon at which the error of costs alone moves the marginals by `MOST_GROWTH`.

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
