"""The vectors of transport problems of any lengths, one after the other, in Triton.

`segments` says what they are. Potentials of rows lie in one tensor and those of columns in another,
and so do the other vectors of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.engine.segments import Costs
from otdd_flash.kernels.segments.evaluation import Vectors, segmented_evaluation
from otdd_flash.kernels.segments.move import segmented_move
from otdd_flash.kernels.segments.softmin import blocks_of, segmented_softmin
from otdd_flash.kernels.segments.step import Sums
from otdd_flash.kernels.segments.totals import first_blocks, segmented_totals

# How iterations are launched: one at a time and asking after each, as a pass takes longer than to
# launch the next; in a CUDA graph, as passes are short; or several of them before asking.
Pace = Literal["asking", "recorded", "ahead"]


class KernelProblems(Costs, Protocol):
    """S transport problems whose passes run in Triton."""

    @property
    def device(self) -> torch.device:
        """Where passes run; numbers of costs may be on the host."""
        ...

    @property
    def pace(self) -> Pace:
        """How iterations are launched."""
        ...

    @property
    def masses(self) -> tuple[Tensor, Tensor]:
        """Masses of rows and of columns, float64, where the layouts start."""
        ...

    @property
    def layouts(self) -> Sequence[SegmentLayout]:
        """Of rows, and with the columns as rows; one for clouds with themselves."""
        ...

    def softmin_rows(
        self, g: Tensor, before: Tensor, epsilon: Tensor, active: Tensor
    ) -> Sums | Tensor:
        """Return T(g), or the sums that it is made of; not asked of clouds with themselves.

        Args:
            g: (entries,) float32, potentials of columns.
            before: (entries,) float32, the result of the evaluation before.
            epsilon: (S,) float64.
            active: (S,) bool; what is returned of the others is unspecified.
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
        memory: likewise.
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
        """Evaluate the candidates: numbers of rows and of columns, for `evaluation_of`."""
        problems, g = self._problems, self.columns.candidate
        rows, own = problems.layouts[0], problems.layouts[-1]
        seen = None
        if not self._own:
            found = problems.softmin_rows(g, self.rows, epsilon, active)
            seen = segmented_softmin(
                found, problems.masses[0], rows.blocks, rows.table, active, epsilon, self.rows
            )
        softmin = problems.softmin_columns(self.rows, g, epsilon, active)
        columns = segmented_evaluation(
            softmin, problems.masses[1], own.blocks, own.table, active, epsilon, self.columns
        )
        return segmented_totals(seen, columns, rows.first_blocks, own.first_blocks, active)

    def move(self, numbers: Tensor, active: Tensor) -> None:
        """Choose the next candidates by the numbers of `Move.numbers`."""
        layout = self._problems.layouts[-1]
        segmented_move(
            self._problems.masses[1], layout.blocks, layout.table, active, numbers, self.columns
        )


class SegmentLayout(NamedTuple):
    """Where the rows of segments lie.

    Attributes:
        table: (S, 8) int64 of `segmented_step`.
        blocks: (P, 2) int32 of `segmented_softmin.blocks_of`.
        first_blocks: (S + 1,) int64 of `segmented_totals.first_blocks`.
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
