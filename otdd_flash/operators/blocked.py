"""Operators over pairs of blocks, for points of which the device holds a few blocks at a time.

    f_i = -epsilon log sum_c w_c exp(-f_i^c / epsilon)

where f^c is the softmin over block c of the columns, whose masses are divided by their sum w_c.
Each pair of blocks is a cost of its own, whose operator is built when the blocks arrive. Plan sums
and products are added in the order of the pairs; softmins are combined in float64.

`BlockSums` combines the results of pairs of blocks. `BlockedOperator`, which `build` makes, streams
blocks from host memory or a file (`cost.host_points`). `ring.RingPart` and `ring.RingPairs` receive
them from other ranks; the points of `self_share.FoldedPairs` are all on the device. `parts` reads
the error bounds of a `BlockOperator` and adds ROUNDINGS to those of a shared cost.

A change must keep the errors in `marginals` upper bounds: they are the largest over the pairs, with
ROUNDINGS for masses that are divided and multiplied by w_c. A softmin of kernels may be kept only
if its guess was within FAR of it; otherwise the pass is repeated without a guess.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

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
    Passes,
    PlanBlock,
)
from otdd_flash.operators.packed_blocks import DeviceBlock, PackedBlocks, Packing

if TYPE_CHECKING:
    # It imports this file.
    from otdd_flash.operators.ring import RingPart

# Largest |softmin - guess| over epsilon: sums relative to the guess then are within 2^90 of 1.
FAR = 90 * math.log(2)

# build(cost): the operator of a cost whose points are on the device.
Build = Callable[[LabelledCost], "BlockOperator"]


class BlockOperator(Operator, Protocol):
    """An operator of a pair of blocks, with error bounds by point and the packing of points."""

    @property
    def refined(self) -> BlockOperator:
        """The same cost at the full accuracy of the potentials; itself if it has that already."""
        ...

    @property
    def accurate_errors(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,): the error of C_ij in accurate `marginals` is at most row_i + column_j."""
        ...

    @property
    def rounding(self) -> float:
        """The mean rounding error of stored costs, which is added to that; 0 if none are stored."""
        ...

    @property
    def packing(self) -> Packing | None:
        """How it packs points for kernels; None if it reads them as they are."""
        ...

    def softmin_part(
        self, potential: Tensor, epsilon: Epsilon, near: Tensor | None, *, columns: bool
    ) -> Tensor:
        """Compute the softmin of rows, or of columns, as one part of a softmin over more blocks.

        `near` is close to that whole softmin; where this part changes it by less than rounding, the
        result may be infinite.
        """
        ...

    def softmin_pair(self, f: Tensor, g: Tensor | None, epsilon: Epsilon) -> tuple[Tensor, Tensor]:
        """Compute `softmin_part` of rows near f (n,) and of columns near g (m,).

        Without g, for a cloud with itself, both are the same tensor.
        """
        ...


