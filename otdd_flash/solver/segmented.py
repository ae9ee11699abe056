"""OT_epsilon of many pairs of clouds, or of many clouds with themselves, all at once.

A segment is one of these problems. If segments have a faster form (`coarse`), iterations use that
first and end on the segments themselves. `labels.sinkhorn_pairs` solves tables of class distances
here; `solver.solve` solves a single term.
"""

from __future__ import annotations

import torch

from otdd_flash.engine.problems import Segments, Start, numbers_of
from otdd_flash.engine.run import Finished, SegmentTerms, run
from otdd_flash.formulas.decision import CROSS, SELF, Form, Goal, Levels, first_level
from otdd_flash.formulas.evidence import rounding_of
from otdd_flash.solver.schedules.converged import Converged


def solve_cross_terms(
    segments: Segments,
    epsilon: float,
    options: Converged,
    finished: Finished | None = None,
) -> SegmentTerms:
    """Solve the cross terms, between rows and columns, of all segments.

    Args:
        segments: the problems; modified in place.
        epsilon: regularisation, in units of the cost.
        options: when a segment stops.
        finished: called with the number of segments that are done.
    """
    none = torch.zeros_like(segments.mean_cost)
    # Where rounding of the costs alone exceeds the tolerance, levels above would be in vain.
    floor = rounding_of(numbers_of(segments), none, none, none, epsilon).floor
    hopeless = 2 * floor > options.asked_tolerance
    top = torch.where(hopeless, epsilon, first_level(epsilon, segments.mean_cost))
    return _solve(segments, CROSS, epsilon, options, Levels.trying(epsilon, top), finished)


def solve_self_terms(
    segments: Segments,
    epsilon: float,
    options: Converged,
    finished: Finished | None = None,
) -> SegmentTerms:
    """Solve the self terms of all segments, of one cloud each; arguments as `solve_cross_terms`."""
    level = torch.full_like(segments.mean_cost, epsilon)
    return _solve(segments, SELF, epsilon, options, Levels.descending(level), finished)


def _solve(
    segments: Segments,
    form: Form,
    epsilon: float,
    options: Converged,
    levels: Levels,
    finished: Finished | None,
) -> SegmentTerms:
    tolerance, most = options.asked_tolerance, options.max_iterations
    goal = Goal(epsilon, tolerance, tolerance, most)
    candidate, start = segments.first, Start(levels, torch.zeros_like(levels.level))
    coarse = segments.coarse(tolerance) if most > 1 else None
    if coarse is not None:
        # One iteration is left for the segments' own costs.
        first = goal._replace(max_iterations=most - 1)
        iterations = coarse.iterations(candidate, first, form, start)
        taken = run(iterations).iterations
        candidate = iterations.vectors.candidates
        # Free their memory for the iterations that follow.
        del iterations, coarse
        final = torch.full_like(levels.level, epsilon)
        start = Start(Levels.descending(final), taken)
    return run(segments.iterations(candidate, goal, form, start), finished)
