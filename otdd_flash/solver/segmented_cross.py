"""OT_epsilon of many pairs of clouds: alternating updates, accelerated, with epsilon scaling.

    f <- T(g),  g <- T'(f),      r = T'(T(g)) - g

A look at g makes the rows of the plan exact and measures the error of its columns, so that
`evidence.segments` needs no further pass. Levels are epsilon 2^k, from the first that is not below
a tenth of the mean cost; above it a solve takes a few steps from anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.segments import Segments
from otdd_flash.solver.approach import TOP
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.evidence.segments import evaluate_cross
from otdd_flash.solver.evidence.two_passes import rounding_of
from otdd_flash.solver.segmented import Finished, SegmentTerms, coarse_form, run
from otdd_flash.solver.segmented_quasi_newton import Form, Start, iterations_of


def solve_cross_terms(
    segments: Segments, epsilon: float, options: Converged, finished: Finished | None = None
) -> SegmentTerms:
    """The terms between the rows and the columns of all segments.

    Segments with a coarse form iterate on it first, then end on their own cost.

    Args:
        segments: the problems; used up.
        epsilon: regularisation, in units of the cost.
        options: when a segment stops.
        finished: told how many segments are done.
    """
    level, none = _first_levels(segments, epsilon), torch.zeros_like(segments.mean_cost)
    # Where rounding of the costs alone exceeds the tolerance, one look is one too many.
    floor = rounding_of(segments, none, none, none, epsilon).floor
    hopeless = 2 * floor > options.asked_tolerance
    start = Start(torch.where(hopeless, epsilon, level), none)
    first = coarse_form(segments, options)
    if first is not None:
        rule = iterations_of(*first, epsilon, CROSS, start)
        iterations = run(first.segments, rule).iterations
        start = Start(torch.full_like(iterations, epsilon), iterations)
    rule = iterations_of(segments, options, epsilon, CROSS, start)
    return run(segments, rule, finished)


CROSS = Form(evaluate_cross, damping=1.0, symmetric=False)


def _first_levels(segments: Segments, epsilon: float) -> Tensor:
    """The first epsilon 2^k not below `TOP` times the mean cost, k >= 0, of each segment (S,)."""
    _, exponent = torch.frexp(TOP * segments.mean_cost / epsilon)
    exponent = exponent.clamp(0, 62).to(torch.int64)
    return epsilon * (torch.ones_like(exponent) << exponent).double()
