"""OT_epsilon of many clouds with themselves: accelerated averaged updates of one potential.

As in `symmetric`, the plain update is f <- (f + T(f)) / 2, of damping 1/2.
"""

from __future__ import annotations

import torch

from otdd_flash.operators.segments import Segments
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.evidence.segments import evaluate_self
from otdd_flash.solver.segmented import Finished, SegmentTerms, coarse_form, run
from otdd_flash.solver.segmented_quasi_newton import Form, Start, iterations_of


def solve_self_terms(
    segments: Segments, epsilon: float, options: Converged, finished: Finished | None = None
) -> SegmentTerms:
    """The terms of all segments, whose rows are their columns; arguments as `solve_cross_terms`."""
    level = torch.full_like(segments.mean_cost, epsilon)
    start = Start(level, torch.zeros_like(level))
    first = coarse_form(segments, options)
    if first is not None:
        rule = iterations_of(*first, epsilon, SELF, start)
        start = Start(level, run(first.segments, rule).iterations)
    rule = iterations_of(segments, options, epsilon, SELF, start)
    return run(segments, rule, finished)


SELF = Form(evaluate_self, damping=0.5, symmetric=True)
