"""OT_epsilon of many pairs of clouds: alternating over-relaxed updates with epsilon scaling.

Every segment has its own schedule, which depends on nothing but itself. Its levels are epsilon 2^k,
from the first that is not below its mean cost; it moves to the next level when the marginal error
falls to 0.01 or ten times the tolerance. At each level the relaxation of iteration k is

    omega = 1 + min(0.95, (k - 1) / (k + 2)),

Nesterov's momentum, which needs no estimate of the rate of convergence: with the marginal error of
plain iterations falling by a factor 1 - eta each, over-relaxed ones take the order of 1 / sqrt(eta)
instead of 1 / eta. `operators.segments` says why they cannot diverge.

A plain iteration measures the marginal error of a plan with exact row sums, and ends on the values
and masses that the oscillation bound of `certificate` needs: certifying costs no further pass. An
over-relaxed iteration measures the error of a plan without exact rows, which is larger, 1 / (2 -
omega) times where one slow mode is left. So a plain iteration is tried when it falls to eight times
the tolerance, and if that was too early, when it has fallen by as much as was still missing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.segments import Segments, Update
from otdd_flash.solver.levels import LEVEL_TOLERANCE
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

MOST_MOMENTUM = 0.95
# In tolerances.
FIRST_TRIAL = 8.0


def solve_cross_terms(
    segments: Segments,
    epsilon: float,
    options: SolverOptions,
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
    level, iterations = _first_levels(segments, epsilon), torch.zeros_like(segments.mean_cost)
    # Where rounding of the costs alone exceeds the tolerance, one iteration is one too many.
    hopeless = (
        2 * rounding_floor(segments, torch.zeros_like(level), epsilon) > options.asked_tolerance
    )
    first = coarse_form(segments, options)
    if first is not None:
        rule = _Alternation(*first, epsilon, level, iterations, hopeless)
        iterations = run(first.segments, rule).iterations
        level = torch.full_like(level, epsilon)
    rule = _Alternation(segments, options, epsilon, level, iterations, hopeless)
    return run(segments, rule, finished)


def _first_levels(segments: Segments, epsilon: float) -> Tensor:
    """The first epsilon 2^k above the mean cost, k >= 0, of every segment (S,)."""
    _, exponent = torch.frexp(segments.mean_cost / epsilon)
    exponent = exponent.clamp(0, 62).to(torch.int64)
    return epsilon * (torch.ones_like(exponent) << exponent).double()


class _Alternation:
    """The state of all segments, (S,) each.

    Attributes:
        level: the current epsilon.
        iterations: in all.
        age: iterations at this level.
        error: marginal error before the last iteration.
        trial: error of an over-relaxed iteration at which a plain one is tried.
        trying: whether the next iteration is that.
    """

    def __init__(
        self,
        segments: Segments,
        options: SolverOptions,
        epsilon: float,
        level: Tensor,
        iterations: Tensor,
        hopeless: Tensor,
    ) -> None:
        self.segments, self.options, self.epsilon = segments, options, epsilon
        self.level, self.iterations, self.hopeless = level, iterations, hopeless
        self.age = self.error = torch.zeros_like(level)
        self.trial = torch.full_like(level, FIRST_TRIAL * options.asked_tolerance)
        self.trying = torch.zeros_like(hopeless)

    def step(self, active: Tensor) -> Step:
        """Update the potentials of rows and columns."""
        self.iterations = self.iterations + 1
        last = (self.iterations >= self.options.max_iterations) | self.hopeless
        level = torch.where(last, self.epsilon, self.level)
        momentum = ((self.age - 1) / (self.age + 2)).clamp(0, MOST_MOMENTUM)
        relaxation = torch.where(last | self.trying, 1.0, 1.0 + momentum)
        rows = self.segments.update(0, level, relaxation, active)
        columns = self.segments.update(1, level, relaxation, active)
        floor = rounding_floor(self.segments, rows.next_size + columns.size, level)
        error = columns.gap + floor
        done = self._advance(level, last, error, floor, relaxation == 1)
        return Step(done, self._certified(rows, columns, error, floor))

    def keep(self, order: Tensor) -> None:
        """Go on with some segments."""
        for name in ("level", "iterations", "hopeless", "age", "error", "trial", "trying"):
            setattr(self, name, getattr(self, name)[order])

    def _advance(
        self, level: Tensor, last: Tensor, error: Tensor, floor: Tensor, plain: Tensor
    ) -> Tensor:
        """Choose the next iteration; returns which segments need none."""
        tolerance = self.options.asked_tolerance
        final = level <= self.epsilon
        ends = last | (error <= torch.where(plain, tolerance, self.trial))
        # Where rounding alone exceeds the tolerance there is nothing to wait for.
        ends = final & (ends | (2 * floor > tolerance))
        missing = (0.9 * tolerance / error).clamp_max(0.7)
        failed = self.trying & ~ends
        self.trial = torch.where(failed, missing * self.error, self.trial)
        falls = ~final & (error <= max(LEVEL_TOLERANCE, 10 * tolerance))
        self.level = torch.where(falls, level / 2, level).clamp_min(self.epsilon)
        self.age = torch.where(falls, 0.0, self.age + 1)
        self.error, self.trying = error, ends & ~plain
        return ends & plain

    def _certified(
        self, rows: Update, columns: Update, error: Tensor, floor: Tensor
    ) -> SegmentTerms:
        """What a plain iteration at the final epsilon proves; of others, void."""
        segments = self.segments
        value = rows.next_value + columns.value + self.epsilon * (1 - columns.mass)
        value = value + segments.offset
        rounding = value_rounding(segments, rows.next_size + columns.size, self.epsilon)
        spread = (columns.highest - columns.lowest + segments.cost_spread) / 2
        upper = value + error * spread + rounding
        return SegmentTerms(value, value - rounding, upper, error, floor, self.iterations)