class Tile(NamedTuple):
    """A block of rows and one of columns, with the operator of the cost between them.

    Attributes:
        sides: both blocks.
        operator: with masses that sum to 1 on each side that has mass.
        masses: the blocks' masses in the whole cost.
        diagonal: whether both are one block of a cloud's cost with itself.
    """

    sides: tuple[DeviceBlock, DeviceBlock]
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

    def beside(self, there: DeviceBlock, side: int) -> tuple[DeviceBlock, DeviceBlock]:
        """Return both blocks with that of one side replaced."""
        one, other = self.sides
        return (one, there) if side else (there, other)

    def some(self, f: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Cut f and g to the tile; without g, f is both. None for g on the diagonal."""
        if self.diagonal:
            return f[self.rows], None
        return f[self.rows], (f if g is None else g)[self.columns]

    @property
    def mass(self) -> float:
        """The product of both masses."""
        return self.masses[0] * self.masses[1]


class SoftminAccumulator:
    """An accumulator, in float64, of softmins over blocks into the softmin over all of them.

    Args:
        like: (n,) float64, of the shape and device of the result.
        epsilon: in units of the cost.
    """

    def __init__(self, like: Tensor, epsilon: Epsilon) -> None:
        self._epsilon, self._logs = epsilon, torch.full_like(like, -torch.inf)

    def add(self, rows: slice | Tensor, found: Tensor, mass: float) -> None:
        """Add the softmin (k,) of some rows over a block of this mass; nothing if that is 0."""
        if mass == 0:
            return
        logs = torch.log(torch.tensor(mass, dtype=torch.float64)) - found.double() / self._epsilon
        self._logs[rows] = torch.logaddexp(self._logs[rows], logs)

    def are_near(self, guess: Tensor) -> Tensor:
        """Return (), whether float32 holds the sums of all softmins relative to a guess."""
        return ((self.potential - guess).abs() <= FAR * self._epsilon).all()

    @property
    def potential(self) -> Tensor:
        """The softmin (n,) over the blocks so far, in units of the cost."""
        return -self._epsilon * self._logs


# Roundings of a mass that is divided by its block's mass and multiplied by it again.
ROUNDINGS = 8


class BlockSums(ABC):
    """The operations of `Operator` over pairs of blocks that a subclass provides.

    Args:
        cost: the whole cost.
        build: builds the operator of a pair of blocks.
        coarse: the operator that this one refines; costs in `marginals` are the same.
    """

    def __init__(
        self, cost: LabelledCost, build: Build, *, coarse: BlockSums | None = None
    ) -> None:
        self.cost, self._build, self._coarse = cost, build, coarse
        self.a, self.b, self.shape = cost.a, cost.b, cost.shape
        # By side and id of the block; blocks live as long as this object.
        self._masses: dict[tuple[int, int], tuple[Tensor, float]] = {}

    @property
    @abstractmethod
    def first(self) -> BlockOperator:
        """The operator of one pair of blocks; those of all pairs run as it does."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the potentials."""
        return self.first.passes.dtype

    @property
    def packing(self) -> Packing | None:
        """How blocks are packed; None if operators read points as they are, and ignore guesses."""
        return self.first.packing

    @abstractmethod
    def tiles(self, *, upper: bool = False, points: bool = False) -> Iterator[Tile]:
        """Yield all pairs of blocks; `points` asks for the unpacked points as well.

        With `upper`, for a cloud with itself, each unordered pair of blocks once.
        """

    @property
    @abstractmethod
    def additions(self) -> int:
        """The most pairs of blocks whose sums are added to one sum."""

    def measured_tiles(self) -> Iterator[Tile]:
        """Yield the pairs of blocks, for the error bounds of all costs."""
        return self.tiles(upper=self.cost.symmetric, points=True)

    def is_near(self, softmins: SoftminAccumulator, guess: Tensor) -> bool:
        """Whether float32 held the sums of all softmins relative to a guess."""
        return self.packing is None or bool(softmins.are_near(guess))

    def tile(self, sides: tuple[DeviceBlock, DeviceBlock]) -> Tile:
        """Build the tile of two blocks; it is diagonal if they are the same object."""
        x, y = sides
        diagonal = x is y
        rows, points = x.block.rows, (x.points, y.points)
        part = self.cost.part(rows, rows if diagonal else y.block.rows, points, diagonal=diagonal)
        part.packed, part.known_of = (x.packed, y.packed), (x.known, y.known)
        part.a, row_mass = self._normalised(0, x.block, part.a)
        part.b, column_mass = self._normalised(0 if diagonal else 1, y.block, part.b)
        operator = self._build(part)
        if self._coarse is not None:
            operator = operator.refined
        return Tile(sides, operator, (row_mass, column_mass), diagonal)

    def _normalised(self, side: int, block: Block, masses: Tensor) -> tuple[Tensor, float]:
        """Return masses (k,) of a block over their sum, and the sum; cached, as the host waits."""
        key = side, id(block)
        if key not in self._masses:
            mass = float(masses.sum())
            self._masses[key] = masses / (mass or 1.0), mass
        return self._masses[key]

    @property
    def costs(self) -> CostFacts:
        """Facts of the cost; errors are bounded over all pairs of blocks."""
        return self._costs

    @cached_property
    def _costs(self) -> CostFacts:
        of_rows, of_columns = self.accurate_errors
        error = self.rounding + float(self.a @ of_rows + self.b @ of_columns)
        return CostFacts(self.dtype, self.cost.mean_cost, *self.cost.cost_range, error)

    @property
    def accurate_errors(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,): error bounds of costs in accurate `marginals`, without `rounding`."""
        return self._errors[0]

    @property
    def rounding(self) -> float:
        """The mean rounding error of stored costs."""
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
            _take_maximum(of_rows, tile.rows, rows)
            _take_maximum(of_columns, tile.columns, columns)
            rounding = max(rounding, tile.operator.rounding)
        return (of_rows, of_columns), rounding

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        return self._softmin(g, epsilon, guess, columns=False)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        return self._softmin(f, epsilon, guess, columns=True)

    def softmin_self(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute T(f) (n,) for the potential of a self term, from each pair of blocks once."""
        softmins = self.accumulate_pairs(f, epsilon)
        if not self.is_near(softmins, f):
            return self._softmin(f, epsilon, None, columns=False)
        return softmins.potential.to(self.dtype)

    def _softmin(
        self, potential: Tensor, epsilon: Epsilon, guess: Tensor | None, *, columns: bool
    ) -> Tensor:
        """Compute the softmin of rows or of columns; repeat the pass if the guess was too far."""
        softmins = SoftminAccumulator(self.b if columns else self.a, epsilon)
        for tile in self.tiles():
            own, other, mass = tile.rows, tile.columns, tile.masses[1]
            if columns:
                own, other, mass = tile.columns, tile.rows, tile.masses[0]
            near = None if guess is None else guess[own]
            found = tile.operator.softmin_part(potential[other], epsilon, near, columns=columns)
            softmins.add(own, found, mass)
        if guess is not None and not self.is_near(softmins, guess):
            return self._softmin(potential, epsilon, None, columns=columns)
        return softmins.potential.to(self.dtype)

    def accumulate_pairs(self, f: Tensor, epsilon: Epsilon) -> SoftminAccumulator:
        """Accumulate the softmin of the potential (n,) of a self term, each pair of blocks once."""
        softmins = SoftminAccumulator(self.a, epsilon)
        for tile in self.tiles(upper=True):
            one, other = tile.some(f, None)
            of_rows, of_columns = tile.operator.softmin_pair(one, other, epsilon)
            softmins.add(tile.rows, of_rows, tile.masses[1])
            if not tile.diagonal:
                softmins.add(tile.columns, of_columns, tile.masses[0])
        return softmins

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Compute the row and column sums of the plan of f (n,) and g (m,)."""
        rows, row_errors = torch.zeros_like(self.a), torch.zeros_like(self.a)
        columns, column_errors = torch.zeros_like(self.b), torch.zeros_like(self.b)
        if once := g is None:
            columns, column_errors = rows, row_errors
        cost_rounding = relative_error = underflow = 0.0
        for tile in self.tiles(upper=once, points=True):
            here, there, mass = tile.rows, tile.columns, tile.mass
            found = tile.operator.marginals(*tile.some(f, g), epsilon, accurate=accurate)
            _take_maximum(row_errors, here, found.row_errors)
            _take_maximum(column_errors, there, found.column_errors)
            rows[here] += mass * found.rows
            if not tile.diagonal:
                columns[there] += mass * found.columns
            cost_rounding = max(cost_rounding, found.cost_rounding)
            relative_error = max(relative_error, found.relative_error)
            underflow = max(underflow, found.underflow)
        return Marginals(
            rows,
            columns,
            row_errors,
            column_errors,
            cost_rounding,
            relative_error + (self.additions + ROUNDINGS) * DOUBLE_UNIT,
            underflow,
            self.cost.own_costs() if once else None,
        )


class BlockPlan(EvaluatedPlan):
    """A plan whose products are sums over pairs of blocks; see `EvaluatedPlan`."""

    operator: BlockedOperator | RingPart

    def applied(
        self, values: Tensor, *, transposed: bool = False, factors: Factors | None = None
    ) -> Applied:
        masses = torch.zeros_like(self.masses[transposed])
        out = values.new_zeros((len(masses), values.shape[1]), dtype=self.dtype)
        for tile in self.operator.tiles(points=True):
            own, other = (tile.columns, tile.rows) if transposed else (tile.rows, tile.columns)
            found = self.of_tile(tile, values[other], transposed=transposed, factors=factors)
            if found is not None:
                out[own] += found.values
                masses[own] += found.masses
        return Applied(out, masses)

    def of_tile(
        self, tile: Tile, values: Tensor, *, transposed: bool, factors: Factors | None = None
    ) -> Applied | None:
        """Compute what a pair of blocks adds to a product; None if the multiplied side has no mass.

        The tile's plan is undefined then.
        """
        if tile.masses[0 if transposed else 1] == 0:
            return None
        f, g, epsilon = self._at
        plan = tile.operator.plan(f[tile.rows], g[tile.columns], epsilon)
        some = factors and (factors[0][tile.rows], factors[1][tile.columns])
        found = plan.applied(values, transposed=transposed, factors=some)
        return Applied(tile.mass * found.values, tile.mass * found.masses)


def _take_maximum(errors: Tensor, rows: slice | Tensor, found: Tensor) -> None:
    """Replace the errors of some rows by the maximum of these and those found, in place."""
    errors[rows] = torch.maximum(errors[rows], found)


# Bytes of a coordinate on the device, unpacked and packed. Of the columns two blocks are there: one
# is copied while the other is used.
ROW_BYTES, COLUMN_BYTES = 8, 16
# The least share of the columns in the memory for points, which is small as columns are streamed
# once per block of rows; and the fewest points of a block.
COLUMN_SHARE, LEAST_POINTS = 0.125, 256


class BlockedOperator(BlockSums):
    """A cost between labelled clouds that are streamed.

    Args:
        cost: its points are `HostPoints`.
        build: builds the operator of a pair of blocks.
        coarse: the operator that this one refines.
        rows: an operator with the same rows, whose packed blocks are reused.
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
        one, other = (DeviceBlock(first, points[first.rows], None) for points in sides)
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
        """Yield all pairs of blocks, row by row; with `upper` those on and above the diagonal."""
        for turn, own in enumerate(self._there.stream(0, self._rows, points=points)):
            after = self._columns
            if upper:
                yield self.tile((own, own))
                after = after[turn + 1 :]
            for other in self._there.stream(1, after, points=points):
                yield self.tile((own, other))

    def by_columns(self) -> Iterator[Tile]:
        """Yield all pairs of blocks, column by column."""
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
        """Measure and cache how far packing moves the points, which are read once for it."""
        if self.packing is None:
            return
        for side, blocks in enumerate(self._blocks[: 1 if self.cost.symmetric else 2]):
            for there in self._there.stream(side, blocks, points=True):
                _ = self.tile(self._first.beside(there, side)).operator.accurate_errors

    @cached_property
    def passes(self) -> Passes:
        """How passes run: as those of the blocks, but never recorded, as they wait for points."""
        of_one = self.first.passes
        height, width = (
            len(self.a[self._rows[0].rows]),
            len(self.b[self._columns[0].rows]),
        )
        backend = f"{of_one.backend}, points streamed in blocks of {height:,} x {width:,}"
        return of_one._replace(backend=backend, recorded=False)

    @cached_property
    def costs(self) -> CostFacts:
        facts = super().costs
        if self._coarse is not None or not self._rounds or self.cost.symmetric:
            return facts
        return facts._replace(rounding=float16_rounding(self.cost))

    @property
    def _rounds(self) -> bool:
        """Whether the operators of blocks round points, and so have a refined form."""
        return self.first.refined is not self.first

    @property
    def refined(self) -> BlockedOperator:
        if self._coarse is not None or not self._rounds:
            return self
        return BlockedOperator(self.cost, self._build, coarse=self)

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> Operator:
        """Return the cost between some rows and columns, with other masses, on the device."""
        return self._build(self.cost.sample(rows, columns, masses))

    def softmin_over(self, columns: Tensor, g: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute the softmin of rows, in packed blocks as before, over some columns (l,)."""
        part = BlockedOperator(self.cost.part(slice(None), columns), self._build, rows=self)
        return part.softmin_rows(g, epsilon)

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> BlockedPlan:
        """Build the plan of f (n,) and g (m,); see `Operator.plan`."""
        return BlockedPlan(self, f, g, epsilon, most)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64: both sides are streamed once."""
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
    """A plan of streamed points, whose products are computed one block of the result at a time."""

    operator: BlockedOperator

    def blocks(
        self, points: tuple[Points, Points], make: Make, *, transposed: bool = False
    ) -> Iterator[PlanBlock]:
        operator = self.operator
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
    """Return the blocks of rows and of columns; the same object twice for a cloud with itself.

    A cloud that fits as one block of rows needs no memory for columns.
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
    """Return the size of the fewest, nearly equal, blocks of at most `most` points."""
    return -(-count // -(-count // most))
