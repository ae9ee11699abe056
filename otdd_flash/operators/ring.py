"""A cost whose points are sharded: no rank holds all of them, and shards circulate in a ring.

Rank r holds rows R_r of one cloud, or columns C_r, and a shard of the other, which is passed from
rank to rank (`ring_blocks`): each computes with one shard while the next is being received. Results
are combined as those of any blocks (`blocked.BlockSums`). Labels, masses and norms of all points
are on every rank; they are small compared to the points.

For a self term ranks divide the pairs (`ring_pairs`). `sharing` calls `ring_parts`.

All ranks must call every operation together, also those that own no points.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from otdd_flash.cost.host_points import Block
from otdd_flash.cost.points import Cut, LabelledCost, Masses, Moments, normalised
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators.base import Passes
from otdd_flash.operators.blocked import BlockOperator, BlockSums, Build, SoftminAccumulator, Tile
from otdd_flash.operators.parts import EVERY, Part, Parts, sides_of
from otdd_flash.operators.ring_blocks import RingBlocks, Shard, count_of, cut, refined_blocks
from otdd_flash.operators.ring_pairs import RingPairs, RingShare
from otdd_flash.operators.self_share import BlockShare

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

    def part(self, rows: Cut, columns: Cut, masses: Masses | None = None) -> RingPart:
        """Return P_r of some columns (l,), int64; only these circulate."""
        assert not self._columns
        assert rows == EVERY
        assert isinstance(columns, Tensor)
        assert masses is None
        own, other = self._sides
        points = nowhere(self.cost, len(self.a)), nowhere(self.cost, len(columns))
        part = self.cost.part(EVERY, columns, points)
        sides = own, other.some(columns)
        return RingPart(self._ranks, part, sides, self.first, self._build, columns=False)

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
    pairs = RingPairs(ranks, cost, x, beginning, build)
    # Blocks are packed for kernels, whose sums are relative to a potential near the result.
    if pairs.packing is None:
        share = BlockShare(pairs)
    else:
        share = RingShare(pairs, rows.operator, sides[0].of(ranks))
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
