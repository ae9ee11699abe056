"""A cost between clouds of which the device holds a block of rows and one of columns at a time.

The points are in host memory or in a file (`host_points`), and a block comes when its turn does.
What is found of pairs of blocks is put together by `block_sums`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from otdd_flash.operators.base import Applied, CostFacts, Operator
from otdd_flash.operators.block_sums import BlockPlan, BlockSums
from otdd_flash.operators.block_tiles import Build, Tile
from otdd_flash.operators.float64_rows import Points
from otdd_flash.operators.host_points import Block, by_class
from otdd_flash.operators.labelled_cost import Cut, LabelledCost, Masses, Moments, on_host
from otdd_flash.operators.packed_blocks import PackedBlocks, Packing, There
from otdd_flash.operators.plans import Make, PlanBlock
from otdd_flash.operators.rounding import float16_rounding

# Bytes of a coordinate on the device: as it came, and packed. Columns come while others are used.
ROW_BYTES, COLUMN_BYTES = 8, 16
# Of what points may take, the least share of the columns, as the fewer blocks of rows there are the
# fewer times columns come; and points that a block has at the least.
COLUMN_SHARE, LEAST_POINTS = 0.125, 256


class BlockedOperator(BlockSums):
    """A cost between labelled clouds that are streamed.

    Args:
        cost: its points are `HostPoints`.
        build: makes the operator of a pair of blocks.
        coarse: the operator that this one is to refine.
        rows: of an operator of the same rows.
    """

    def __init__(
        self,
        cost: LabelledCost,
        build: Build,
        *,
        coarse: BlockedOperator | None = None,
        rows: BlockedOperator | None = None,
    ) -> None:
        super().__init__(cost, build, coarse=coarse)
        sides = on_host(cost)
        self._blocks: tuple[list[Block], list[Block]] = (
            _blocks(cost) if coarse is None else coarse._blocks
        )
        if rows is not None:
            self._blocks = rows._blocks[0], self._blocks[1]
        self._rows, self._columns = self._blocks
        first = Block(slice(0, 1), slice(0, 1))
        one, other = (There(first, points[first.rows], None) for points in sides)
        self._first = self.tile((one, other))
        self._there: PackedBlocks
        if coarse is not None:
            self._there = coarse._there.for_parts(self.packing)
        elif rows is not None:
            self._there = rows._there.beside(sides[1], cost.labels[1])
        else:
            single = len(self._rows) == 1
            self._there = PackedBlocks(sides, cost.labels, self.packing, single=single)

    def tiles(self, *, upper: bool = False, points: bool = False) -> Iterator[Tile]:
        """All pairs of blocks, row by row; those on and above the diagonal if `upper`."""
        for turn, own in enumerate(self._there.stream(0, self._rows, points=points)):
            after = self._columns
            if upper:
                yield self.tile((own, own))
                after = after[turn + 1 :]
            for other in self._there.stream(1, after, points=points):
                yield self.tile((own, other))

    def by_columns(self) -> Iterator[Tile]:
        """All pairs of blocks, column by column."""
        for own in self._there.stream(1, self._columns, points=True):
            for other in self._there.stream(0, self._rows, points=True):
                yield self.tile((other, own))

    @property
    def additions(self) -> int:
        return max(len(self._rows), len(self._columns))

    @property
    def dtype(self) -> torch.dtype:
        return self._first.operator.dtype

    @property
    def packing(self) -> Packing | None:
        return self._first.operator.packing

    def measured_tiles(self) -> Iterator[Tile]:
        self._measure()
        return self.tiles(upper=self.cost.symmetric, points=self.packing is None)

    def _measure(self) -> None:
        """Measure what packing loses of the points, which are read once for it."""
        if self.packing is None:
            return
        for side, blocks in enumerate(self._blocks[: 1 if self.cost.symmetric else 2]):
            for there in self._there.stream(side, blocks, points=True):
                _ = self.tile(self._first.beside(there, side)).operator.accurate_errors

    @property
    def backend(self) -> str:
        height, width = (
            len(self.a[self._rows[0].rows]),
            len(self.b[self._columns[0].rows]),
        )
        first = self._first.operator.backend
        return f"{first}, points streamed in blocks of {height:,} x {width:,}"

    @property
    def in_triton(self) -> bool:
        return self._first.operator.in_triton

    @cached_property
    def costs(self) -> CostFacts:
        facts = super().costs
        if self._coarse is not None or not self._rounds or self.cost.symmetric:
            return facts
        return facts._replace(rounding=float16_rounding(self.cost))

    @property
    def _rounds(self) -> bool:
        """Whether the operators of blocks have a refined form."""
        return self._first.operator.refined is not self._first.operator

    @property
    def refined(self) -> BlockedOperator:
        if self._coarse is not None or not self._rounds:
            return self
        return BlockedOperator(self.cost, self._build, coarse=self)

    def part(self, rows: Cut, columns: Cut, masses: Masses | None = None) -> Operator:
        """The cost between some rows and columns: of other masses, on the device; else in blocks.

        All rows stay packed as they are.
        """
        part = self.cost.cut(rows, columns, masses)
        if masses is not None:
            return self._build(part)
        every = isinstance(rows, slice) and rows == slice(None)
        return BlockedOperator(part, self._build, rows=self if every else None)

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> BlockedPlan:
        """The plan of f (n,) and g (m,); see `Operator.plan`."""
        return BlockedPlan(self, f, g, epsilon, most)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64; columns are read, and rows that left."""
        one, other = self._first.sides
        parts = [
            self.cost.part(one.block.rows, there.block.rows, (one.points, there.points)).moments(
                masses[there.block.rows]
            )
            for there in self._there.stream(1, self._columns, points=True)
        ]
        moments = Moments(*(torch.stack(each).sum(0) for each in zip(*parts, strict=True)))
        found = torch.empty_like(self.a)
        for there in self._there.stream(0, self._rows, points=True):
            rows = there.block.rows
            part = self.cost.part(rows, other.block.rows, (there.points, other.points))
            found[rows] = part.costs_of(moments)
        return found


