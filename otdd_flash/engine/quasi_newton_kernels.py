"""`quasi_newton.QuasiNewton` in Triton, with one launch between an evaluation and a move.

In PyTorch the same decisions are two hundred launches, which for small problems take far longer
than the passes. The decisions must be the same, up to rounding
(`tests/engine/test_quasi_newton_kernels.py`); `kernels.segments.decision` makes them. Vectors of
problems of any lengths lie one after the other: potentials of rows in one tensor and those of
columns in another, and so do the other vectors of the columns.

The problems are in `operators`, and each kind makes its own `QuasiNewtonKernels`:
`one_kernel_problem` for a single operator, `kernel_segments` for pairs of classes, and
`kernel_pool` for small problems and given matrices that `solver.small` records. So a step must ask
the device nothing, and the tensors that it reads must stay at their places in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.devices import current, sent
from otdd_flash.engine.problems import Costs, Start, numbers_of, units_of
from otdd_flash.engine.recording import Repeated
from otdd_flash.formulas.decision import Form, Goal, Levels, started
from otdd_flash.formulas.marginals import Constraints
from otdd_flash.kernels.segments.decision import (
    TERMS,
    TRUST,
    SegmentState,
    segmented_decision,
    segmented_move,
    state_width,
)
from otdd_flash.kernels.segments.evaluation import (
    Vectors,
    blocks_of,
    first_blocks,
    segmented_evaluation,
    segmented_softmin,
    segmented_totals,
)
from otdd_flash.kernels.segments.step import Sums

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
        """The last terms of each segment while it was active (S, 8)."""
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
            softness=self._problems.softness,
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
        # Potentials stay where they are; the problems know the places of those that go on.
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


def softness_of(constraints: Constraints, segments: int, device: torch.device) -> Tensor | None:
    """Return `KernelProblems.softness` of segments whose marginals all owe the same."""
    if constraints.exact:
        return None
    found = torch.zeros((segments, 2), dtype=torch.float64, device=device)
    for k, side in enumerate((constraints.rows, constraints.columns)):
        found[:, k] = side.softness
    return found


def settings_of(goal: Goal, problems: KernelProblems) -> Tensor:
    """The goal and the unit roundoffs (7,), as the kernel reads them; on the host."""
    return torch.tensor((*goal, *units_of(problems)), dtype=torch.float64)


# How iterations are launched: one at a time and asking after each, as a pass takes longer than to
# launch the next; in a CUDA graph, as passes are short; or several of them before asking.
Pace = Literal["asking", "recorded", "ahead"]


class KernelProblems(Costs, Protocol):
    """S transport problems whose passes run in Triton.

    `OneKernelProblem`, `KernelSegments` and `PooledKernelSegments` of `operators` implement it.
    """

    @property
    def device(self) -> torch.device:
        """The device of passes; numbers of costs may be on the host."""
        ...

    @property
    def pace(self) -> Pace:
        """How iterations are launched."""
        ...

    @property
    def softness(self) -> Tensor | None:
        """1 / rho of rows and of columns, (S, 2) float64 on the device; None where all are exact.

        Softmins are of exact marginals all the same: penalties are taken into account after them.
        """
        ...

    @property
    def masses(self) -> tuple[Tensor, Tensor]:
        """Masses of rows and of columns, float64, where the layouts start."""
        ...

    @property
    def layouts(self) -> Sequence[SegmentLayout]:
        """Layouts of rows, and with the columns as rows; one for clouds with themselves."""
        ...

    def softmin_rows(
        self, g: Tensor, before: Tensor, epsilon: Tensor, active: Tensor
    ) -> Sums | Tensor:
        """Return T(g), or the sums that it is made of; not asked of clouds with themselves.

        Args:
            g: (entries,) float32, potentials of columns.
            before: (entries,) float32, the result of the evaluation before.
            epsilon: (S,) float64.
            active: (S,) bool; results of the others are unspecified.
        """
        ...

    def softmin_columns(
        self, f: Tensor, before: Tensor, epsilon: Tensor, active: Tensor
    ) -> Sums | Tensor:
        """Return T'(f), or T(f) of clouds with themselves, or the sums that it is made of.

        Arguments as for `softmin_rows`; `before` are the candidates g.
        """
        ...

    def keep(self, order: Tensor) -> None:
        """Go on with the problems `order` (S',) only; potentials stay where they are."""
        ...


class KernelVectors:
    """The vectors of S segments; 4 (5 + 2 memory) bytes per column.

    Args:
        problems: whose softmins are evaluated.
        candidate: (entries,) float32, the first potentials of columns; overwritten.
        memory: how many differences are remembered.

    Attributes:
        memory: number of differences that are remembered.
        rows: (entries,) float32, potentials of rows; the candidates for clouds with themselves.
        columns: vectors of the columns.
    """

    def __init__(self, problems: KernelProblems, candidate: Tensor, memory: int) -> None:
        self._problems, self.memory = problems, memory
        self.columns = Vectors.at(candidate, memory)
        self.rows, self._own = candidate, len(problems.layouts) == 1
        if not self._own:
            self.rows = candidate.new_zeros(problems.layouts[0].entries)
        self.columns.kept.copy_(candidate)

    def begin(self, candidate: Tensor) -> None:
        """Begin afresh with other problems, whose candidates (entries,) are copied."""
        for part in self.columns:
            part.zero_()
        self.columns.candidate.copy_(candidate)
        self.columns.kept.copy_(candidate)

    def go_on_from(self, candidate: Tensor) -> None:
        """Evaluate other potentials (entries,) next."""
        self.columns.candidate.copy_(candidate)

    @property
    def candidates(self) -> Tensor:
        """The last candidates of all problems, those that were left out included."""
        return self.columns.candidate

    @property
    def kept(self) -> Tensor:
        """The potentials of columns that were kept last; the candidates before any evaluation."""
        return self.columns.kept

    @property
    def updated(self) -> Tensor:
        """T'(T(g)) of those, or T(g), but of columns without mass that a pass leaves out."""
        return self.columns.kept + self.columns.residual

    def evaluate(self, epsilon: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate the candidates: numbers (S, 2) of rows and (S, 14 + 4 memory) of columns."""
        problems, g, softness = self._problems, self.columns.candidate, self._problems.softness
        rows, own = problems.layouts[0], problems.layouts[-1]
        seen = None
        if not self._own:
            found = problems.softmin_rows(g, self.rows, epsilon, active)
            there = problems.masses[0], rows.blocks, rows.table, active
            seen = segmented_softmin(found, *there, epsilon, self.rows, softness)
        softmin = problems.softmin_columns(self.rows, g, epsilon, active)
        there = problems.masses[1], own.blocks, own.table, active
        columns = segmented_evaluation(softmin, *there, epsilon, self.columns, softness)
        return segmented_totals(seen, columns, rows.first_blocks, own.first_blocks, active)

    def move(self, numbers: Tensor, active: Tensor) -> None:
        """Choose the next candidates by the numbers of `Move.numbers`."""
        layout = self._problems.layouts[-1]
        segmented_move(
            self._problems.masses[1], layout.blocks, layout.table, active, numbers, self.columns
        )


class SegmentLayout(NamedTuple):
    """The places of the rows of segments.

    Attributes:
        table: (S, 8) int64 of `segmented_step`.
        blocks: (P, 2) int32 of `kernels.segments.evaluation.blocks_of`.
        first_blocks: (S + 1,) int64 of `kernels.segments.evaluation.first_blocks`.
        entries: how many rows there are, those of segments that were left out included.
    """

    table: Tensor
    blocks: Tensor
    first_blocks: Tensor
    entries: int

    @classmethod
    def of(cls, table: Tensor, entries: int) -> SegmentLayout:
        """The layout of a table (S, 8)."""
        blocks = blocks_of(table)
        return cls(table, blocks, first_blocks(blocks, len(table)), entries)


@lru_cache(maxsize=64)
def whole_layout(rows: int, columns: int, device: torch.device, ranges: int = 1) -> SegmentLayout:
    """The layout of one segment that is all there is, whose sums come in so many ranges."""
    table = torch.tensor([[0, rows, 0, 0, columns, 0, 0, ranges]], dtype=torch.int64, device=device)
    return SegmentLayout.of(table, rows)
