"""A cost that comes in pairs of blocks, of which the device holds a few points at a time.

    f_i = -epsilon log sum_c w_c exp(-f_i^c / epsilon)

with the softmin f^c of block c of the columns, whose masses are divided by their sum w_c. Each pair
of blocks is a cost like any other, and its operator is made when its turn comes. Sums of plans and
products add up in the order in which pairs come; softmins are joined in float64.

`BlockedOperator` has points in host memory or in a file (`host_points`), and a block comes when its
turn does; those of `ring` come from other ranks, and are put together by the same `BlockSums`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.host_points import Block, by_class
from otdd_flash.cost.points import DOUBLE_UNIT, Cut, LabelledCost, Masses, Moments, Points, on_host
from otdd_flash.cost.rounding import float16_rounding
from otdd_flash.operators.base import (
    Applied,
    Epsilon,
    EvaluatedPlan,
    Factors,
    Make,
    Marginals,
    Operator,
    PlanBlock,
)
from otdd_flash.operators.packed_blocks import PackedBlocks, Packing, There

# How far from a guess, in epsilon, a softmin may be: sums beside it are within 2^90 of 1.
FAR = 90 * math.log(2)

# build(cost): the operator of a cost whose points are on the device.
Build = Callable[[LabelledCost], "BlockOperator"]


class BlockOperator(Operator, Protocol):
    """An operator that says how accurate it is, point by point, and how it packs points."""

    @property
    def accurate_errors(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,): costs of accurate `marginals` are off by at most row_i + column_j."""
        ...

    @property
    def rounding(self) -> float:
        """The mean error of costs beside that, where they are stored."""
        ...

    @property
    def packing(self) -> Packing | None:
        """How it packs the points of its cost; None where it takes them as they are."""
        ...

    def softmin_part(
        self, potential: Tensor, epsilon: Epsilon, near: Tensor | None, *, columns: bool
    ) -> Tensor:
        """The softmin of rows, or of columns, where `near` is that of a cost this is a part of.

        It may be infinite where it adds less than rounding to the whole, if `near` is near that.
        """
        ...

    def softmin_pair(self, f: Tensor, g: Tensor | None, epsilon: Epsilon) -> tuple[Tensor, Tensor]:
        """`softmin_part` of rows near f (n,) and of columns near g (m,).

        Both are one without g, of a cloud with itself.
        """
        ...


