"""A cost whose points are sharded: every rank has a shard, and shards circulate in a ring.

Rank r holds rows R_r of one cloud, or columns C_r, and a shard of the other, which is passed from
rank to rank (`RingBlocks`): each computes with one shard while the next is being received. Results
are combined as those of any blocks (`blocked.BlockSums`). Rank 0, which has the given clouds,
sends every rank its shard; labels, masses and norms of all points, which are small, are on every
rank.

If kernels pack points, a rank packs its own shard once, and the packed form circulates: 2 bytes a
coordinate, or 4 if kernels read both parts. The order and norms of all packed points stay on every
rank. For certificates and products with the plan the unpacked points circulate.

For a self term ranks divide the pairs (`RingPairs`), and every pair is computed once. A shard
passes half of the ranks. Rank r computes the pairs of its points among themselves and with those of
the (R - 1) / 2 ranks after it. If R is even, ranks r and r + R / 2 divide the pairs between their
shards: the lower rank takes the first half of its own shard with all of the other's, the higher
rank the second half. So all ranks compute equally many. Results for points of other ranks are
merged by their owner, as those of any share (`self_share`).

`sharing` calls `ring_parts`, which returns this rank's `Parts` of the cost, and `parts` runs the
operations on them. All ranks must call every operation together, also those that own no points
(`tests/ranks/test_ring.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.host_points import Block
from otdd_flash.cost.points import LabelledCost, Moments, normalised
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators.base import Epsilon, Operator, Passes
from otdd_flash.operators.blocked import (
    FAR,
    BlockOperator,
    BlockPlan,
    BlockSums,
    Build,
    SoftminAccumulator,
    Tile,
)
from otdd_flash.operators.packed_blocks import DeviceBlock, Packing
from otdd_flash.operators.parts import EVERY, Part, Parts, Rows, sides_of
from otdd_flash.operators.self_share import BlockShare, NearShare

if TYPE_CHECKING:
    from otdd_flash.kernels.points.packed_points import PackedPoints


NOTHING = slice(0, 0)


class RingPart(BlockSums):
    """P_r, or Q_r, of a cost with sharded points.

    Args:
        ranks: that hold the shards.
        cost: of the own rows and all columns, or all rows and the own columns, without points.
        sides: the blocks of the own side, and of the other.
        first: the operator of the first row and column; the others run as it does.
        build: builds the operator of a pair of blocks.
        columns: whether it is Q_r, with the own columns.
        coarse: the part that this one refines.
    """

    def __init__(
        self,
        ranks: Ranks,
        cost: LabelledCost,
        sides: tuple[RingBlocks, RingBlocks],
        first: BlockOperator,
        build: Build,
        *,
        columns: bool,
        coarse: RingPart | None = None,
    ) -> None:
        super().__init__(cost, build, coarse=coarse)
        self._ranks, self._sides, self._first, self._columns = ranks, sides, first, columns
        self._own: list[Block] = _from_0(sides[0]) if coarse is None else coarse._own

    def tiles(self, *, upper: bool = False, points: bool = False) -> Iterator[Tile]:
        """Yield the pairs of an own block and a block of any rank."""
        assert not upper
        own, other = self._sides
        here = [
            there._replace(block=block) for there, block in zip(own.own, self._own, strict=True)
        ]
        for _, came in other.circulated(points=points):
            for there, one in product(came, here):
                if count_of(there.block) > 0 and count_of(one.block) > 0:
                    yield self.tile((there, one) if self._columns else (one, there))

    @property
    def additions(self) -> int:
        return len(self._own) * self._ranks.size

    def is_near(self, softmins: SoftminAccumulator, guess: Tensor) -> bool:
        """Decide for all ranks together: all repeat a pass, or none does."""
        if self.packing is None:
            return True
        return bool(self._ranks.all_gathered(softmins.are_near(guess)).all())

    @property
    def first(self) -> BlockOperator:
        return self._first

    @property
    def passes(self) -> Passes:
        """How passes run: as those of blocks, but never recorded, as ranks wait for each other."""
        of_one = self.first.passes
        return of_one._replace(backend=f"{of_one.backend}, points in a ring", recorded=False)

    @property
    def refined(self) -> RingPart:
        if self.first.refined is self.first:
            return self
        first, sides = refined_blocks(self.first, *self._sides)
        given = self._ranks, self.cost, (sides[0], sides[1]), first, self._build
        return RingPart(*given, columns=self._columns, coarse=self)

    def softmin_over(self, columns: Tensor, g: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute the softmin of own rows over some columns (l,), int64; only these circulate."""
        assert not self._columns
        own, other = self._sides
        points = nowhere(self.cost, len(self.a)), nowhere(self.cost, len(columns))
        part = self.cost.part(EVERY, columns, points)
        sides = own, other.some(columns)
        some = RingPart(self._ranks, part, sides, self.first, self._build, columns=False)
        return some.softmin_rows(g, epsilon)

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> BlockPlan:
        """Build the plan of f (n,) and g (m,); see `Operator.plan`."""
        return BlockPlan(self, f, g, epsilon, most)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (k,) for masses q (m,), float64; no points circulate."""
        own, other = self._sides
        none = nowhere(self.cost, 0)
        found = torch.empty_like(self.a)
        like = (masses.new_zeros(()), torch.zeros_like(self.cost.centre), masses.new_zeros(()))
        total = Moments(*like, masses.new_zeros(self.cost.class_costs.shape[1]))
        for there in other.own:
            rows = there.block.rows
            if count_of(there.block) > 0:
                part = self.cost.part(NOTHING, rows, (none, there.points))
                total = Moments(*map(torch.add, total, part.moments(masses[rows])))
        flat = self._ranks.summed(torch.cat([each.flatten() for each in total]))
        parts = torch.split(flat, [each.numel() for each in total])
        moments = Moments(*(each.view(to.shape) for each, to in zip(parts, total, strict=True)))
        for there, block in zip(own.own, self._own, strict=True):
            if count_of(block) > 0:
                part = self.cost.part(block.rows, NOTHING, (there.points, none))
                found[block.rows] = part.costs_of(moments)
        return found


def ring_parts(
    ranks: Ranks,
    cost: LabelledCost,
    points: tuple[Tensor, Tensor],
    first: tuple[Tensor, Tensor],
    build: Build,
) -> Parts:
    """Build this rank's parts of a cost with sharded points.

    Args:
        ranks: the processes that share it.
        cost: the whole cost, without its points.
        points: this rank's shards of the rows and of the columns.
        first: the first row and the first column of the cost, (1, d).
        build: builds operators of pairs of blocks.
    """
    sides = sides_of(cost)
    # If one rank cannot build it, all raise.
    beginning = ranks.together(lambda: build(cost.part(slice(0, 1), slice(0, 1), first)))
    cuts = 2 if cost.symmetric and ranks.size % 2 == 0 else 1
    blocks: list[RingBlocks] = []
    for side in (0,) if cost.symmetric else (0, 1):
        held = [
            cut(sides[side].of(ranks, rank), _width(ranks, sides[side].count, rank), cuts)
            for rank in range(ranks.size)
        ]
        shard = Shard(
            points[side], first[side], held, cost.labels[side], cost.class_costs.shape[side]
        )
        blocks.append(RingBlocks(ranks, shard, beginning.packing, side))
    x, y = blocks[0], blocks[-1]

    def part(columns: bool) -> Part:
        own = sides[columns].of(ranks)
        counts = [side.count for side in sides]
        counts[columns] = _width(ranks, counts[columns], ranks.rank)
        rows: tuple[slice | Tensor, slice | Tensor] = (EVERY, own) if columns else (own, EVERY)
        absent = nowhere(cost, counts[0]), nowhere(cost, counts[1])
        some = cost.part(*rows, absent)
        masses, mass = normalised(some.b if columns else some.a)
        if columns:
            some.b = masses
        else:
            some.a = masses
        held = (y, x) if columns else (x, y)
        return Part(RingPart(ranks, some, held, beginning, build, columns=columns), mass)

    rows = part(columns=False)
    if not cost.symmetric:
        return Parts(cost, sides, beginning, rows, part(columns=True))
    share = RingPairs(ranks, cost, x, beginning, build, rows.operator)
    return Parts(cost, sides, beginning, rows, None, share)


def _width(ranks: Ranks, count: int, rank: int) -> int:
    """Return how many of `count` points a rank owns."""
    share = ranks.share(count, rank)
    return len(range(share.start, share.stop))


def nowhere(cost: LabelledCost, count: int) -> Tensor:
    """Return a meta tensor (count, d): reading these points raises."""
    points = cost.points[0]
    return torch.empty((count, points.shape[1]), dtype=points.dtype, device="meta")


def _from_0(blocks: RingBlocks) -> list[Block]:
    """Return this rank's blocks as ranges that count from its own first point."""
    counts = [count_of(there.block) for there in blocks.own]
    return cut(slice(0, sum(counts)), sum(counts), len(counts))


