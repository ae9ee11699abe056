"""The vectors of transport problems of any lengths, one after the other, in Triton.

`segments` says what they are. Potentials of rows lie in one tensor and those of columns in another,
and so do the other vectors of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.kernels.segments.evaluation import Vectors, segmented_evaluation
from otdd_flash.kernels.segments.move import segmented_move
from otdd_flash.kernels.segments.softmin import blocks_of, segmented_softmin
from otdd_flash.kernels.segments.step import Sums
from otdd_flash.kernels.segments.totals import first_blocks, segmented_totals


class KernelVectors:
    """The vectors of S segments; 4 (5 + 2 memory) bytes per column.

    Args:
        masses: (rows, columns) float64, of the rows and of the columns, where the tables start.
        layouts: of rows, and with the columns as rows; one for clouds with themselves.
        candidate: (entries,) float32, the first potentials of columns.
        memory: how many differences are remembered.

    Attributes:
        rows: (entries,) float32, potentials of rows; the candidates for clouds with themselves.
        columns: vectors of the columns.
    """

    def __init__(
        self,
        masses: tuple[Tensor, Tensor],
        layouts: Sequence[SegmentLayout],
        candidate: Tensor,
        memory: int,
    ) -> None:
        self._masses, self._layouts = masses, layouts
        self.columns = Vectors.at(candidate, memory)
        self.rows = candidate
        if len(layouts) > 1:
            self.rows = candidate.new_zeros(layouts[0].entries)
        self._seen: Tensor | None = None

    def shared(self) -> KernelVectors:
        """Share the vectors with a form of the problems that keeps segments of its own."""
        return copy(self)

    def take(self, softmin: Sums | Tensor, epsilon: Tensor, active: Tensor) -> None:
        """Take the softmin as the potentials of rows."""
        blocks, table = self._layouts[0].blocks, self._layouts[0].table
        self._seen = segmented_softmin(
            softmin, self._masses[0], blocks, table, active, epsilon, self.rows
        )

    def evaluate(
        self, softmin: Sums | Tensor, epsilon: Tensor, active: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The numbers of an evaluation, given the softmin of the rows' potentials."""
        rows, own = self._layouts[0], self._layouts[-1]
        columns = segmented_evaluation(
            softmin, self._masses[1], own.blocks, own.table, active, epsilon, self.columns
        )
        return segmented_totals(self._seen, columns, rows.first_blocks, own.first_blocks, active)

    def move(self, numbers: Tensor, active: Tensor) -> None:
        blocks, table = self._layouts[-1].blocks, self._layouts[-1].table
        segmented_move(self._masses[1], blocks, table, active, numbers, self.columns)

    def keep(self, order: Tensor) -> None:
        """Go on with some segments; potentials stay where they are."""
        self._layouts = [
            SegmentLayout.of(layout.table[order], layout.entries) for layout in self._layouts
        ]


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
