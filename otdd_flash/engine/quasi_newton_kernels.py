"""`quasi_newton.QuasiNewton` with one launch between an evaluation and a move.

In PyTorch the same decisions are two hundred launches, which for small problems take far longer
than the passes. What is decided is the same, up to rounding.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.devices import sent
from otdd_flash.engine.rule import Start
from otdd_flash.engine.segments import Costs, numbers_of
from otdd_flash.formulas.decision import Form, Goal, Levels, started
from otdd_flash.kernels.segments.decision import (
    TERMS,
    TRUST,
    SegmentState,
    segmented_decision,
    state_width,
)


class KernelProblems(Costs, Protocol):
    """What `QuasiNewtonKernels` iterates on."""

    @property
    def memory(self) -> int:
        """How many differences are remembered, a power of 2."""
        ...

    @property
    def device(self) -> torch.device:
        """Where passes run; numbers of costs may be on the host."""
        ...

    def numbers(self, epsilon: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """An evaluation by its numbers, as `evaluation_of` takes them; as `Problems.evaluate`."""
        ...

    def move_by(self, numbers: Tensor, active: Tensor) -> None:
        """A move by its numbers, as `Move.numbers` gives them; as `Problems.move`."""
        ...


class QuasiNewtonKernels:
    """The iterations of all segments; arguments and attributes as for `QuasiNewton`."""

    def __init__(self, segments: KernelProblems, goal: Goal, form: Form, start: Start) -> None:
        self._segments, self._goal, self._form = segments, goal, form
        # Where problems start is often known on the host.
        first = _first_level(start, goal.epsilon, goal.max_iterations)
        self._costs, self._settings, level, known = sent(
            segments.device, _costs(segments), settings_of(goal, segments), first, _known(start)
        )
        # Nothing is remembered yet, and terms are not read before an evaluation.
        width = state_width(segments.memory)
        numbers = torch.nn.functional.pad(known, (0, width - TRUST))
        active = torch.ones_like(level, dtype=torch.bool)
        self._state = SegmentState(active, level, numbers, level.new_empty((len(level), TERMS)))
        self._other = SegmentState(*map(torch.empty_like, self._state))

    @property
    def active(self) -> Tensor:
        """Which segments are not done (S,)."""
        return self._state.active

    @property
    def terms(self) -> Tensor:
        """What was seen last of each while it was active (S, 8)."""
        return self._state.terms

    def step(self) -> None:
        """Evaluate the candidates and choose the next.

        After an even number of steps the state is where it was, so that they may be recorded.
        """
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
        )
        self._segments.move_by(move, before.active)
        self._state, self._other = after, before

    def restart(self, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from another candidate."""
        goal = self._goal = self._goal._replace(aim=aim)
        epsilon = torch.full((len(self._costs),), goal.epsilon, dtype=torch.float64)
        start = Start(Levels.descending(epsilon), torch.zeros_like(epsilon))
        segments = self._segments
        self._begin(
            *sent(
                segments.device,
                _costs(segments),
                settings_of(goal, segments),
                epsilon,
                _known(start),
            )
        )
        self._state.active.fill_(True)

    def begin(self, settings: Tensor, start: Start) -> None:
        """Begin afresh with other problems, without asking the device anything.

        Args:
            settings: (7,) float64 on the device, of `settings_of`.
            start: where to, on the device.
        """
        active, _, numbers, terms = self._state
        active.fill_(True)
        torch._foreach_zero_((numbers, terms))
        numbers[:, 0] = start.iterations
        first = _first_level(start, settings[0], settings[3])
        self._begin(_costs(self._segments), settings, first, _known(start))

    def keep(self, order: Tensor) -> None:
        self._costs = self._costs[order]
        self._state = SegmentState(*(part[order] for part in self._state))
        self._other = SegmentState(*map(torch.empty_like, self._state))

    def _begin(self, costs: Tensor, settings: Tensor, first: Tensor, known: Tensor) -> None:
        """Begin at some levels, with the iterations and the differences that are there.

        A recorded step reads everything where it is.
        """
        state = self._state
        torch._foreach_copy_(
            (self._costs, self._settings, state.level, state.numbers[:, 1:TRUST]),
            (costs, settings, first, known[:, 1:]),
        )


def _known(start: Start) -> Tensor:
    """Pack the state before the first evaluation (S, TRUST), as the kernel reads it."""
    level, *levels = start.levels
    state = started(start.iterations.to(level), start.levels)
    return torch.stack((state.iterations, *state.trust, *state.progress, *levels), 1)


def _first_level(start: Start, epsilon: float | Tensor, max_iterations: int | Tensor) -> Tensor:
    """The epsilon of the first evaluation (S,)."""
    # Not `masked_fill`, which asks the device for the number that it fills in.
    return torch.where(start.iterations + 1 >= max_iterations, epsilon, start.levels.level)


def _costs(segments: KernelProblems) -> Tensor:
    """Pack the facts of the costs (S, 12), as the kernel reads them; maybe on the host."""
    *facts, errors, _, _ = numbers_of(segments)
    return torch.stack((*facts, *errors), 1)


def settings_of(goal: Goal, segments: KernelProblems) -> Tensor:
    """What is asked for (7,), as the kernel reads it; on the host."""
    return torch.tensor((*goal, *numbers_of(segments)[-2:]), dtype=torch.float64)
