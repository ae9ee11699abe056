"""OT_epsilon of many clouds with themselves: averaged updates of one potential.

As in `symmetric`, f <- (f + T(f)) / 2, an update of relaxation 1/2, converges in ten to twenty
steps at any epsilon, and the bounds are those by oscillation of `certificate`, with one bound
more: of a plan with row sums r and mass t, ||r / t - a||_1 <= ||r - a||_1 + |t - 1|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.segments import Segments, Update
from otdd_flash.solver.options import SolverOptions
from otdd_flash.solver.segmented import (
    Finished,
    SegmentTerms,
    Step,
    coarse_form,
    rounding_floor,
    run,
    value_rounding,
)


def solve_self_terms(
    segments: Segments,
    epsilon: float,
    options: SolverOptions,
    finished: Finished | None = None,
) -> SegmentTerms:
    """The terms of all segments, whose rows are their columns; arguments as `solve_cross_terms`."""
    iterations = torch.zeros_like(segments.mean_cost)
    first = coarse_form(segments, options)
    if first is not None:
        rule = _Averaging(*first, epsilon, iterations)
        iterations = run(first.segments, rule).iterations
    return run(segments, _Averaging(segments, options, epsilon, iterations), finished)


class _Averaging:
    """The state of all segments: their iterations (S,)."""

    def __init__(
        self, segments: Segments, options: SolverOptions, epsilon: float, iterations: Tensor
    ) -> None:
        self.segments, self.options, self.iterations = segments, options, iterations
        self.epsilon = torch.full_like(iterations, epsilon)
        self.half = torch.full_like(iterations, 0.5)

    def step(self, active: Tensor) -> Step:
        """Average every potential with its softmin."""
        self.iterations = self.iterations + 1
        seen = self.segments.update(0, self.epsilon, self.half, active)
        floor = rounding_floor(self.segments, 2 * seen.size, self.epsilon)
        error = seen.gap + (seen.mass - 1).abs() + floor
        last = self.iterations >= self.options.max_iterations
        tolerance = self.options.asked_tolerance
        done = (error <= tolerance) | last | (2 * floor > tolerance)
        return Step(done, self._certified(seen, error, floor))

    def keep(self, order: Tensor) -> None:
        """Go on with some segments."""
        self.iterations, self.epsilon = self.iterations[order], self.epsilon[order]
        self.half = self.half[order]

    def _certified(self, seen: Update, error: Tensor, floor: Tensor) -> SegmentTerms:
        """What the plan of the potential before the update proves, shifted to mass 1."""
        segments, epsilon = self.segments, self.epsilon
        shift = epsilon * seen.mass.log()
        value = 2 * seen.value - shift + segments.offset
        rounding = value_rounding(segments, 2 * seen.size + shift.abs(), epsilon)
        upper = value + error * (seen.highest - seen.lowest + segments.cost_spread) + rounding
        return SegmentTerms(value, value - rounding, upper, error, floor, self.iterations)