class Tile(NamedTuple):
    """A block of rows and one of columns.

    Attributes:
        sides: both.
        operator: the cost between them, of masses that sum to 1 on each side that has any.
        masses: of the rows and of the columns, in the whole; 0 where all of a block's are.
        diagonal: they are one block, whose cost is of a cloud with itself.
    """

    sides: tuple[There, There]
    operator: BlockOperator
    masses: tuple[float, float]
    diagonal: bool

    @property
    def rows(self) -> Cut:
        """The tile's rows in the whole cost, on the device."""
        return self.sides[0].block.rows

    @property
    def columns(self) -> Cut:
        """The tile's columns in the whole cost, on the device."""
        return self.sides[1].block.rows

    def beside(self, there: There, side: int) -> tuple[There, There]:
        """Return the sides with another block in the place of one of them."""
        one, other = self.sides
        return (one, there) if side else (there, other)

    def some(self, f: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Cut potentials to rows and columns; without g both are f, on the diagonal one."""
        if self.diagonal:
            return f[self.rows], None
        return f[self.rows], (f if g is None else g)[self.columns]

    @property
    def mass(self) -> float:
        """The product of both masses."""
        return self.masses[0] * self.masses[1]


class Joined:
    """Softmins over blocks on their way to one, in float64.

    Args:
        like: (n,) float64, where.
        epsilon: in units of the cost.
    """

    def __init__(self, like: Tensor, epsilon: Epsilon) -> None:
        self._epsilon, self._logs = epsilon, torch.full_like(like, -torch.inf)

    def add(self, rows: slice | Tensor, found: Tensor, mass: float) -> None:
        """Add the softmin (k,) of some rows over a block of this mass, unless that is 0."""
        if mass == 0:
            return
        logs = torch.log(torch.tensor(mass, dtype=torch.float64)) - found.double() / self._epsilon
        self._logs[rows] = torch.logaddexp(self._logs[rows], logs)

    def are_near(self, guess: Tensor) -> Tensor:
        """Whether all softmins are so near a guess that float32 holds the sums beside it, ()."""
        return ((self.potential - guess).abs() <= FAR * self._epsilon).all()

    @property
    def potential(self) -> Tensor:
        """The softmin (n,) over the blocks so far, in units of the cost."""
        return -self._epsilon * self._logs


# Roundings of a mass that is divided by its block's and multiplied again.
ROUNDINGS = 8


class BlockSums(ABC):
    """The operations of `Operator` over pairs of blocks that a subclass provides.

    Args:
        cost: the whole.
        build: makes the operator of a pair of blocks.
        coarse: what this one is to refine; it has the same costs in `marginals`.
    """

    def __init__(
        self, cost: LabelledCost, build: Build, *, coarse: BlockSums | None = None
    ) -> None:
        self.cost, self._build, self._coarse = cost, build, coarse
        self.a, self.b, self.shape = cost.a, cost.b, cost.shape
        # By side and block; these live as long as this.
        self._masses: dict[tuple[int, int], tuple[Tensor, float]] = {}

    # Passes are long, and wait for what streams.
    recorded = False

    @property
    @abstractmethod
    def first(self) -> BlockOperator:
        """The operator of one pair of blocks, which says how those of all run."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the potentials."""
        return self.first.dtype

    @property
    def in_triton(self) -> bool:
        return self.first.in_triton

    @property
    def packing(self) -> Packing | None:
        """How blocks are packed; None where operators take points as they are, and no guess."""
        return self.first.packing

    @abstractmethod
    def tiles(self, *, upper: bool = False, points: bool = False) -> Iterator[Tile]:
        """All pairs of blocks; their points themselves are there if asked for.

        Of a cloud with itself if `upper`: each pair once, and none of a block's own twice.
        """

    @property
    @abstractmethod
    def additions(self) -> int:
        """Pairs of blocks whose sums make one, at the most."""

    def measured_tiles(self) -> Iterator[Tile]:
        """Yield the pairs of blocks that determine the errors of the costs."""
        return self.tiles(upper=self.cost.symmetric, points=True)

    def is_near(self, joined: Joined, guess: Tensor) -> bool:
        """Whether softmins are so near a guess that float32 holds the sums beside it."""
        return self.packing is None or bool(joined.are_near(guess))

    def tile(self, sides: tuple[There, There]) -> Tile:
        """The cost between two blocks, of a cloud with itself if they are one."""
        x, y = sides
        diagonal = x is y
        rows, points = x.block.rows, (x.points, y.points)
        part = self.cost.part(rows, rows if diagonal else y.block.rows, points, diagonal=diagonal)
        part.packed, part.known_of = (x.packed, y.packed), (x.known, y.known)
        part.a, row_mass = self._normalised(0, x.block, part.a)
        part.b, column_mass = self._normalised(0 if diagonal else 1, y.block, part.b)
        operator = self._build(part)
        if self._coarse is not None:
            operator = cast(BlockOperator, operator.refined)
        return Tile(sides, operator, (row_mass, column_mass), diagonal)

    def _normalised(self, side: int, block: Block, masses: Tensor) -> tuple[Tensor, float]:
        """Masses (k,) of a block over their sum, and the sum; found once, as the host waits."""
        key = side, id(block)
        if key not in self._masses:
            mass = float(masses.sum())
            self._masses[key] = masses / (mass or 1.0), mass
        return self._masses[key]

    @property
    def costs(self) -> CostFacts:
        """Facts of the costs, from all pairs of blocks."""
        return self._costs

    @cached_property
    def _costs(self) -> CostFacts:
        of_rows, of_columns = self.accurate_errors
        error = self.rounding + float(self.a @ of_rows + self.b @ of_columns)
        return CostFacts(self.dtype, self.cost.mean_cost, *self.cost.cost_range, error)

    @property
    def accurate_errors(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,): errors of costs in accurate `marginals`, but for `rounding`."""
        return self._errors[0]

    @property
    def rounding(self) -> float:
        """The mean error of costs where they are stored."""
        return self._errors[1]

    @cached_property
    def _errors(self) -> tuple[tuple[Tensor, Tensor], float]:
        if self._coarse is not None:
            return self._coarse._errors
        of_rows, of_columns = torch.zeros_like(self.a), torch.zeros_like(self.b)
        if self.cost.symmetric:
            of_columns = of_rows
        rounding = 0.0
        for tile in self.measured_tiles():
            rows, columns = tile.operator.accurate_errors
            _raise(of_rows, tile.rows, rows)
            _raise(of_columns, tile.columns, columns)
            rounding = max(rounding, tile.operator.rounding)
        return (of_rows, of_columns), rounding

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        return self._softmin(g, epsilon, guess, columns=False)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        return self._softmin(f, epsilon, guess, columns=True)

    def softmin_self(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """The softmin (n,) of the only potential of a cloud with itself: each pair once."""
        joined = self.joined_pairs(f, epsilon)
        if not self.is_near(joined, f):
            return self._softmin(f, epsilon, None, columns=False)
        return joined.potential.to(self.dtype)

    def _softmin(
        self, potential: Tensor, epsilon: Epsilon, guess: Tensor | None, *, columns: bool
    ) -> Tensor:
        """The softmin of rows or of columns; a guess too far from it costs another pass."""
        joined = Joined(self.b if columns else self.a, epsilon)
        for tile in self.tiles():
            own, other, mass = tile.rows, tile.columns, tile.masses[1]
            if columns:
                own, other, mass = tile.columns, tile.rows, tile.masses[0]
            near = None if guess is None else guess[own]
            found = tile.operator.softmin_part(potential[other], epsilon, near, columns=columns)
            joined.add(own, found, mass)
        if guess is not None and not self.is_near(joined, guess):
            return self._softmin(potential, epsilon, None, columns=columns)
        return joined.potential.to(self.dtype)

    def joined_pairs(self, f: Tensor, epsilon: Epsilon) -> Joined:
        """What pairs of blocks, each taken once, give to the softmin of one potential (n,)."""
        joined = Joined(self.a, epsilon)
        for tile in self.tiles(upper=True):
            one, other = tile.some(f, None)
            of_rows, of_columns = tile.operator.softmin_pair(one, other, epsilon)
            joined.add(tile.rows, of_rows, tile.masses[1])
            if not tile.diagonal:
                joined.add(tile.columns, of_columns, tile.masses[0])
        return joined

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (n,) and g (m,)."""
        rows, row_errors = torch.zeros_like(self.a), torch.zeros_like(self.a)
        columns, column_errors = torch.zeros_like(self.b), torch.zeros_like(self.b)
        if once := g is None:
            columns, column_errors = rows, row_errors
        cost_rounding = relative_error = lost = 0.0
        for tile in self.tiles(upper=once, points=True):
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
        return Marginals(
            rows,
            columns,
            row_errors,
            column_errors,
            cost_rounding,
            relative_error + (self.additions + ROUNDINGS) * DOUBLE_UNIT,
            lost,
        )

    def own_costs(self) -> Tensor:
        """C_ii (n,) of the cost of a cloud with itself, float64: a distance of classes."""
        return self.cost.own_costs()

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> BlockPlan:
        """The plan of f (n,) and g (m,); see `Operator.plan`."""
        return BlockPlan(self, f, g, epsilon, most)


class BlockPlan(EvaluatedPlan):
    """A plan whose products are sums over pairs of blocks; see `EvaluatedPlan`."""

    def __init__(
        self, operator: BlockSums, f: Tensor, g: Tensor | None, epsilon: float, most: int | None
    ) -> None:
        super().__init__(operator.dtype, (operator.a, operator.b), f, g, epsilon, most)
        self._operator = operator

    def applied(
        self, values: Tensor, *, transposed: bool = False, factors: Factors | None = None
    ) -> Applied:
        masses = torch.zeros_like(self.masses[transposed])
        out = values.new_zeros((len(masses), values.shape[1]), dtype=self.dtype)
        for tile in self._operator.tiles(points=True):
            own, other = (tile.columns, tile.rows) if transposed else (tile.rows, tile.columns)
            found = self.of_tile(tile, values[other], transposed=transposed, factors=factors)
            if found is not None:
                out[own] += found.values
                masses[own] += found.masses
        return Applied(out, masses)

    def of_tile(
        self, tile: Tile, values: Tensor, *, transposed: bool, factors: Factors | None = None
    ) -> Applied | None:
        """What a pair of blocks adds to a product, if anything.

        Rows of a tile that adds nothing have no plan.
        """
        if tile.masses[0 if transposed else 1] == 0:
            return None
        f, g, epsilon = self._at
        plan = tile.operator.plan(f[tile.rows], g[tile.columns], epsilon)
        some = factors and (factors[0][tile.rows], factors[1][tile.columns])
        found = plan.applied(values, transposed=transposed, factors=some)
        return Applied(tile.mass * found.values, tile.mass * found.masses)


def _raise(errors: Tensor, rows: slice | Tensor, found: Tensor) -> None:
    """Raise the errors of some rows to those given, where they are larger."""
    errors[rows] = torch.maximum(errors[rows], found)


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
    def first(self) -> BlockOperator:
        return self._first.operator

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
        return f"{self.first.backend}, points streamed in blocks of {height:,} x {width:,}"

    @cached_property
    def costs(self) -> CostFacts:
        facts = super().costs
        if self._coarse is not None or not self._rounds or self.cost.symmetric:
            return facts
        return facts._replace(rounding=float16_rounding(self.cost))

    @property
    def _rounds(self) -> bool:
        """Whether the operators of blocks have a refined form."""
        return self.first.refined is not self.first

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
