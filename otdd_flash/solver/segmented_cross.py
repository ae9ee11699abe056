"""OT_epsilon of many pairs of clouds: alternating updates, accelerated, with epsilon scaling.

    f <- T(g),  g <- T'(f),      r = T'(T(g)) - g

A look at g makes the rows of the plan exact and measures the error of its columns, so it also is
what certifies: the oscillation bound of `certificate` needs no further pass. Levels are epsilon
2^k, from the first that is not below a tenth of the mean cost; above it a solve takes a few steps
from anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.segments import Look, Segments
from otdd_flash.solver.approach import TOP
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


def solve_cross_terms(
    segments: Segments,
    epsilon: float,
    options: Converged,
    finished: Finished | None = None,
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
    floor = rounding_of(segments, Plan(none, none, none), epsilon).floor
    hopeless = 2 * floor > options.asked_tolerance
    start = Start(torch.where(hopeless, epsilon, level), none)
    first = coarse_form(segments, options)
    if first is not None:
        rule = iterations_of(*first, epsilon, CROSS, start)
        iterations = run(first.segments, rule).iterations
        start = Start(torch.full_like(iterations, epsilon), iterations)
    rule = iterations_of(segments, options, epsilon, CROSS, start)
    return run(segments, rule, finished)


def show_cross(segments: Segments, look: Look, epsilon: Tensor) -> Shown:
    """What a look tells of the plan of f = T(g) and g, whose row sums are exact.

    Upper bounds are those by oscillation, from exact f and the marginal error that they would have.
    """
    size = look.row_size + look.size
    floor, rounding = rounding_of(segments, Plan(look.row_size, size, look.gap), epsilon)
    error = (look.gap + floor).clamp_max(MOST_ERROR)
    # Of exact rows, whose mass is 1.
    exact = look.row_value + look.value
    dual = exact + epsilon * (1 - look.mass)
    value, highest = dual + segments.offset, torch.maximum(exact, dual) + segments.offset
    spread = (look.highest - look.lowest + segments.cost_spread) / 2
    return Shown(
        dual,
        gain=look.mean_residual + epsilon * (look.mass - 1),
        noise=rounding_noise(segments, size, epsilon),
        floor=floor,
        value=value,
        lower=value - rounding,
        upper=highest + error * spread + rounding,
        error=error,
    )


CROSS = Form(show_cross, damping=1.0, symmetric=False)


def _first_levels(segments: Segments, epsilon: float) -> Tensor:
    """The first epsilon 2^k not below `TOP` times the mean cost, k >= 0, of each segment (S,)."""
    _, exponent = torch.frexp(TOP * segments.mean_cost / epsilon)
    exponent = exponent.clamp(0, 62).to(torch.int64)
    return epsilon * (torch.ones_like(exponent) << exponent).double()
