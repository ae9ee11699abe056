"""A cost between clouds of which the device holds a block of rows and one of columns at a time.

    f_i = -epsilon log sum_c w_c exp(-f_i^c / epsilon)

with the softmin f^c of block c of the columns, whose masses are divided by their sum w_c. Each pair
of blocks is a cost like any other, and its operator is made when its turn comes: from points that
are in host memory or in a file (`host_points`). Sums of plans and products add up in the order of
the blocks. Softmins are joined in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from otdd_flash.operators.base import (
    Applied,
    CostFacts,
    Epsilon,
    Execution,
    Marginals,
    Operator,
    refined,
)
from otdd_flash.operators.block_tiles import (
    AppliedBlock,
    BlockOperator,
    Build,
    Joined,
    Make,
    Tile,
)
from otdd_flash.operators.host_points import Block, by_class
from otdd_flash.operators.labelled_cost import DOUBLE_UNIT, LabelledCost, Moments, on_host
from otdd_flash.operators.packed_blocks import PackedBlocks, There
from otdd_flash.operators.rounding import float16_rounding

# Bytes of a coordinate on the device: as it came, and packed. Columns come while others are used.
ROW_BYTES, COLUMN_BYTES = 8, 16
# Of what points may take, the least share of the columns, as the fewer blocks of rows there are the
# fewer times columns come; and points that a block has at the least.
COLUMN_SHARE, LEAST_POINTS = 0.125, 256

# Roundings of a mass that is divided by its block's and multiplied again.
ROUNDINGS = 8


class BlockedOperator:
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
        self.cost, self._build, self._high = cost, build, coarse is not None
        self.a, self.b, self.shape = cost.a, cost.b, cost.shape
        sides = on_host(cost)
        self._blocks: tuple[list[Block], list[Block]] = (
            _blocks(cost) if coarse is None else coarse._blocks
        )
        if rows is not None:
            self._blocks = rows._blocks[0], self._blocks[1]
        self._rows, self._columns = self._blocks
        # By side and block; these live as long as this.
        self._masses: dict[tuple[int, int], tuple[Tensor, float]] = {}
        first = Block(slice(0, 1), slice(0, 1))
        one, other = (There(first, points[first.rows], None) for points in sides)
        self._first = self._tile((one, other))
        packing = self._first.operator.packing
        self._there: PackedBlocks
        if coarse is not None:
            self._there = coarse._there.for_parts(packing)
        elif rows is not None:
            self._there = rows._there.beside(sides[1], cost.labels[1])
        else:
            single = len(self._rows) == 1
            self._there = PackedBlocks(sides, cost.labels, packing, single=single)

    def _tile(self, sides: tuple[There, There]) -> Tile:
        x, y = sides
        diagonal = x is y
        rows, points = x.block.rows, (x.points, y.points)
        part = self.cost.part(rows, rows if diagonal else y.block.rows, points, diagonal=diagonal)
        part.packed, part.known_of = (x.packed, y.packed), (x.known, y.known)
        part.a, row_mass = self._normalised(0, x.block, part.a)
        part.b, column_mass = self._normalised(0 if diagonal else 1, y.block, part.b)
        operator = self._build(part)
        if self._high:
            operator = cast(BlockOperator, refined(operator))
        return Tile(sides, operator, (row_mass, column_mass), diagonal)

    def _normalised(self, side: int, block: Block, masses: Tensor) -> tuple[Tensor, float]:
        """Masses (k,) of a block over their sum, and the sum; found once, as the host waits."""
        key = side, id(block)
        if key not in self._masses:
            self._masses[key] = _normalised(masses)
        return self._masses[key]

    def _tiles(
        self, *, upper: bool = False, by_columns: bool = False, points: bool = False
    ) -> Iterator[Tile]:
        """All pairs of blocks, row by row or column by column.

        Those on and above the diagonal if `upper`; with their points themselves if asked for.
        """
        outer, inner, outers, inners = 0, 1, self._rows, self._columns
        if by_columns:
            outer, inner, outers, inners = inner, outer, inners, outers
        for turn, own in enumerate(self._there.stream(outer, outers, points=points)):
            after = inners
            if upper:
                yield self._tile((own, own))
                after = inners[turn + 1 :]
            for other in self._there.stream(inner, after, points=points):
                yield self._tile((other, own) if by_columns else (own, other))

    @property
    def dtype(self) -> torch.dtype:
        """Of the potentials."""
        return self._first.operator.dtype

    @cached_property
    def costs(self) -> CostFacts:
        """What is known of the costs; asks all pairs of blocks."""
        of_rows, of_columns = self.accurate_errors
        error = float(self.a @ of_rows + self.b @ of_columns)
        return CostFacts(self.dtype, self.cost.mean_cost, *self.cost.cost_range, error)

    @cached_property
    def accurate_errors(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,): what costs of accurate `marginals` are off by."""
        of_rows, of_columns = torch.zeros_like(self.a), torch.zeros_like(self.b)
        if self.cost.symmetric:
            of_columns = of_rows
        self._measure()
        points = not self._there.are_packed
        for tile in self._tiles(upper=self.cost.symmetric, points=points):
            rows, columns = tile.operator.accurate_errors
            _raise(of_rows, tile.rows, rows)
            _raise(of_columns, tile.columns, columns)
        return of_rows, of_columns

    def _measure(self) -> None:
        """Find out what packed blocks lose of their points, which are read once for it."""
        if not self._there.are_packed:
            return
        for side, blocks in enumerate(self._blocks[: 1 if self.cost.symmetric else 2]):
            for there in self._there.stream(side, blocks, points=True):
                _ = self._tile(self._first.beside(there, side)).operator.accurate_errors

    @property
    def execution(self) -> Execution:
        """As pairs of blocks run; nothing is recorded, as points come meanwhile."""
        first = self._first.operator.execution
        height, width = (
            len(self.a[self._rows[0].rows]),
            len(self.b[self._columns[0].rows]),
        )
        return Execution(
            f"{first.backend}, points streamed in blocks of {height:,} x {width:,}",
            first.segment,
            self.sample,
            None if first.refined is None else self._refine,
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

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        if self.cost.symmetric and guess is g:
            return self._symmetric_softmin(g, epsilon)
        return self._softmin(g, epsilon, guess, columns=False)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        return self._softmin(f, epsilon, guess, columns=True)

    def _softmin(
        self, potential: Tensor, epsilon: Epsilon, guess: Tensor | None, *, columns: bool
    ) -> Tensor:
        """The softmin of rows or of columns; a guess too far from it costs another pass."""
        joined = Joined(self.b if columns else self.a, epsilon)
        for tile in self._tiles():
            own, other, mass = tile.rows, tile.columns, tile.masses[1]
            if columns:
                own, other, mass = tile.columns, tile.rows, tile.masses[0]
            near = None if guess is None else guess[own]
            found = tile.operator.softmin_part(potential[other], epsilon, near, columns=columns)
            joined.add(own, found, mass)
        if guess is not None and not joined.is_near(guess):
            return self._softmin(potential, epsilon, None, columns=columns)
        return joined.potential.to(self.dtype)

    def _symmetric_softmin(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """The softmin of one potential, each pair of blocks computed once."""
        joined = Joined(self.a, epsilon)
        for tile in self._tiles(upper=True):
            one, other = tile.some(f, f)
            of_rows, of_columns = tile.operator.softmin_pair(one, other, epsilon)
            joined.add(tile.rows, of_rows, tile.masses[1])
            if not tile.diagonal:
                joined.add(tile.columns, of_columns, tile.masses[0])
        if not joined.is_near(f):
            return self._softmin(f, epsilon, None, columns=False)
        return joined.potential.to(self.dtype)

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (n,) and g (m,)."""
        rows, row_errors = torch.zeros_like(self.a), torch.zeros_like(self.a)
        columns, column_errors = torch.zeros_like(self.b), torch.zeros_like(self.b)
        if once := self.cost.symmetric and f is g:
            columns, column_errors = rows, row_errors
        cost_rounding = relative_error = lost = 0.0
        for tile in self._tiles(upper=once, points=True):
            here, there, mass = tile.rows, tile.columns, tile.mass
            found = tile.operator.marginals(*tile.some(f, g), epsilon, accurate=accurate)
            _raise(row_errors, here, found.row_errors)
            _raise(column_errors, there, found.column_errors)
            rows[here] += mass * found.rows
            if not tile.diagonal:
                columns[there] += mass * found.columns
            cost_rounding = max(cost_rounding, found.cost_rounding)
            relative_error = max(relative_error, found.relative_error)
            lost = max(lost, found.lost)
        additions = max(len(self._rows), len(self._columns)) + ROUNDINGS
        return Marginals(
            rows,
            columns,
            row_errors,
            column_errors,
            cost_rounding,
            relative_error + additions * DOUBLE_UNIT,
            lost,
        )

    def apply_plan(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        values: Tensor,
        *,
        transposed: bool = False,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> Applied:
        """P V (n, k) and P 1 (n,), or P^T U (m, k) and P^T 1 (m,); of P o A B^T with `factors`."""
        masses = torch.zeros_like(self.b if transposed else self.a)
        out = values.new_zeros((len(masses), values.shape[1]), dtype=self.dtype)
        for own, applied in self.applied_blocks(
            f, g, epsilon, lambda rows, _: values[rows], transposed=transposed, factors=factors
        ):
            out[own.block.rows], masses[own.block.rows] = applied
        return Applied(out, masses)

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
        """The same of values that are made for a block of points, a block of the result at a time.

        So neither values nor results need be on the device at once.
        """
        tiles = self._tiles(by_columns=transposed, points=True)
        own, other = (1, 0) if transposed else (0, 1)
        for _, stripe in groupby(tiles, lambda tile: id(tile.sides[own].block)):
            out: Applied | None = None
            for tile in stripe:
                if tile.masses[other] == 0:
                    # It adds nothing, and rows of this tile alone have no plan.
                    continue
                found = tile.operator.apply_plan(
                    f[tile.rows],
                    g[tile.columns],
                    epsilon,
                    make(tile.sides[other].block.rows, tile.sides[other].points),
                    transposed=transposed,
                    factors=factors and (factors[0][tile.rows], factors[1][tile.columns]),
                )
                found = Applied(tile.mass * found.values, tile.mass * found.masses)
                out = found if out is None else Applied(*map(torch.add, out, found))
                there = tile.sides[own]
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


def _raise(errors: Tensor, rows: slice | Tensor, found: Tensor) -> None:
    """Errors of some rows become at least those found."""
    errors[rows] = torch.maximum(errors[rows], found)


def _normalised(masses: Tensor) -> tuple[Tensor, float]:
    """Masses over their sum, if that is not 0, and the sum."""
    mass = float(masses.sum())
    return masses / (mass or 1.0), mass
