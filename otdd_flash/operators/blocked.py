"""A cost between clouds of which the device holds a block of rows and one of columns at a time.

The points are in host memory or in a file (`host_points`), and a block comes when its turn does.
What is found of pairs of blocks is put together by `block_sums`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from otdd_flash.cost.host_points import Block, by_class
from otdd_flash.cost.points import LabelledCost, Moments, on_host
from otdd_flash.cost.rounding import float16_rounding
from otdd_flash.operators.base import Applied, Execution, Operator
from otdd_flash.operators.block_sums import BlockSums, applied
from otdd_flash.operators.block_tiles import AppliedBlock, Build, Make, Tile
from otdd_flash.operators.packed_blocks import PackedBlocks, Packing, There

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

    def _by_columns(self) -> Iterator[Tile]:
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
    def execution(self) -> Execution:
        """Passes run as pairs of blocks; nothing is recorded, as points are streamed."""
        first = self._first.operator.execution
        height, width = (
            len(self.a[self._rows[0].rows]),
            len(self.b[self._columns[0].rows]),
        )
        return Execution(
            f"{first.backend}, points streamed in blocks of {height:,} x {width:,}",
            self.sample,
            None if first.refined is None else self._refine,
            first.in_triton,
            in_blocks=self.applied_blocks,
            rounded_by=partial(float16_rounding, self.cost),
            over_columns=self._over_columns,
        )

    def _over_columns(self, columns: Tensor, g: Tensor, epsilon: float) -> Tensor:
        """The softmin (n,) over some columns (l,), int64, rows packed as they are."""
        part = self.cost.part(slice(None), columns)
        return BlockedOperator(part, self._build, rows=self).softmin_rows(g, epsilon)

    def _refine(self) -> BlockedOperator:
        return BlockedOperator(self.cost, self._build, coarse=self)

    def sample(self, rows: Tensor, columns: Tensor) -> Operator:
        """The cost between some rows (k,) and columns (l,), int64, on the device."""
        return self._build(self.cost.sample(rows, columns))

    def applied_blocks(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        make: Make,
        *,
        transposed: bool = False,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> Iterator[AppliedBlock]:
        """Apply the plan a block of the result at a time, to values made per block.

        So neither values nor results need be on the device at once.
        """
        tiles = self._by_columns() if transposed else self.tiles(points=True)
        own, other = (1, 0) if transposed else (0, 1)
        for _, stripe in groupby(tiles, lambda tile: id(tile.sides[own].block)):
            out: Applied | None = None
            for tile in stripe:
                there, beside = tile.sides[own], tile.sides[other]
                values = make(beside.block.rows, beside.points)
                found = applied(tile, f, g, epsilon, values, transposed, factors)
                if found is not None:
                    out = found if out is None else Applied(*map(torch.add, out, found))
            assert out is not None
            yield AppliedBlock(there, out)

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

    def own_costs(self) -> Tensor:
        """C_ii (n,) for the cost of a cloud with itself, float64."""
        return self.cost.own_costs()


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
