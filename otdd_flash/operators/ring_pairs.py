"""A rank's pairs of a self term whose sharded points circulate in a ring: every pair once.

A shard passes half of the ranks. Rank r computes the pairs of its points among themselves and with
those of the (R - 1) / 2 ranks after it. If R is even, ranks r and r + R / 2 divide the pairs
between their shards: the lower rank takes the first half of its own shard with all of the other's,
the higher rank the second half. So all ranks compute equally many. Results for points of other
ranks are merged by their owner, as those of any share (`self_share`). `ring.ring_parts` builds
these.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product

import torch
from torch import Tensor

from otdd_flash.cost.points import LabelledCost
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators.base import Epsilon, Operator
from otdd_flash.operators.blocked import FAR, BlockOperator, BlockSums, Build, Tile
from otdd_flash.operators.owned import Rows
from otdd_flash.operators.ring_blocks import RingBlocks, count_of, refined_blocks
from otdd_flash.operators.self_share import BlockShare, NearShare


class RingPairs(BlockSums):
    """This rank's pairs of a self term.

    Args:
        ranks: that hold the shards.
        cost: the whole cost, without points.
        blocks: of the cloud: two per rank if the number of ranks is even, else one.
        first: the operator of the first row and column; the others run as it does.
        build: builds the operator of a pair of blocks.
        coarse: the pairs that these refine.
    """

    def __init__(
        self,
        ranks: Ranks,
        cost: LabelledCost,
        blocks: RingBlocks,
        first: BlockOperator,
        build: Build,
        *,
        coarse: RingPairs | None = None,
    ) -> None:
        super().__init__(cost, build, coarse=coarse)
        self._ranks, self._blocks, self._first = ranks, blocks, first

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
        return RingPairs(self._ranks, self.cost, blocks, first, self._build, coarse=self)


class RingShare(BlockShare, NearShare):
    """One rank's share of the pairs of a self term with sharded points, in Triton.

    Args:
        pairs: of this rank.
        rows: P_r, which computes softmins out of reach again.
        own: indices of this rank's points in the whole cloud.
    """

    reach = FAR
    repairs_alone = False

    def __init__(self, pairs: RingPairs, rows: Operator, own: Rows) -> None:
        super().__init__(pairs)
        self._ring, self._rows, self._own = pairs, rows, own

    @property
    def refined(self) -> RingShare:
        return RingShare(self._ring.refined, self._rows.refined, self._own)

    def repaired(self, f: Tensor, epsilon: Epsilon, rows: Tensor) -> Tensor:
        """Compute T(f) (n,) for all rows of this rank, from all shards; 0 elsewhere."""
        found = torch.zeros_like(self._pairs.a, dtype=self._pairs.dtype)
        found[self._own] = self._rows.softmin_rows(f, epsilon)
        return found
