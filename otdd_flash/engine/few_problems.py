"""The iterations of a few problems side by side, whose decisions are made in Python floats.

They are those of `quasi_newton.QuasiNewton`, by the same `decide`. `operators.one_problem` and
`operators.torch_pool` use them where passes run in PyTorch: the decisions of an iteration are some
three hundred operations on numbers, which as tensors take longer than the passes of a thousand
points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import Form
from otdd_flash.engine.few_vectors import FewVectors
from otdd_flash.engine.levels import Levels
from otdd_flash.engine.quasi_newton import Progress, State, decide, goal_of, level_of, sound
from otdd_flash.engine.rule import Goal, Start
from otdd_flash.engine.run import Told
from otdd_flash.engine.segments import Costs, Evaluation, Move, TorchProblems
from otdd_flash.engine.trust import Trust


class FewProblems(TorchProblems, Protocol):
    """A few problems for `FewQuasiNewton`, whose numbers are floats."""

    @property
    def scalars(self) -> Sequence[Costs]:
        """The costs of each, in floats."""
        ...


class FewQuasiNewton:
    """The iterations of a few problems.

    Args:
        problems: whose costs they are.
        vectors: what is evaluated and moved.
        goal: when one is done.
        form: of the problems.
        start: where to.
    """

    # A processor has nothing else to do meanwhile.
    waits = True

    def __init__(
        self, problems: FewProblems, vectors: FewVectors, goal: Goal, form: Form, start: Start
    ) -> None:
        self._problems, self.vectors, self._form = problems, vectors, form
        self._goal: Goal
        self._states: list[State]
        self._begin(goal, start)

    @property
    def terms(self) -> Tensor:
        """The `run.Told` of each problem, of when it was active last, (S, 8) float64."""
        return torch.tensor(self._told, dtype=torch.float64)

    @property
    def active(self) -> Tensor:
        """Which problems are not done, (S,) bool."""
        return torch.tensor(self._active)

    @property
    def is_done(self) -> bool:
        """Whether all of them are."""
        return not any(self._active)

    @property
    def is_lost(self) -> bool:
        """Whether a marginal error is NaN, as costs that are not finite make it."""
        return any(math.isnan(Told(*told).marginal_error) for told in self._told)

    def begin(self, settings: Tensor, start: Start, candidate: Tensor) -> None:
        """Begin afresh with other problems, to a goal and two unit roundoffs (7,) float64."""
        self.vectors.begin(candidate)
        self._begin(goal_of(settings), start)

    def step(self) -> None:
        """Evaluate the candidates and choose the next; nothing if all problems are done."""
        if self.is_done:
            return
        states = [
            state._replace(iterations=state.iterations + active)
            for state, active in zip(self._states, self._active, strict=True)
        ]
        levels = [level_of(state, self._goal) for state in states]
        evaluations = self.vectors.evaluate(levels, self._active)
        for k, found in enumerate(evaluations):
            if self._active[k]:
                self._decide(k, states[k], found)

    def advance(self) -> None:
        """Take one iteration."""
        self.step()

    def change(self) -> None:
        """Go on with another form of the costs, which the problems have taken already."""
        self._costs = self._problems.scalars

    def restart(self, candidate: Tensor, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from other candidates."""
        self.vectors.go_on_from(candidate)
        self._goal = self._goal._replace(aim=aim)
        self._states = [state.restarted(self._goal.epsilon) for state in self._states]
        self._active = [True] * len(self._states)

    def keep(self, order: Tensor) -> None:
        """Go on with all problems, the only order there is: few are never compacted."""
        assert len(order) == len(self._states)

    def _begin(self, goal: Goal, start: Start) -> None:
        self._goal, self._costs = goal, self._problems.scalars
        iterations, *levels = (
            numbers.double().tolist() for numbers in (start.iterations, *start.levels)
        )
        self._states = [
            State(count, Levels(*of_one), Trust.fresh(count), Progress.none(count))
            for count, *of_one in zip(iterations, *levels, strict=True)
        ]
        self._memories = [Memory(self.vectors.memory) for _ in self._states]
        self._told = [[0.0] * len(Told._fields) for _ in self._states]
        self._active = [True] * len(self._states)

    def _decide(self, k: int, state: State, found: Evaluation) -> None:
        """Decide about one problem, and move it."""
        decision = decide(self._goal, self._form, self._costs[k], state, found)
        memory, damping = self._memories[k], self._form.damping
        # Only the last g that was kept at this level has a residual to compare with.
        started, slot = math.isfinite(state.trust.dual), memory.slot
        learnt, scale, weights = memory.after(found, started, decision.rounding)
        if decision.plain or not all(map(math.isfinite, (scale, *weights))):
            scale, shift, weights = damping, 0.0, []
        else:
            # The mean, of which the differences say nothing, moves as in a plain update.
            shift = (damping - scale) * found.mean_residual
        self.vectors.move(
            k,
            Move(
                decision.kept,
                learnt,
                slot,
                found.mean_step,
                found.mean_difference,
                scale,
                shift,
                decision.changes,
                decision.extrapolation,
                weights,
            ),
        )
        self._states[k], self._told[k] = decision.state, list(decision.told)
        self._active[k] = not decision.done


