"""The iterations of S problems side by side: quasi-Newton steps for Sinkhorn's fixed points.

Every segment has its own differences, trust and level of epsilon, which depend on nothing but
itself. A level is left when its marginal error falls to `LEVEL_TOLERANCE`, or to what rounding
allows. A segment is done after an evaluation at the final epsilon whose marginal error is within
tolerance.

The floor is a worst-case bound of what rounding adds to the marginal error. Even where it is below
the tolerance, rounding may keep iterations from getting further. So a segment ends after `STALLED`
iterations in which neither its marginal error fell to `FALLEN` times its lowest, nor its dual rose
by more than its rounding error, if that error is at most `STALLED_FLOORS` floors. All of the error
is then reported as rounding.

`FALLEN` asks for a tenth. To ask that the error halve would also end slow solves which still
converge. To ask for a tenth ends solves that rounding has stopped all the same: their error
fluctuates at random between one floor and ten, and new lows, each a tenth below the one before, run
out after 22.

This file is the reference; where passes run in Triton, `quasi_newton_kernels` does the same.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.engine.differences import Differences
from otdd_flash.engine.evidence.evaluated import Form
from otdd_flash.engine.levels import LEVEL_TOLERANCE, Levels
from otdd_flash.engine.rule import Goal, Start
from otdd_flash.engine.run import Told
from otdd_flash.engine.segments import Costs, Evaluation, Move
from otdd_flash.engine.trust import Trust

# What a difference of duals may be off by, in units of what a single softmin may be off by: over
# the points of a cloud most of that averages out.
DUAL_ROUNDING = 0.25

# Iterations without progress after which the marginal error is rounding, if it is at most so many
# times the floor.
STALLED, STALLED_FLOORS, FALLEN = 20, 10.0, 0.9


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
        """Start before the first evaluation of S segments, `like` being of shape (S,)."""
        infinity = torch.full_like(like, torch.inf)
        return cls(infinity, -infinity, torch.zeros_like(like))

    def after(self, gap: Tensor, dual: Tensor, slack: Tensor) -> Progress:
        """Count one more evaluation; a dual may be off by `slack`. Marks only get harder."""
        fallen, risen = gap <= FALLEN * self.gap, dual > self.dual + slack
        return Progress(
            torch.where(fallen, gap, self.gap),
            torch.where(risen, dual, self.dual),
            torch.where(fallen | risen, 0, self.age + 1),
        )

    def restarted(self, where: Tensor) -> Progress:
        """Start afresh the segments where the flags (S,) are set."""
        fresh = Progress.none(self.gap)
        return Progress(*(torch.where(where, a, b) for a, b in zip(fresh, self, strict=True)))


class Problems(Costs, Protocol):
    """What `QuasiNewton` iterates on."""

    @property
    def memory(self) -> int:
        """How many differences are remembered, a power of 2."""
        ...

    def evaluate(self, epsilon: Tensor, active: Tensor) -> Evaluation:
        """Evaluate the candidates.

        Args:
            epsilon: (S,) float64.
            active: (S,) bool; numbers of the others are unspecified.
        """
        ...

    def move(self, move: Move, active: Tensor) -> None:
        """Choose the next candidates; the vectors of segments that are not active stay."""
        ...


class QuasiNewton:
    """The iterations of all segments.

    Args:
        segments: the problems.
        goal: when one is done.
        form: of the problems.
        start: where to.

    Attributes:
        active: (S,) bool, which segments are not done.
        terms: (S, 8) float64, what is `run.Told` of each, of when it was active last.
    """

    def __init__(self, segments: Problems, goal: Goal, form: Form, start: Start) -> None:
        self._segments, self._goal, self._form = segments, goal, form
        self._iterations = iterations = start.iterations.to(segments.mean_cost)
        self._levels = Levels(*(numbers.to(iterations) for numbers in start.levels))
        self._trust = Trust.fresh(iterations)
        self._progress = Progress.none(iterations)
        self._differences = Differences(iterations, segments.memory)
        self.active = torch.ones_like(iterations, dtype=torch.bool)
        self.terms = iterations.new_zeros((len(iterations), len(Told._fields)))

    def step(self) -> None:
        """Evaluate the candidates and choose the next."""
        goal, before, active = self._goal, self._levels, self.active
        self._iterations = self._iterations + active
        last = self._iterations >= goal.max_iterations
        level = torch.where(last, goal.epsilon, before.level)
        found = self._segments.evaluate(level, active)
        evidence = self._form.reading(self._segments, found, level)
        # Only the last g that was kept at this level has a residual to compare with.
        started = active & self._trust.dual.isfinite()
        rounding = level * evidence.noise
        slack = DUAL_ROUNDING * rounding
        kept, trust = self._trust.judge(evidence.dual, evidence.gain, found.gap, slack)
        progress = self._progress.after(found.gap, evidence.dual, slack)
        stalled = (progress.age >= STALLED) & (found.gap <= STALLED_FLOORS * evidence.floor)
        tolerance = (2 * evidence.reach).clamp(goal.tolerance, goal.loosest)
        # Where rounding alone exceeds the tolerance there is nothing to wait for. A plan far from
        # its marginals has larger errors than the one that it becomes, and so has a step too far.
        near = found.gap <= evidence.reach.clamp_min(LEVEL_TOLERANCE)
        hopeless = kept & near & (2 * evidence.reach > tolerance)
        final, reached = level <= goal.epsilon, evidence.error <= goal.aim * tolerance
        done = final & (last | reached | hopeless | stalled)
        # What the last iteration ends may be a step too far.
        near_enough = final & (reached | stalled)
        # A loose tolerance is for the end alone: steps from potentials of a level above that are
        # far from its marginals take hundreds of iterations more than they save there.
        ends = ~final & (evidence.error <= (2 * evidence.reach).clamp_min(LEVEL_TOLERANCE))
        gives_up = ~done & before.hopeless(self._iterations, evidence.error, tolerance)
        changes = ends | gives_up
        plain = done | changes | (trust.plain > 0)
        sound = started & _sound(found, rounding)
        extrapolation = torch.where(ends, before.descended / 2, 0)
        move = self._move(found, kept | near_enough | changes, sound, plain, changes, extrapolation)
        self._segments.move(move, active)
        self._trust, self._progress = trust.restarted(changes), progress.restarted(changes)
        self._levels = before.after(evidence.error, ends, gives_up, goal.epsilon)
        hidden = torch.where(stalled, evidence.error, evidence.floor)
        terms = (
            evidence.value,
            evidence.lower,
            evidence.upper,
            evidence.error,
            hidden,
            self._iterations,
            2 * found.size if self._form.symmetric else found.row_size + found.size,
            (~done).double(),
        )
        self.terms = torch.where(active[:, None], torch.stack(terms, 1), self.terms)
        self.active = active & ~done

    def restart(self, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from another candidate."""
        self._goal = self._goal._replace(aim=aim)
        self._trust = Trust.fresh(self._iterations)
        self._progress = Progress.none(self._iterations)
        self._levels = Levels.descending(torch.full_like(self._levels.level, self._goal.epsilon))
        self.active = torch.ones_like(self.active)

    def keep(self, order: Tensor) -> None:
        self.active, self.terms = self.active[order], self.terms[order]
        self._iterations = self._iterations[order]
        self._levels = Levels(*(numbers[order] for numbers in self._levels))
        self._trust = Trust(*(numbers[order] for numbers in self._trust))
        self._progress = Progress(*(numbers[order] for numbers in self._progress))
        self._differences.keep(order)

    def _move(
        self,
        found: Evaluation,
        kept: Tensor,
        sound: Tensor,
        plain: Tensor,
        ends: Tensor,
        extrapolation: Tensor,
    ) -> Move:
        """Learn from the newest differences, and choose what to evaluate next."""
        differences, here = self._differences, self._differences.here
        slot = differences.slot
        newest = _centred(
            found, found.step_difference, found.difference_difference, found.mean_difference
        )
        difference = _with_newest(found.remembered_differences, here, newest)
        differences.learn(sound, *difference.chunk(2, 1))
        # After a step that is not kept comes a plain one, so that r is that of this evaluation.
        mean = found.mean_residual
        newest = _centred(found, found.step_residual, found.difference_residual, mean)
        residual = _with_newest(found.remembered_residual, here & sound[:, None], newest)
        scale, weights = differences.direction(*residual.chunk(2, 1))
        plain = plain | ~(scale.isfinite() & weights.isfinite().all(1))
        return Move(
            kept,
            sound,
            slot,
            found.mean_step,
            found.mean_difference,
            scale=torch.where(plain, self._form.damping, scale),
            # The mean, of which the differences say nothing, moves as in a plain update.
            shift=torch.where(plain, 0, (self._form.damping - scale) * mean),
            ends=ends,
            extrapolation=extrapolation,
            weights=torch.where(plain[:, None], 0, weights),
        )


def _sound(found: Evaluation, rounding: Tensor) -> Tensor:
    """Whether the curvature of the newest differences (S,) exceeds rounding."""
    curvature = found.step_difference - found.mean_step * found.mean_difference
    square = found.step_step - found.mean_step.square()
    return (curvature > rounding * square.clamp_min(0).sqrt()) & curvature.isfinite()


def _centred(found: Evaluation, step: Tensor, difference: Tensor, mean: Tensor) -> Tensor:
    """Products (S, 2) of the newest step and residual difference with a vector, less the means."""
    return torch.stack(
        (step - found.mean_step * mean, difference - found.mean_difference * mean), 1
    )


def _with_newest(remembered: Tensor, here: Tensor, newest: Tensor) -> Tensor:
    """Products with what is remembered (S, 2 memory), once the newest (S, 2) has its slot."""
    return torch.where(here.repeat(1, 2), newest.repeat_interleave(here.shape[1], 1), remembered)
