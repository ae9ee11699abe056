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

This file is the reference; `quasi_newton_kernels` does the same in Triton, and `few_problems` takes
`decide` from here for problems whose numbers are floats.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.engine.differences import Differences
from otdd_flash.engine.evidence.evaluated import Form
from otdd_flash.engine.levels import LEVEL_TOLERANCE, Levels
from otdd_flash.engine.many_vectors import ManyVectors
from otdd_flash.engine.numbers import Numbers, clamp, constant, is_finite, negation, sqrt, where
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

    gap: Numbers
    dual: Numbers
    age: Numbers

    @classmethod
    def none(cls, like: Numbers) -> Progress:
        """Start before the first evaluation of S segments, `like` being of shape (S,)."""
        infinity = constant(like, math.inf)
        return cls(infinity, -infinity, constant(like, 0.0))

    def after(self, gap: Numbers, dual: Numbers, slack: Numbers) -> Progress:
        """Count one more evaluation; a dual may be off by `slack`. Marks only get harder."""
        fallen, risen = gap <= FALLEN * self.gap, dual > self.dual + slack
        return Progress(
            where(fallen, gap, self.gap),
            where(risen, dual, self.dual),
            where(fallen | risen, 0.0, self.age + 1),
        )

    def restarted(self, changed: Numbers) -> Progress:
        """Start afresh the segments where the flags (S,) are set."""
        fresh = Progress.none(self.gap)
        return Progress(*(where(changed, a, b) for a, b in zip(fresh, self, strict=True)))


class State(NamedTuple):
    """Where S problems stand: tensors (S,), or floats of one problem.

    Attributes:
        iterations: that were taken.
        levels: of epsilon.
        trust: in quasi-Newton steps.
        progress: of the marginal error and the dual.
    """

    iterations: Numbers
    levels: Levels
    trust: Trust
    progress: Progress

    def restarted(self, epsilon: float) -> State:
        """Go on at the final epsilon; only the iterations taken so far count."""
        return State(
            self.iterations,
            Levels.descending(constant(self.iterations, epsilon)),
            Trust.fresh(self.iterations),
            Progress.none(self.iterations),
        )


class Decision(NamedTuple):
    """What follows from an evaluation; each (S,) or of one problem.

    Attributes:
        kept: whether the potentials are, as something to go on from.
        plain: whether a plain update follows, or nothing.
        changes: whether a level of epsilon ends or a try at the final one is given up.
        done: whether the problem is.
        extrapolation: as in `Move`.
        rounding: what a single softmin may be off by.
        told: the fields of `run.Told`.
        state: after the evaluation.
    """

    kept: Numbers
    plain: Numbers
    changes: Numbers
    done: Numbers
    extrapolation: Numbers
    rounding: Numbers
    told: tuple[Numbers, ...]
    state: State


def level_of(state: State, goal: Goal) -> Numbers:
    """Return the epsilon (S,) to evaluate at: the final one in the last iteration."""
    return where(state.iterations >= goal.max_iterations, goal.epsilon, state.levels.level)


def decide(goal: Goal, form: Form, costs: Costs, state: State, found: Evaluation) -> Decision:
    """Decide what to keep, when a level or the problem ends, and how to go on.

    Args:
        goal: when a problem is done.
        form: of the problems.
        costs: theirs.
        state: before the evaluation, which its iterations include.
        found: the numbers of the evaluation.
    """
    iterations, before, trust, progress = state
    last, level = iterations >= goal.max_iterations, level_of(state, goal)
    evidence = form.reading(costs, found, level)
    rounding = level * evidence.noise
    slack = DUAL_ROUNDING * rounding
    kept, trust = trust.judge(evidence.dual, evidence.gain, found.gap, slack)
    progress = progress.after(found.gap, evidence.dual, slack)
    stalled = (progress.age >= STALLED) & (found.gap <= STALLED_FLOORS * evidence.floor)
    tolerance = clamp(2 * evidence.reach, goal.tolerance, goal.loosest)
    # Where rounding alone exceeds the tolerance there is nothing to wait for. A plan far from
    # its marginals has larger errors than the one that it becomes, and so has a step too far.
    near = found.gap <= clamp(evidence.reach, LEVEL_TOLERANCE)
    hopeless = kept & near & (2 * evidence.reach > tolerance)
    final, reached = level <= goal.epsilon, evidence.error <= goal.aim * tolerance
    done = final & (last | reached | hopeless | stalled)
    # What the last iteration ends may be a step too far.
    near_enough = final & (reached | stalled)
    # A loose tolerance is for the end alone: steps from potentials of a level above that are
    # far from its marginals take hundreds of iterations more than they save there.
    ends = negation(final) & (evidence.error <= clamp(2 * evidence.reach, LEVEL_TOLERANCE))
    gives_up = negation(done) & before.hopeless(iterations, evidence.error, tolerance)
    changes = ends | gives_up
    size = 2 * found.size if form.symmetric else found.row_size + found.size
    hidden = where(stalled, evidence.error, evidence.floor)
    goes_on = where(done, constant(size, 0.0), constant(size, 1.0))
    certificate = evidence.value, evidence.lower, evidence.upper, evidence.error
    return Decision(
        kept | near_enough | changes,
        done | changes | (trust.plain > 0),
        changes,
        done,
        where(ends, before.descended / 2, 0.0),
        rounding,
        (*certificate, hidden, iterations, size, goes_on),
        State(
            iterations,
            before.after(evidence.error, ends, gives_up, goal.epsilon),
            trust.restarted(changes),
            progress.restarted(changes),
        ),
    )


class Problems(Costs, Protocol):
    """What `QuasiNewton` iterates on; `vectors` evaluate it."""

    def keep(self, order: Tensor) -> None:
        """Go on with the problems `order` (S',) only, in that order."""
        ...


