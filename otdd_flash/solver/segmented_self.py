"""OT_epsilon of many clouds with themselves: accelerated averaged updates of one potential.

As in `symmetric`, the plain update is f <- (f + T(f)) / 2, of damping 1/2. The bounds are those by
oscillation of `certificate`, with one bound more: of a plan with row sums r and mass t,
||r / t - a||_1 <= ||r - a||_1 + |t - 1|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.segments import Look, Segments
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.segmented import (
    MOST_ERROR,
    Finished,
    Plan,
    SegmentTerms,
    coarse_form,
    rounding_noise,
    rounding_of,
    run,
)
from otdd_flash.solver.segmented_quasi_newton import Form, Shown, Start, iterations_of


def solve_self_terms(
    segments: Segments,
    epsilon: float,
    options: Converged,
    finished: Finished | None = None,
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


def show_self(segments: Segments, look: Look, epsilon: Tensor) -> Shown:
    """What a look tells of the plan of one potential, shifted to mass 1."""
    off = look.gap + (look.mass - 1).abs()
    shift = epsilon * look.mass.log()
    size = 2 * look.size + shift.abs()
    # Potentials are taken as they are stored.
    floor, rounding = rounding_of(segments, Plan(torch.zeros_like(off), size, off), epsilon)
    error = (off + floor).clamp_max(MOST_ERROR)
    dual = 2 * look.value - shift
    value = dual + segments.offset
    return Shown(
        dual,
        gain=look.mean_residual + shift,
        noise=rounding_noise(segments, 2 * look.size, epsilon),
        floor=floor,
        value=value,
        lower=value - rounding,
        upper=value + error * (look.highest - look.lowest + segments.cost_spread) + rounding,
        error=error,
    )


SELF = Form(show_self, damping=0.5, symmetric=True)
