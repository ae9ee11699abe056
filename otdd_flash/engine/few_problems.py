"""The iterations of a few problems side by side, whose decisions are made in Python floats.

They are those of `quasi_newton.QuasiNewton`, by the same formulas. `operators.one_problem` and
`operators.torch_pool` use them where passes run in PyTorch: the decisions of an iteration are some
three hundred operations on numbers, which as tensors take longer than the passes of a thousand
points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.engine.few_vectors import FewVectors
from otdd_flash.engine.quasi_newton import goal_of, move_of, restarted
from otdd_flash.engine.rule import Start
from otdd_flash.engine.run import Told
from otdd_flash.engine.segments import Costs, TorchProblems, numbers_of
from otdd_flash.formulas.decision import (
    Form,
    Goal,
    Levels,
    State,
    decide,
    evaluated_level,
    started,
)
from otdd_flash.formulas.differences import OneMemory
from otdd_flash.formulas.evidence import Evaluation


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
        levels = [evaluated_level(self._goal, state) for state in states]
        evaluations = self.vectors.evaluate(levels, self._active)
        for k, found in enumerate(evaluations):
            if self._active[k]:
                self._decide(k, states[k], found)

    def advance(self) -> None:
        """Take one iteration."""
        self.step()

    def change(self) -> None:
        """Go on with another form of the costs, which the problems have taken already."""
        self._costs = [numbers_of(costs) for costs in self._problems.scalars]

    def restart(self, candidate: Tensor, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from other candidates."""
        self.vectors.go_on_from(candidate)
        self._goal = self._goal._replace(aim=aim)
        self._states = [restarted(state, self._goal.epsilon) for state in self._states]
        self._active = [True] * len(self._states)

    def keep(self, order: Tensor) -> None:
        """Go on with all problems, the only order there is: few are never compacted."""
        assert len(order) == len(self._states)

    def _begin(self, goal: Goal, start: Start) -> None:
        self._goal = goal
        self._costs = [numbers_of(costs) for costs in self._problems.scalars]
        iterations, *levels = (
            numbers.double().tolist() for numbers in (start.iterations, *start.levels)
        )
        self._states = [
            started(count, Levels(*of_one))
            for count, *of_one in zip(iterations, *levels, strict=True)
        ]
        self._memories = [OneMemory(self.vectors.memory) for _ in self._states]
        self._told = [[0.0] * len(Told._fields) for _ in self._states]
        self._active = [True] * len(self._states)

    def _decide(self, k: int, state: State, found: Evaluation) -> None:
        """Decide about one problem, and move it."""
        decision = decide(self._goal, self._costs[k], state, found, self._form.symmetric)
        memory, slot = self._memories[k], self._memories[k].slot
        # Only the last g that was kept at this level has a residual to compare with.
        begun = math.isfinite(state.trust.dual)
        step = memory.advance(found, begun, decision.plain, decision.rounding, self._form.damping)
        self.vectors.move(k, move_of(found, decision, slot, step))
        self._states[k], self._active[k] = decision.state, not decision.done
        self._told[k] = [*decision.told, float(not decision.done)]