class QuasiNewton:
    """The iterations of all segments.

    Args:
        problems: whose costs they are.
        vectors: what is evaluated and moved.
        goal: when one is done.
        form: of the problems.
        start: where to.

    Attributes:
        active: (S,) bool, which segments are not done.
        terms: (S, 8) float64, what is `run.Told` of each, of when it was active last.
    """

    waits = False

    def __init__(
        self, problems: Problems, vectors: ManyVectors, goal: Goal, form: Form, start: Start
    ) -> None:
        self._problems, self.vectors, self._form = problems, vectors, form
        self._begin(goal, start)

    @property
    def is_lost(self) -> bool:
        """Whether a marginal error is NaN, as costs that are not finite make it."""
        return bool(self.terms[:, Told._fields.index("marginal_error")].isnan().any())

    def begin(self, settings: Tensor, start: Start, candidate: Tensor) -> None:
        """Begin afresh with other problems, to a goal and two unit roundoffs (7,) float64."""
        self.vectors.begin(candidate)
        self._begin(goal_of(settings), start)

    def _begin(self, goal: Goal, start: Start) -> None:
        problems, self._goal = self._problems, goal
        iterations = start.iterations.to(problems.mean_cost)
        levels = Levels(*(numbers.to(iterations) for numbers in start.levels))
        self._state = State(iterations, levels, Trust.fresh(iterations), Progress.none(iterations))
        self._differences = Differences(iterations, self.vectors.memory)
        self.active = torch.ones_like(iterations, dtype=torch.bool)
        self.terms = iterations.new_zeros((len(iterations), len(Told._fields)))

    def step(self) -> None:
        """Evaluate the candidates and choose the next."""
        active, state = self.active, self._state
        state = state._replace(iterations=state.iterations + active)
        found = self.vectors.evaluate(level_of(state, self._goal), active)
        decision = decide(self._goal, self._form, self._problems, state, found)
        # Only the last g that was kept at this level has a residual to compare with.
        started = active & is_finite(state.trust.dual)
        self.vectors.move(self._move(found, started, decision), active)
        self._state = decision.state
        self.terms = torch.where(active[:, None], torch.stack(decision.told, 1), self.terms)
        self.active = active & ~decision.done

    def advance(self) -> None:
        """Take one iteration, or eight on a GPU, where asking takes time."""
        for _ in range(8 if self.active.is_cuda else 1):
            self.step()

    def restart(self, candidate: Tensor, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from another candidate."""
        self.vectors.go_on_from(candidate)
        self._goal = self._goal._replace(aim=aim)
        self._state = self._state.restarted(self._goal.epsilon)
        self.active = torch.ones_like(self.active)

    def keep(self, order: Tensor) -> None:
        self._problems.keep(order)
        self.vectors.keep(order)
        self.active, self.terms = self.active[order], self.terms[order]
        iterations, levels, trust, progress = self._state
        self._state = State(
            iterations[order],
            Levels(*(numbers[order] for numbers in levels)),
            Trust(*(numbers[order] for numbers in trust)),
            Progress(*(numbers[order] for numbers in progress)),
        )
        self._differences.keep(order)

    def _move(self, found: Evaluation, started: Tensor, decision: Decision) -> Move:
        """Learn from the newest differences, and choose what to evaluate next."""
        differences, here = self._differences, self._differences.here
        slot = differences.slot
        learnt = started & sound(found, decision.rounding)
        newest = _centred(
            found, found.step_difference, found.difference_difference, found.mean_difference
        )
        difference = _with_newest(found.remembered_differences, here, newest)
        differences.learn(learnt, *difference.chunk(2, 1))
        # After a step that is not kept comes a plain one, so that r is that of this evaluation.
        mean = found.mean_residual
        newest = _centred(found, found.step_residual, found.difference_residual, mean)
        residual = _with_newest(found.remembered_residual, here & learnt[:, None], newest)
        scale, weights = differences.direction(*residual.chunk(2, 1))
        plain = decision.plain | ~(scale.isfinite() & weights.isfinite().all(1))
        return Move(
            decision.kept,
            learnt,
            slot,
            found.mean_step,
            found.mean_difference,
            scale=torch.where(plain, self._form.damping, scale),
            # The mean, of which the differences say nothing, moves as in a plain update.
            shift=torch.where(plain, 0, (self._form.damping - scale) * mean),
            ends=decision.changes,
            extrapolation=decision.extrapolation,
            weights=torch.where(plain[:, None], 0, weights),
        )


def goal_of(settings: Tensor) -> Goal:
    """Return the goal at the head of the numbers (7,) of `QuasiNewton.begin`."""
    epsilon, tolerance, loosest, most, aim, *_ = settings.tolist()
    return Goal(epsilon, tolerance, loosest, int(most), aim)


def sound(found: Evaluation, rounding: Numbers) -> Numbers:
    """Return whether the curvature of the newest differences exceeds rounding."""
    curvature = found.step_difference - found.mean_step * found.mean_difference
    square = found.step_step - found.mean_step * found.mean_step
    return (curvature > rounding * sqrt(clamp(square, 0.0))) & is_finite(curvature)


def _centred(found: Evaluation, step: Tensor, difference: Tensor, mean: Tensor) -> Tensor:
    """Products (S, 2) of the newest step and residual difference with a vector, less the means."""
    return torch.stack(
        (step - found.mean_step * mean, difference - found.mean_difference * mean), 1
    )


def _with_newest(remembered: Tensor, here: Tensor, newest: Tensor) -> Tensor:
    """Products with what is remembered (S, 2 memory), once the newest (S, 2) has its slot."""
    return torch.where(here.repeat(1, 2), newest.repeat_interleave(here.shape[1], 1), remembered)
