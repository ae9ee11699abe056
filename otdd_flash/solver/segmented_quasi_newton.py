"""The iterations of many problems side by side: the quasi-Newton method of `quasi_newton`.

Every segment has its own differences, trust and level of epsilon, which depend on nothing but
itself. A level is left when its marginal error falls to `LEVEL_TOLERANCE` or the tolerance. A
segment is done with a look at the final epsilon whose marginal error is within the tolerance.

Where rounding is near the marginal error, iterations may get nowhere although the floor is below
the tolerance. A segment whose marginal error has not fallen to `FALLEN` of what it was, nor its
dual risen by more than its rounding, in `STALLED` of them ends there, and calls all of its error
rounding. The floor is a worst case, often near a tenth of the tolerance: a slow solve may still be
on its way there, so that its error has to halve would end some that converge. A tenth ends noise as
surely, because lows of noise do not go on falling: 22 tenths are all that ten floors are from one.

This file is the reference; where passes run in Triton, `segmented_kernels` does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.segments import MEMORY, Look, Move, Segments, TritonSegments
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.evidence.segments import Evidence
from otdd_flash.solver.segmented import Rule, Step
from otdd_flash.solver.segmented_differences import Differences
from otdd_flash.solver.trust import Trust

LEVEL_TOLERANCE = 0.05

# What a difference of duals may be off by, in units of what a single softmin may be off by: over
# the points of a cloud most of that averages out.
DUAL_ROUNDING = 0.25

# Iterations without progress after which the marginal error is rounding, if it is at most so many
# times the floor.
STALLED, STALLED_FLOORS, FALLEN = 10, 10.0, 0.9


class Progress(NamedTuple):
    """Of what a segment has made progress, at this level of epsilon; (S,) float64 each.

    Attributes:
        gap: the marginal error that has to fall.
        dual: the dual that has to rise.
        age: iterations since one of them did.
    """

    gap: Tensor
    dual: Tensor
    age: Tensor

    @classmethod
    def none(cls, like: Tensor) -> Progress:
        """Before the first look, for as many as entries of a tensor (S,)."""
        infinity = torch.full_like(like, torch.inf)
        return cls(infinity, -infinity, torch.zeros_like(like))

    def after(self, gap: Tensor, dual: Tensor, slack: Tensor) -> Progress:
        """With one more look; a dual may be off by `slack`. Marks only ever get harder."""
        fallen, risen = gap <= FALLEN * self.gap, dual > self.dual + slack
        return Progress(
            torch.where(fallen, gap, self.gap),
            torch.where(risen, dual, self.dual),
            torch.where(fallen | risen, 0, self.age + 1),
        )

    def restarted(self, where: Tensor) -> Progress:
        """With a fresh start of some segments (S,) bool."""
        fresh = Progress.none(self.gap)
        return Progress(*(torch.where(where, a, b) for a, b in zip(fresh, self, strict=True)))


# (segments, look, epsilon (S,)): what it tells.
Reading = Callable[[Segments, Look, Tensor], Evidence]


class Form(NamedTuple):
    """What tells problems between two clouds from those of one cloud with itself.

    Attributes:
        reading: of a look.
        damping: the plain update is g + damping r.
        symmetric: whether rows are columns.
    """

    reading: Reading
    damping: float
    symmetric: bool


class Start(NamedTuple):
    """Levels of epsilon (S,) to start at, and iterations (S,) that were taken before."""

    level: Tensor
    iterations: Tensor


def iterations_of(
    segments: Segments, options: Converged, epsilon: float, form: Form, start: Start
) -> Rule:
    """The iterations of all segments, where their passes run; arguments as for `QuasiNewton`."""
    if isinstance(segments, TritonSegments):
        # Triton is not everywhere.
        from otdd_flash.solver.segmented_kernels import QuasiNewtonKernels

        return QuasiNewtonKernels(segments, options, epsilon, form, start)
    return QuasiNewton(segments, options, epsilon, form, start)


class QuasiNewton:
    """The iterations of all segments.

    Args:
        segments: the problems.
        options: when a segment stops.
        epsilon: the final one.
        form: of the problems.
        start: where to.
    """

    def __init__(
        self,
        segments: Segments,
        options: Converged,
        epsilon: float,
        form: Form,
        start: Start,
    ) -> None:
        self._segments, self._options, self._epsilon = segments, options, epsilon
        self._form = form
        self._level, self._iterations = start
        self._trust = Trust.fresh(start.level)
        self._progress = Progress.none(start.level)
        self._differences = Differences(start.level)

    def step(self, active: Tensor) -> Step:
        """Look at the candidates and choose the next."""
        self._iterations = self._iterations + 1
        last = self._iterations >= self._options.max_iterations
        level = torch.where(last, self._epsilon, self._level)
        look = self._segments.look(level, active)
        shown = self._form.reading(self._segments, look, level)
        # Only the last g that was kept at this level has a residual to compare with.
        started = self._trust.dual.isfinite()
        rounding = level * shown.noise
        slack = DUAL_ROUNDING * rounding
        kept, trust = self._trust.judge(shown.dual, shown.gain, look.gap, slack)
        final, tolerance = level <= self._epsilon, self._options.asked_tolerance
        progress = self._progress.after(look.gap, shown.dual, slack)
        stalled = (progress.age >= STALLED) & (look.gap <= STALLED_FLOORS * shown.floor)
        # Where rounding alone exceeds the tolerance there is nothing to wait for.
        hopeless = 2 * shown.floor > tolerance
        done = final & (last | (shown.error <= tolerance) | hopeless | stalled)
        falls = ~final & (shown.error <= max(LEVEL_TOLERANCE, tolerance))
        ends = done | falls
        plain = ends | (trust.plain > 0)
        sound = started & _sound(look, rounding)
        self._segments.move(self._move(look, kept | ends, sound, plain), active)
        self._trust, self._progress = trust.restarted(falls), progress.restarted(falls)
        self._level = torch.where(falls, level / 2, level).clamp_min(self._epsilon)
        hidden = torch.where(stalled, shown.error, shown.floor)
        terms = shown.value, shown.lower, shown.upper, shown.error, hidden, self._iterations
        return Step(done, torch.stack(terms, 1))

    def keep(self, order: Tensor) -> None:
        """Go on with some segments."""
        self._level, self._iterations = self._level[order], self._iterations[order]
        self._trust = Trust(*(numbers[order] for numbers in self._trust))
        self._progress = Progress(*(numbers[order] for numbers in self._progress))
        self._differences.keep(order)

    def _move(self, look: Look, kept: Tensor, sound: Tensor, plain: Tensor) -> Move:
        """Learn from the newest differences, and choose what to look at next."""
        differences, here = self._differences, self._differences.here
        slot = differences.slot
        newest = _centred(look, look.step_fall, look.fall_fall, look.mean_fall)
        fall = _with_newest(look.remembered_fall, here, newest)
        differences.learn(sound, *fall.chunk(2, 1))
        # After a step that is not kept comes a plain one, so that r is that of this look.
        mean = look.mean_residual
        newest = _centred(look, look.step_residual, look.fall_residual, mean)
        residual = _with_newest(look.remembered_residual, here & sound[:, None], newest)
        scale, weights = differences.direction(*residual.chunk(2, 1))
        plain = plain | ~(scale.isfinite() & weights.isfinite().all(1))
        return Move(
            kept,
            sound,
            slot,
            look.mean_step,
            look.mean_fall,
            scale=torch.where(plain, self._form.damping, scale),
            # The mean, of which the differences say nothing, moves as in a plain update.
            shift=torch.where(plain, 0, (self._form.damping - scale) * mean),
            weights=torch.where(plain[:, None], 0, weights),
        )


def _sound(look: Look, rounding: Tensor) -> Tensor:
    """Whether the curvature of the newest differences (S,) exceeds rounding."""
    curvature = look.step_fall - look.mean_step * look.mean_fall
    square = look.step_step - look.mean_step.square()
    return (curvature > rounding * square.clamp_min(0).sqrt()) & curvature.isfinite()


def _centred(look: Look, step: Tensor, fall: Tensor, mean: Tensor) -> Tensor:
    """Products (S, 2) of the newest step and fall with a vector, all without their means."""
    return torch.stack((step - look.mean_step * mean, fall - look.mean_fall * mean), 1)


def _with_newest(remembered: Tensor, here: Tensor, newest: Tensor) -> Tensor:
    """Products with what is remembered (S, 2 MEMORY), once the newest (S, 2) has its slot."""
    return torch.where(here.repeat(1, 2), newest.repeat_interleave(MEMORY, 1), remembered)
