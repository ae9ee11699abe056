"""A cost whose points no rank holds all of: each has its shard, and those of others come by.

Rank r holds rows R_r of one cloud, or columns C_r, and a shard of the other, which goes round a
ring (`ring_blocks`): each rank computes with one shard after the other while the next is on its
way. What it finds is put together as of any blocks (`block_sums`). Labels, masses and norms of all
points are on every rank; they are little beside the points.

Of a cloud with itself ranks divide the pairs (`ring_pairs`).

All ranks call every operation together, also those that own no points.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from otdd_flash.cost.host_points import Block
from otdd_flash.cost.points import LabelledCost, Moments, normalised
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators.base import Execution
from otdd_flash.operators.block_sums import BlockSums
from otdd_flash.operators.block_tiles import BlockOperator, Build, Joined, Tile
from otdd_flash.operators.packed_blocks import Packing
from otdd_flash.operators.parts import EVERY, Part, Parts, sides_of
from otdd_flash.operators.ring_blocks import RingBlocks, Shard, count_of, cut, refined_blocks
from otdd_flash.operators.ring_pairs import RingPairs, RingShare

NOTHING = slice(0, 0)


class RingPart(BlockSums):
    """P_r, or Q_r, of points that no rank holds all of.

    Args:
        ranks: that hold the shards.
        cost: of the own rows and all columns, or all rows and the own columns, without points.
        sides: the blocks of the own side, and of the other.
        first: the operator of the first row and column, which tells how others run.
        build: makes the operator of a pair of blocks.
        columns: whether the own side are columns: Q_r.
        coarse: the part that this one is to refine.
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
        """Yield the own blocks with those of every rank."""
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

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def packing(self) -> Packing | None:
        return self._first.packing

    def is_near(self, joined: Joined, guess: Tensor) -> bool:
        """Decide for all ranks at once: all repeat a pass, or none does."""
        if self.packing is None:
            return True
        return bool(self._ranks.all_gathered(joined.are_near(guess)).all())

    @property
    def execution(self) -> Execution:
        """What ends a solve; all else is asked of another operator."""
        refine = None if self._first.execution.refined is None else self._refine
        over_columns = None if self._columns else self._over_columns
        return Execution("points in a ring", None, refine, over_columns=over_columns)

    def _refine(self) -> RingPart:
        first, sides = refined_blocks(self._first, *self._sides)
        given = self._ranks, self.cost, (sides[0], sides[1]), first, self._build
        return RingPart(*given, columns=self._columns, coarse=self)

    def _over_columns(self, columns: Tensor, g: Tensor, epsilon: float) -> Tensor:
        """The softmin (k,) over some columns (l,), int64, which alone go round."""
        own, other = self._sides
        points = _nowhere(self.cost, len(self.a)), _nowhere(self.cost, len(columns))
        part = self.cost.part(EVERY, columns, points)
        sides = own, other.some(columns)
        few = RingPart(self._ranks, part, sides, self._first, self._build, columns=False)
        return few.softmin_rows(g, epsilon)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Return sum_j C_ij q_j (k,) for masses q (m,), float64; no points go round."""
        own, other = self._sides
        none = _nowhere(self.cost, 0)
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

    def own_costs(self) -> Tensor:
        """Never called: the whole cost has its own diagonal."""
        raise AssertionError("the whole cost knows them")


def ring_parts(
    ranks: Ranks,
    cost: LabelledCost,
    points: tuple[Tensor, Tensor],
    first: tuple[Tensor, Tensor],
    build: Build,
) -> Parts:
    """What this rank holds of a cost whose points go round.

    Args:
        ranks: that share it.
        cost: the whole, without its points.
        points: of this rank, rows and columns of the cost.
        first: the first row and column, (1, d).
        build: makes operators of pairs of blocks.
    """
    sides = sides_of(cost)
    # One that cannot be built is refused by all.
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
        nowhere = _nowhere(cost, counts[0]), _nowhere(cost, counts[1])
        some = cost.part(*rows, nowhere)
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
    share = RingShare(pairs, rows.operator, sides[0].of(ranks))
    return Parts(cost, sides, beginning, rows, None, share)


def _width(ranks: Ranks, count: int, rank: int) -> int:
    """How many of so many points a rank owns."""
    share = ranks.share(count, rank)
    return len(range(share.start, share.stop))


def _nowhere(cost: LabelledCost, count: int) -> Tensor:
    """Return a meta tensor (count, d): reading these points raises."""
    points = cost.points[0]
    return torch.empty((count, points.shape[1]), dtype=points.dtype, device="meta")


def _from_0(blocks: RingBlocks) -> list[Block]:
    """The blocks that are here, as ranges of their points alone."""
    counts = [count_of(there.block) for there in blocks.own]
    return cut(slice(0, sum(counts)), sum(counts), len(counts))
