"""The iterations of S problems side by side: quasi-Newton steps for Sinkhorn's fixed points.

Every segment has its own differences, trust and level of epsilon, which depend on nothing but
itself: `formulas.decision` and `formulas.differences` have the rules. This file decides in tensors;
`quasi_newton_kernels` does by the same formulas in Triton, and `few_problems` in floats.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.engine.many_vectors import ManyVectors
from otdd_flash.engine.rule import Start
from otdd_flash.engine.run import Told
from otdd_flash.engine.segments import Costs, Move, numbers_of
from otdd_flash.formulas.decision import (
    Decision,
    Form,
    Goal,
    Levels,
    Progress,
    State,
    Trust,
    decide,
    evaluated_level,
    started,
)
from otdd_flash.formulas.differences import Memory, Step, advance, empty_memory
from otdd_flash.formulas.evidence import Evaluation
from otdd_flash.formulas.operations import Numbers, constant


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
        self._state, memory = started(iterations, levels), self.vectors.memory
        self._memory = empty_memory(iterations, memory)
        self._slots = torch.arange(memory, device=iterations.device)[None]
        self.active = torch.ones_like(iterations, dtype=torch.bool)
        self.terms = iterations.new_zeros((len(iterations), len(Told._fields)))

    def step(self) -> None:
        """Evaluate the candidates and choose the next."""
        active, state, form = self.active, self._state, self._form
        state = state._replace(iterations=state.iterations + active)
        found = self.vectors.evaluate(evaluated_level(self._goal, state), active)
        costs, slot = numbers_of(self._problems), self._memory.slot
        decision = decide(self._goal, costs, state, found, form.symmetric)
        # Only the last g that was kept at this level has a residual to compare with.
        begun = active & state.trust.dual.isfinite()
        plain, rounding = decision.plain, decision.rounding
        self._memory, step = advance(
            self._memory, self._slots, found, begun, plain, rounding, form.damping
        )
        step = step._replace(weights=torch.cat(step.weights, 1))
        self.vectors.move(move_of(found, decision, slot, step), active)
        self._state, self.active = decision.state, active & ~decision.done
        told = torch.stack((*decision.told, (~decision.done).double()), 1)
        self.terms = torch.where(active[:, None], told, self.terms)

    def advance(self) -> None:
        """Take one iteration, or eight on a GPU, where asking takes time."""
        for _ in range(8 if self.active.is_cuda else 1):
            self.step()

    def restart(self, candidate: Tensor, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from another candidate."""
        self.vectors.go_on_from(candidate)
        self._goal = self._goal._replace(aim=aim)
        self._state = restarted(self._state, self._goal.epsilon)
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
        self._memory = Memory(*(part[order] for part in self._memory))


def restarted(state: State, epsilon: float) -> State:
    """Go on at the final epsilon; only the iterations taken so far count."""
    iterations = state.iterations
    return started(iterations, Levels.descending(constant(iterations, epsilon)))


def move_of(found: Evaluation, decision: Decision, slot: Numbers, step: Step) -> Move:
    """Return the move after an evaluation, whose differences go into a slot."""
    return Move(
        decision.kept,
        step.learnt,
        slot,
        found.mean_step,
        found.mean_difference,
        step.scale,
        step.shift,
        decision.changes,
        decision.extrapolation,
        step.weights,
    )


def goal_of(settings: Tensor) -> Goal:
    """Return the goal at the head of the numbers (7,) of `QuasiNewton.begin`."""
    epsilon, tolerance, loosest, most, aim, *_ = settings.tolist()
    return Goal(epsilon, tolerance, loosest, int(most), aim)