# Shapes of the blocks of every rank.
Shapes = list[list[torch.Size]]


class Shard(NamedTuple):
    """A rank's shard of a side (N, d), and facts of all shards.

    Attributes:
        points: (k, d) of this rank.
        first: the first point of the side (1, d).
        blocks: of every rank, in the order of its points.
        labels: (N,) of all points.
        classes: number of classes.
    """

    points: Tensor
    first: Tensor
    blocks: list[list[Block]]
    labels: Tensor
    classes: int


class RingBlocks:
    """The blocks of a side, which circulate among ranks.

    Args:
        ranks: that hold the shards.
        shard: of this rank.
        packing: how blocks are packed; None if operators read points as they are.
        side: 0 for rows of the cost, 1 for columns.
    """

    def __init__(self, ranks: Ranks, shard: Shard, packing: Packing | None, side: int) -> None:
        self._ranks, self._shard, self._packing, self._side = ranks, shard, packing, side
        counts = [count_of(block) for block in shard.blocks[ranks.rank]]
        self._points = list(torch.split(shard.points, counts))
        # Cached results of passes for the points of every rank's blocks.
        self._known: list[list[dict[str, Any]]] = [[{} for _ in held] for held in shard.blocks]
        self._packed: list[list[PackedPoints]] = []
        if packing is not None:
            self._pack(packing)

    def _pack(self, packing: Packing) -> None:
        """Pack this rank's blocks, and exchange order and norms of all packed points."""
        # Triton is not everywhere.
        from otdd_flash.kernels.points.packed_points import arrange

        side, shard, own = self._side, self._shard, self._ranks.rank
        like = packing.pack(side, shard.labels[:1], shard.first, None)
        nothing, none = like.coordinates[:0], like.squares[:, :0]
        for rank, blocks in enumerate(shard.blocks):
            held = []
            for place, block in enumerate(blocks):
                labels = shard.labels[block.rows]
                layout = arrange(labels, shard.classes)
                if rank == own and len(labels) > 0:
                    held.append(packing.pack(side, labels, self._points[place], layout))
                else:
                    held.append(replace(like, layout=layout, coordinates=nothing, squares=none))
            self._packed.append(held)
        squares = [packed.squares for packed in self._packed[own]]
        shapes = [[torch.Size((2, packed.layout.size)) for packed in held] for held in self._packed]
        for rank, came in self._ranks.circulated(squares, shapes):
            self._packed[rank] = [
                replace(packed, squares=norms)
                for packed, norms in zip(self._packed[rank], came, strict=True)
            ]

    def for_parts(self, packing: Packing | None) -> RingBlocks:
        """Return the same blocks for kernels that read other parts; the points are shared."""
        found = copy(self)
        found._packing = packing
        return found

    def some(self, points: Tensor) -> RingBlocks:
        """Restrict every rank's blocks to some points (l,) int64 of the side."""
        shard, first = self._shard, 0
        place, starts = torch.empty_like(shard.labels), [0]
        for blocks in shard.blocks:
            for block in blocks:
                count = count_of(block)
                place[block.rows] = torch.arange(first, first + count, device=place.device)
                first += count
            starts.append(first)
        places, held = place[points], []
        for start, end in itertools.pairwise(starts):
            rows = ((places >= start) & (places < end)).nonzero()[:, 0]
            held.append([Block(rows, rows)])
        rank = self._ranks.rank
        own = shard.points[places[held[rank][0].rows] - starts[rank]]
        some = shard._replace(points=own, blocks=held, labels=shard.labels[points])
        return RingBlocks(self._ranks, some, self._packing, self._side)

    @property
    def own(self) -> list[DeviceBlock]:
        """The blocks of this rank, with their packed form."""
        rank = self._ranks.rank
        packed = self._packed[rank] if self._packing else [None] * len(self._points)
        blocks, known = self._shard.blocks[rank], self._known[rank]
        return [
            DeviceBlock(*each) for each in zip(blocks, self._points, packed, known, strict=True)
        ]

    def circulated(
        self, *, points: bool, count: int | None = None
    ) -> Iterator[tuple[int, list[DeviceBlock]]]:
        """Yield the blocks of `count` ranks, all by default: this rank's, then those after it.

        `points` asks for the unpacked points.
        """
        points = points or self._packing is None
        sent, shapes = self._as_they_are() if points else self._as_packed()
        for rank, came in self._ranks.circulated(sent, shapes, count):
            if rank == self._ranks.rank:
                yield rank, self.own
            else:
                arrived = self._arrived if points else self._arrived_packed
                yield rank, [arrived(rank, place, there) for place, there in enumerate(came)]

    def _as_they_are(self) -> tuple[list[Tensor], Shapes]:
        """Return this rank's unpacked points, and the shapes of every rank's."""
        dim = self._shard.points.shape[1]
        shapes = [
            [torch.Size((count_of(block), dim)) for block in held] for held in self._shard.blocks
        ]
        return self._points, shapes

    def _as_packed(self) -> tuple[list[Tensor], Shapes]:
        """Return this rank's packed parts that softmins read, and the shapes of every rank's."""
        assert self._packing is not None
        own, parts = self._packed[self._ranks.rank], self._packing.parts
        width = own[0].coordinates.shape[1]
        shapes = [
            [torch.Size((parts * packed.layout.size, width)) for packed in held]
            for held in self._packed
        ]
        return [packed.coordinates[: parts * packed.layout.size] for packed in own], shapes

    def _arrived(self, rank: int, place: int, points: Tensor) -> DeviceBlock:
        """Return the block of unpacked points (k, d) that were received."""
        block, known = self._shard.blocks[rank][place], self._known[rank][place]
        packed = self._packed[rank][place] if self._packing else None
        if self._packing is not None and packed is not None and len(points) > 0:
            labels = self._shard.labels[block.rows]
            packed = self._packing.pack(self._side, labels, points, packed.layout)
        return DeviceBlock(block, points, packed, known)

    def _arrived_packed(self, rank: int, place: int, coordinates: Tensor) -> DeviceBlock:
        """Return the block of packed coordinates, in the parts that softmins read."""
        block, known = self._shard.blocks[rank][place], self._known[rank][place]
        shape = count_of(block), self._shard.points.shape[1]
        # A meta tensor: reading these points raises.
        nowhere = self._shard.points.new_empty(shape, device="meta")
        packed = replace(self._packed[rank][place], coordinates=coordinates)
        return DeviceBlock(block, nowhere, packed, known)


