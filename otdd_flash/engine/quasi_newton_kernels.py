"""`quasi_newton.QuasiNewton` with one launch between an evaluation and a move.

In PyTorch the same decisions are two hundred launches, which for small problems take far longer
than the passes. What is decided is the same, up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.devices import current, sent
from otdd_flash.engine.kernel_vectors import KernelProblems, KernelVectors
from otdd_flash.engine.recording import Repeated
from otdd_flash.engine.rule import Start
from otdd_flash.engine.segments import numbers_of, units_of
from otdd_flash.formulas.decision import Form, Goal, Levels, started
from otdd_flash.kernels.segments.decision import (
    TERMS,
    TRUST,
    SegmentState,
    segmented_decision,
    state_width,
)

# Iterations that are launched one after the other before the device is asked.
AHEAD = 8


class QuasiNewtonKernels:
    """The iterations of all segments; arguments and attributes as for `QuasiNewton`."""

    def __init__(
        self, problems: KernelProblems, vectors: KernelVectors, goal: Goal, form: Form, start: Start
    ) -> None:
        self._problems, self.vectors = problems, vectors
        self._goal, self._form = goal, form
        self._repeated = Repeated()
        # Where problems start is often known on the host.
        first = _first_level(start, goal.epsilon, goal.max_iterations)
        self._costs, self._settings, level, known = sent(
            problems.device, _costs(problems), settings_of(goal, problems), first, _known(start)
        )
        # Nothing is remembered yet, and terms are not read before an evaluation.
        width = state_width(vectors.memory)
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
            self.vectors.evaluate(before.level, before.active),
            self._costs,
            self._settings,
            before,
            after,
            memory=self.vectors.memory,
            damping=self._form.damping,
            symmetric=self._form.symmetric,
        )
        self.vectors.move(move, before.active)
        self._state, self._other = after, before

    @property
    def waits(self) -> bool:
        """Whether to ask the device after every step."""
        return self._problems.pace == "asking"

    def advance(self) -> None:
        """Take as many iterations as pay before the device is asked which segments are done."""
        match self._problems.pace:
            case "asking":
                self.step()
            case "recorded":
                with current(self._problems.device):
                    self._repeated.run(self.step)
            case "ahead":
                for _ in range(AHEAD):
                    self.step()

    def change(self) -> None:
        """Go on with another form of the problems, of which nothing is recorded."""
        self._repeated = Repeated()

    def restart(self, candidate: Tensor, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from another candidate."""
        self.vectors.go_on_from(candidate)
        goal = self._goal = self._goal._replace(aim=aim)
        epsilon = torch.full((len(self._costs),), goal.epsilon, dtype=torch.float64)
        start = Start(Levels.descending(epsilon), torch.zeros_like(epsilon))
        problems = self._problems
        self._begin(
            *sent(
                problems.device,
                _costs(problems),
                settings_of(goal, problems),
                epsilon,
                _known(start),
            )
        )
        self._state.active.fill_(True)

    def begin(self, settings: Tensor, start: Start, candidate: Tensor) -> None:
        """Begin afresh with other problems, without asking the device anything.

        Args:
            settings: (7,) float64 on the device, of `settings_of`.
            start: where to, on the device.
            candidate: potentials of columns to evaluate first.
        """
        self.vectors.begin(candidate)
        active, _, numbers, terms = self._state
        active.fill_(True)
        torch._foreach_zero_((numbers, terms))
        numbers[:, 0] = start.iterations
        first = _first_level(start, settings[0], settings[3])
        self._begin(_costs(self._problems), settings, first, _known(start))

    def keep(self, order: Tensor) -> None:
        # Potentials stay where they are; the problems say where those are of what is left.
        self._problems.keep(order)
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


def _costs(problems: KernelProblems) -> Tensor:
    """Pack the facts of the costs (S, 12), as the kernel reads them; maybe on the host."""
    *facts, errors, _, _ = numbers_of(problems)
    return torch.stack((*facts, *errors), 1)


def settings_of(goal: Goal, problems: KernelProblems) -> Tensor:
    """What is asked for (7,), as the kernel reads it; on the host."""
    return torch.tensor((*goal, *units_of(problems)), dtype=torch.float64)
