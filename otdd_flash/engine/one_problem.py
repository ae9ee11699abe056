"""The iterations of one problem, whose decisions are made in Python floats.

They are those of `quasi_newton.QuasiNewton`, by the same `decide`. `operators.one_segment` uses
them where passes run in PyTorch: the decisions of an iteration are some three hundred operations on
numbers, which as tensors take longer than the passes of a thousand points.
"""

from __future__ import annotations

import math
from operator import mul
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import Form
from otdd_flash.engine.levels import Levels
from otdd_flash.engine.quasi_newton import Progress, State, decide, level_of, sound
from otdd_flash.engine.rule import Goal, Start
from otdd_flash.engine.segments import Costs, Evaluation, Move
from otdd_flash.engine.trust import Trust


class Problem(Protocol):
    """What `OneQuasiNewton` iterates on; numbers are floats."""

    @property
    def memory(self) -> int: ...

    @property
    def scalars(self) -> Costs:
        """The costs."""
        ...

    def evaluate(self, epsilon: float) -> Evaluation:
        """Evaluate the candidate; products with what is remembered are lists."""
        ...

    def move(self, move: Move) -> None:
        """Choose the next candidate; weights are a list."""
        ...


class OneQuasiNewton:
    """The iterations of one problem.

    Args:
        segment: the problem.
        goal: when it is done.
        form: of the problem.
        start: where to.
    """

    def __init__(self, segment: Problem, goal: Goal, form: Form, start: Start) -> None:
        self._segment, self._goal, self._form = segment, goal, form
        levels = Levels(*(float(number) for number in start.levels))
        iterations = float(start.iterations)
        self._state = State(iterations, levels, Trust.fresh(iterations), Progress.none(iterations))
        self._differences = OneMemory(segment.memory)
        self._told: tuple[float, ...] = (0.0,) * 8

    @property
    def terms(self) -> Tensor:
        """What is `run.Told` of the problem, (1, 8) float64."""
        return torch.tensor([self._told], dtype=torch.float64)

    @property
    def active(self) -> Tensor:
        """Whether it is not done, (1,) bool."""
        return torch.tensor([self._told[-1] > 0])

    def step(self) -> None:
        """Evaluate the candidate and choose the next."""
        state = self._state._replace(iterations=self._state.iterations + 1)
        found = self._segment.evaluate(level_of(state, self._goal))
        decision = decide(self._goal, self._form, self._segment.scalars, state, found)
        started = math.isfinite(state.trust.dual)
        slot = self._differences.slot
        learnt, scale, weights = self._differences.after(found, started, decision.rounding)
        damping = self._form.damping
        if decision.plain or not all(map(math.isfinite, (scale, *weights))):
            scale, shift, weights = damping, 0.0, []
        else:
            # The mean, of which the differences say nothing, moves as in a plain update.
            shift = (damping - scale) * found.mean_residual
        self._segment.move(
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
            )
        )
        self._state, self._told = decision.state, decision.told

    def restart(self, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from another candidate."""
        self._goal = self._goal._replace(aim=aim)
        self._state = self._state.restarted(self._goal.epsilon)

    def keep(self, order: Tensor) -> None:
        """Do nothing: there is no other problem."""


class OneDirection(NamedTuple):
    """Whether the newest differences are remembered, and `differences.Direction`."""

    learnt: bool
    scale: float
    weights: list[float]


class OneMemory:
    """L-BFGS of one problem, as `differences.Differences` has it of many.

    Attributes:
        slot: where the next differences go.
    """

    def __init__(self, memory: int) -> None:
        self._inverse = [[0.0] * memory for _ in range(memory)]
        self._squares = [[0.0] * memory for _ in range(memory)]
        self._curvatures, self.slot = [0.0] * memory, 0

    def after(self, found: Evaluation, started: bool, rounding: float) -> OneDirection:
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
        squares = math.fsum(self._squares[k][k] for k in range(memory))
        if not squares:
            return OneDirection(learnt, math.nan, [])
        scale = math.fsum(self._curvatures) / squares
        inner = [_dot(row, steps) for row in self._inverse]
        outer = [
            scale * (_dot(row, inner) - difference) + bend * part
            for row, difference, bend, part in zip(
                self._squares, differences, self._curvatures, inner, strict=True
            )
        ]
        outer = [_dot(column, outer) for column in zip(*self._inverse, strict=True)]
        return OneDirection(learnt, scale, outer + [-scale * part for part in inner])

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
    return math.fsum(map(mul, one, other))