class NextStep(NamedTuple):
    """Whether the newest differences are remembered, and `differences.Direction`."""

    learnt: bool
    scale: float
    weights: list[float]


class Memory:
    """L-BFGS of one problem, as `differences.Differences` has it of many side by side.

    Attributes:
        slot: where the next differences go.
    """

    def __init__(self, memory: int) -> None:
        self._inverse = [[0.0] * memory for _ in range(memory)]
        self._squares = [[0.0] * memory for _ in range(memory)]
        self._curvatures, self.slot = [0.0] * memory, 0

    def after(self, found: Evaluation, started: bool, rounding: float) -> NextStep:
        """Learn from the newest differences if they are sound; return where to go from here.

        Args:
            found: the evaluation.
            started: whether there are newest differences.
            rounding: what a single softmin may be off by.
        """
        learnt = started and sound(found, rounding)
        memory, slot = len(self._curvatures), self.slot
        steps, differences = _halves(found.remembered_residual)
        if learnt:
            mean_step, mean_difference = found.mean_step, found.mean_difference
            mean = found.mean_residual
            self._learn(
                *_halves(found.remembered_differences),
                found.step_difference - mean_step * mean_difference,
                found.difference_difference - mean_difference * mean_difference,
            )
            steps[slot] = found.step_residual - mean_step * mean
            differences[slot] = found.difference_residual - mean_difference * mean
            self.slot = (slot + 1) % memory
        squares = _sum(self._squares[k][k] for k in range(memory))
        if not squares:
            return NextStep(learnt, math.nan, [])
        scale = _sum(self._curvatures) / squares
        inner = [_dot(row, steps) for row in self._inverse]
        outer = [
            scale * (_dot(row, inner) - difference) + bend * part
            for row, difference, bend, part in zip(
                self._squares, differences, self._curvatures, inner, strict=True
            )
        ]
        outer = [_dot(column, outer) for column in zip(*self._inverse, strict=True)]
        return NextStep(learnt, scale, outer + [-scale * part for part in inner])

    def _learn(
        self, steps: list[float], differences: list[float], curvature: float, square: float
    ) -> None:
        """Put the newest differences into their slot, given their products with all others."""
        slot = self.slot
        steps[slot], differences[slot] = curvature, square
        for k, row in enumerate(self._inverse):
            row[slot] = 0.0
            if k == slot:
                row[:] = [0.0] * len(row)
        last = [-_dot(row, steps) / curvature for row in self._inverse]
        last[slot] = 1 / curvature
        for k, row in enumerate(self._inverse):
            row[slot] = last[k]
            self._squares[k][slot] = differences[k]
        self._squares[slot] = differences
        self._curvatures[slot] = curvature


def _halves(products: list[float]) -> tuple[list[float], list[float]]:
    """Split products into those with steps and those with residual differences."""
    middle = len(products) // 2
    return products[:middle], products[middle:]


def _dot(one: tuple[float, ...] | list[float], other: list[float]) -> float:
    return _sum(map(mul, one, other))


def _sum(values: Iterable[float]) -> float:
    """Add up numbers; NaN where a sum overflows, or infinities of both signs meet."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