def refined_blocks(
    first: BlockOperator, *blocks: RingBlocks
) -> tuple[BlockOperator, list[RingBlocks]]:
    """Return an operator at full accuracy, and blocks with the float16 parts that it reads."""
    found = first.refined
    return found, [each.for_parts(found.packing) for each in blocks]


def cut(rows: Rows, count: int, size: int) -> list[Block]:
    """Cut points into `size` blocks, as even as possible."""
    ends = [place * count // size for place in range(size + 1)]
    found = []
    for first, end in itertools.pairwise(ends):
        if isinstance(rows, slice):
            some: Rows = slice(rows.start + first, rows.start + end)
        else:
            some = rows[first:end]
        found.append(Block(some, some))
    return found


def count_of(block: Block) -> int:
    """Return the number of points of a block, whose rows are a range or indices."""
    rows = block.rows
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


class RingPairs(BlockShare, NearShare):
    """This rank's pairs of a self term.

    Args:
        ranks: that hold the shards.
        cost: the whole cost, without points.
        blocks: of the cloud: two per rank if the number of ranks is even, else one.
        first: the operator of the first row and column; the others run as it does.
        build: builds the operator of a pair of blocks.
        rows: P_r, which computes softmins out of reach again.
        coarse: the pairs that these refine.
    """

    repairs_alone = False

    def __init__(
        self,
        ranks: Ranks,
        cost: LabelledCost,
        blocks: RingBlocks,
        first: BlockOperator,
        build: Build,
        rows: Operator | RingPart,
        *,
        coarse: RingPairs | None = None,
    ) -> None:
        super().__init__(cost, build, coarse=coarse)
        self._ranks, self._blocks, self._first, self._rows = ranks, blocks, first, rows
        # Blocks are packed for kernels, whose sums are relative to a potential near the result.
        self.reach = math.inf if self.packing is None else FAR

    def tiles(self, *, upper: bool = False, points: bool = False) -> Iterator[Tile]:
        """Yield the pairs of blocks of this rank, each once."""
        assert upper
        size, own = self._ranks.size, self._ranks.rank
        here = self._blocks.own
        for rank, came in self._blocks.circulated(points=points, count=size // 2 + 1):
            mine, theirs = here, came
            if rank == own:
                pairs = list(combinations_with_replacement(here, 2))
            else:
                if 2 * ((rank - own) % size) == size:
                    # The other rank computes the other half of the lower one's shard.
                    mine, theirs = (here[:1], came) if own < rank else (here, came[1:])
                pairs = list(product(mine, theirs))
            for one, other in pairs:
                if count_of(one.block) > 0 and count_of(other.block) > 0:
                    yield self.tile((one, other))

    @property
    def additions(self) -> int:
        return 2 * self._ranks.size

    @property
    def first(self) -> BlockOperator:
        return self._first

    @property
    def refined(self) -> RingPairs:
        if self._first.refined is self._first:
            return self
        first, (blocks,) = refined_blocks(self._first, self._blocks)
        given = self._ranks, self.cost, blocks, first, self._build, self._rows.refined
        return RingPairs(*given, coarse=self)

    def repaired(self, f: Tensor, epsilon: Epsilon, rows: Tensor) -> Tensor:
        """Compute T(f) (n,) for all rows of this rank, from all shards; 0 elsewhere."""
        found = torch.zeros_like(self.a, dtype=self.dtype)
        found[sides_of(self.cost)[0].of(self._ranks)] = self._rows.softmin_rows(f, epsilon)
        return found