class BlockedPlan(BlockPlan):
    """A plan that is applied to values of streamed points a block of the result at a time."""

    _operator: BlockedOperator

    def blocks(
        self, points: tuple[Points, Points], make: Make, *, transposed: bool = False
    ) -> Iterator[PlanBlock]:
        operator = self._operator
        tiles = operator.by_columns() if transposed else operator.tiles(points=True)
        own, other = (1, 0) if transposed else (0, 1)
        for _, stripe in groupby(tiles, lambda tile: id(tile.sides[own].block)):
            out: Applied | None = None
            for tile in stripe:
                there, beside = tile.sides[own], tile.sides[other]
                values = make(beside.block.rows, beside.points)
                found = self.of_tile(tile, values, transposed=transposed)
                if found is not None:
                    out = found if out is None else Applied(*map(torch.add, out, found))
            assert out is not None
            yield PlanBlock(there.block, there.points, out)


def _blocks(cost: LabelledCost) -> tuple[list[Block], list[Block]]:
    """Blocks of rows and of columns, of about one size each; the same of a cloud with itself.

    One block of a cloud with itself needs no other beside it.
    """
    (x, _), (n, m) = on_host(cost), cost.shape
    room = x.streaming.room // x.shape[1]
    if cost.symmetric:
        whole = n * ROW_BYTES <= room
        size = n if whole else max(LEAST_POINTS, room // (ROW_BYTES + COLUMN_BYTES))
        blocks = by_class(cost.labels[0], cost.class_costs.shape[0], _even(n, size))
        return blocks, blocks
    rows = _even(n, max(LEAST_POINTS, int(room * (1 - COLUMN_SHARE)) // ROW_BYTES))
    columns = _even(m, max(LEAST_POINTS, (room - rows * ROW_BYTES) // COLUMN_BYTES))
    return (
        by_class(cost.labels[0], cost.class_costs.shape[0], rows),
        by_class(cost.labels[1], cost.class_costs.shape[1], columns),
    )


def _even(count: int, most: int) -> int:
    """The size of as few blocks of so many points as there can be, which differ by few."""
    return -(-count // -(-count // most))
