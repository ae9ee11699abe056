"""`quasi_newton.QuasiNewton` with one launch between a look and a move.

In PyTorch the same decisions are two hundred launches, which for small problems take far longer
than the passes. What is decided is the same, up to rounding.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.engine.evidence import (
    LEAST_MASS,
    MOST_ERROR,
    MOST_MASS,
    TRIFLE,
    VALUE_TRIFLE,
    Form,
)
from otdd_flash.engine.levels import LEVEL_TOLERANCE, Levels
from otdd_flash.engine.quasi_newton import DUAL_ROUNDING, FALLEN, STALLED, STALLED_FLOORS, Progress
from otdd_flash.engine.rule import Goal, Start
from otdd_flash.engine.segments import Costs
from otdd_flash.engine.trust import GROWTH, PATIENCE, Trust
from otdd_flash.kernels.segmented_decision import (
    TERMS,
    TRUST,
    Limits,
    State,
    segmented_decision,
    state_width,
)

LIMITS = Limits(
    DUAL_ROUNDING,
    GROWTH,
    PATIENCE,
    STALLED,
    STALLED_FLOORS,
    FALLEN,
    TRIFLE,
    VALUE_TRIFLE,
    MOST_ERROR,
    LEAST_MASS,
    MOST_MASS,
    LEVEL_TOLERANCE,
)


class KernelProblems(Costs, Protocol):
    """What `QuasiNewtonKernels` iterates on."""

    @property
    def memory(self) -> int:
        """How many differences are remembered, a power of 2."""
        ...

    def numbers(self, epsilon: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """A look by its numbers, as `Look.of` takes them; arguments as for `Problems.look`."""
        ...

    def move_by(self, numbers: Tensor, active: Tensor) -> None:
        """A move by its numbers, as `Move.numbers` gives them; as `Problems.move`."""
        ...


class QuasiNewtonKernels:
    """The iterations of all segments; arguments and attributes as for `QuasiNewton`."""

    def __init__(self, segments: KernelProblems, goal: Goal, form: Form, start: Start) -> None:
        self._segments, self._goal, self._form = segments, goal, form
        self._costs, self._settings = _constants(segments, goal)
        level = start.levels.level
        numbers = level.new_zeros((len(level), state_width(segments.memory)))
        terms = level.new_zeros((len(level), TERMS))
        active = torch.ones(len(level), dtype=torch.bool, device=level.device)
        self._state, self._other = (
            State(active.clone(), level.clone(), numbers.clone(), terms.clone()) for _ in range(2)
        )
        self._begin(start)

    @property
    def active(self) -> Tensor:
        """Which segments are not done (S,)."""
        return self._state.active

    @property
    def terms(self) -> Tensor:
        """What was seen last of each while it was active (S, 6)."""
        return self._state.terms

    def step(self) -> None:
        """Look at the candidates and choose the next."""
        before, after = self._state, self._other
        move = segmented_decision(
            self._segments.numbers(before.level, before.active),
            self._costs,
            self._settings,
            before,
            after,
            memory=self._segments.memory,
            damping=self._form.damping,
            symmetric=self._form.symmetric,
            limits=LIMITS,
        )
        self._segments.move_by(move, before.active)
        self._state, self._other = after, before

    def restart(self, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from another candidate."""
        self._goal = self._goal._replace(aim=aim)
        self._costs, self._settings = _constants(self._segments, self._goal)
        final = torch.full_like(self._state.level, self._goal.epsilon)
        self._begin(Start(Levels.descending(final), self._state.numbers[:, 0].clone()))

    def keep(self, order: Tensor) -> None:
        """Go on with some segments."""
        self._costs = self._costs[order]
        self._state = State(*(part[order] for part in self._state))
        self._other = State(*map(torch.empty_like, self._state))

    def _begin(self, start: Start) -> None:
        """Begin at some levels, with the differences that are there."""
        level, *levels = start.levels
        known = (start.iterations, *Trust.fresh(level), *Progress.none(level), *levels)
        self._state.numbers[:, :TRUST] = torch.stack(known, 1)
        last = start.iterations + 1 >= self._goal.max_iterations
        self._state.level[:] = torch.where(last, self._goal.epsilon, level)
        self._state.active[:] = True


def _constants(segments: KernelProblems, goal: Goal) -> tuple[Tensor, Tensor]:
    """What is known of costs, and what is asked for, as the kernel reads them."""
    costs = segments.mean_cost, segments.cost_spread, segments.offset, *segments.errors
    units = (torch.finfo(dtype).eps / 2 for dtype in (segments.dtype, segments.sum_dtype))
    known = torch.stack(costs, 1)
    return known, known.new_tensor((*goal, *units))
