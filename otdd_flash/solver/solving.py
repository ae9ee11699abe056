"""The solve of a comparison: the choice of a route by its size.

Distances, losses, derivatives and given matrices all call `solve`. The terms of small problems are
solved all at once (`small`), equal clouds are one term, and other problems solve their terms in
turn (`divergence`).
"""

from __future__ import annotations

from dataclasses import replace

from otdd_flash.errors import InputError
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.divergence import (
    Compared,
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
from otdd_flash.solver.schedules.geomloss import GeomlossSchedule
from otdd_flash.solver.small.route import is_small, solve_small
from otdd_flash.solver.term import SolverProgress


def solve(
    comparison: Compared,
    options: Schedule,
    *,
    start: Potentials | None = None,
    known: SolvedTerms | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
    gradient_callbacks: GradientCallbacks | None = None,
) -> Divergence:
    """Solve the divergence of a comparison, or without debiasing the cross term alone.

    Clouds of equal fingerprint are one cloud: a single self term.

    Args:
        comparison: two datasets with class distances, or a matrix with its masses; with epsilon.
        options: how to solve and when to stop.
        start: potentials to start from at this epsilon, by term.
        known: self terms that are solved already, though small problems solve them again; the
            caller guarantees that they are of these clouds at this cost.
        progress: called in every iteration.
        solved: called after each term, as solved(name, operator, term).
        gradient_callbacks: called instead, if the solve computes the gradients by points itself.

    Raises:
        InputError: the block of W of a self term is not symmetric, an allocation fails, or rounding
            alone exceeds the tolerance at this epsilon and precision.
    """
    if isinstance(comparison, Comparison):
        refuse_below_zero(comparison)
    if isinstance(options, Exact):
        from otdd_flash.solver.exact.solve import solve_exact

        with comparison.within_memory():
            return solve_exact(comparison, options, progress=progress)
    if isinstance(options, GeomlossSchedule) and options.diameter is None:
        options = replace(options, diameter=comparison.diameter)
    with comparison.within_memory():
        if len(comparison.terms) > 1 and comparison.identical:
            found = solve_identical(
                comparison, options, start=start, progress=progress, solved=solved
            )
            return found.widened(comparison.cost_error)
        if isinstance(options, Converged) and is_small(comparison, options):
            small = solve_small(
                comparison,
                options,
                start=start,
                progress=progress,
                solved=solved,
                gradient_callbacks=gradient_callbacks,
            )
            if small is not None:
                return small.widened(comparison.cost_error)
        found = solve_divergence(
            comparison, options, start=start, known=known, progress=progress, solved=solved
        )
        return found.widened(comparison.cost_error)


def refuse_below_zero(comparison: Comparison) -> None:
    """Raise an `InputError` for relaxed marginals where costs may be below 0."""
    if not comparison.constraints.exact and comparison.below_zero:
        raise InputError(
            "unbalanced needs costs of which 0 is the least, and class distances of several labels "
            "are below 0 here; take labels=means, labels.diagonal=true or a tree"
        )
