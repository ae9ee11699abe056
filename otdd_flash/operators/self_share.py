"""What each of several processes computes of the cost of a cloud with itself: every pair once.

The points are cut into 2 R ranges of one size. Rank r has ranges r and 2 R - 1 - r, and with each
the pairs of its points with those of the same and of all later ranges. A range that is early has
many pairs and a late one few, so that all ranks have as many.

A pair (i, j) is part of the sum of i and of that of j. Rank r finds

    p_ri = -epsilon log sum_j a_j exp((f_j - C_ij) / epsilon)

over the j whose pair with i is its own, +inf without such pairs, and

    T(f)_i = -epsilon log sum_r exp(-p_ri / epsilon).

p_ri says the maximum and the sum of what it is made of in one number, float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.host_points import Block
from otdd_flash.cost.points import LabelledCost
from otdd_flash.distributed.exchange import added
from otdd_flash.operators.base import Epsilon, Marginals
from otdd_flash.operators.block_sums import BlockSums
from otdd_flash.operators.block_tiles import Build, Tile
from otdd_flash.operators.packed_blocks import There

if TYPE_CHECKING:
    from otdd_flash.distributed.ranks import Ranks


class SelfShare(Protocol):
    """One rank's share of the pairs of a cloud of n points with itself.

    Attributes:
        reach: |f - T(f)| over epsilon up to which sums keep their precision.
    """

    reach: float

    def softmin(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """Return the p_ri (n,), float64."""
        ...

    def repaired(self, f: Tensor, epsilon: Epsilon, rows: Tensor) -> Tensor:
        """T(f) (n,) where `rows` (n,) says so, of all pairs: there it is out of reach of f."""
        ...

    def marginals(self, f: Tensor, epsilon: Epsilon, *, accurate: bool) -> Marginals:
        """Sums (n,) over the own pairs of the plan of f and f.

        The plan is the mean of the computed one and its transpose: those of columns are the same.
        """
        ...

    def mean_error(self, ranks: Ranks) -> float:
        """`CostFacts.error` of the whole cost; called by all ranks together."""
        ...

    @property
    def refined(self) -> SelfShare:
        """The share at full accuracy."""
        ...


def folded(count: int, rank: int, size: int) -> list[tuple[int, int]]:
    """First and end of the two ranges of `count` places that a rank has; empty ones are left out.

    Those of all ranks cover all places.
    """
    ranges = 2 * size
    found = (
        (each * count // ranges, (each + 1) * count // ranges) for each in (rank, ranges - 1 - rank)
    )
    return [(first, end) for first, end in found if end > first]


def merged(parts: Tensor, epsilon: Epsilon) -> Tensor:
    """-epsilon log sum_r exp(-p_r / epsilon) (n,) of p (R, n) float64, added in their order.

    Where all are +inf, as of points that a part gives no mass, so is the sum.
    """
    lowest = parts.amin(0).clamp_max(torch.finfo(parts.dtype).max)
    total = added((lowest - parts).div_(epsilon).exp_())
    return lowest - epsilon * total.log_()


class BlockShare:
    """A share of pairs of blocks.

    Args:
        pairs: of this rank, each once.
        reach: as for `SelfShare`.
    """

    def __init__(self, pairs: BlockSums, reach: float = math.inf) -> None:
        self._pairs, self.reach = pairs, reach

    @property
    def refined(self) -> SelfShare:
        """The share itself: nothing was rounded."""
        return self

    def softmin(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        return self._pairs.joined_pairs(f, epsilon).potential

    def repaired(self, f: Tensor, epsilon: Epsilon, rows: Tensor) -> Tensor:
        """Never called: no softmin is out of reach."""
        raise AssertionError("nothing is out of reach")

    def marginals(self, f: Tensor, epsilon: Epsilon, *, accurate: bool) -> Marginals:
        """See `SelfShare`; what costs may be off is the larger of a row's and of a column's."""
        return self._pairs.marginals(f, f, epsilon, accurate=accurate)

    def mean_error(self, ranks: Ranks) -> float:
        of_rows, _ = self._pairs.accurate_errors
        own = torch.cat((of_rows, of_rows.new_full((1,), self._pairs.rounding)))
        every = ranks.all_gathered(own).amax(0)
        return float(every[-1] + 2 * (self._pairs.a @ every[:-1]))


class FoldedPairs(BlockSums):
    """Pairs of ranges of points that are all here; PyTorch computes or keeps their costs.

    Each range is a square of the pairs of its own points, which are computed twice, and a rectangle
    of those with later ones.

    Args:
        cost: of the cloud with itself.
        ranges: of this rank, as `folded` has them.
        build: makes the operator of a part of the cost.
    """

    def __init__(self, cost: LabelledCost, ranges: list[tuple[int, int]], build: Build) -> None:
        super().__init__(cost, build)
        points, count = cost.held[0], cost.shape[0]
        self._tiles = []
        for first, end in ranges:
            one, later = (
                There(Block(rows, rows), points[rows], None)
                for rows in (slice(first, end), slice(end, count))
            )
            self._tiles.append(self.tile((one, one)))
            if len(later.points) > 0:
                self._tiles.append(self.tile((one, later)))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    @property
    def packing(self) -> None:
        """Points are taken as they are."""
        return

    @property
    def additions(self) -> int:
        return len(self._tiles)

    def tiles(self, *, upper: bool = False, points: bool = False) -> Iterator[Tile]:
        return iter(self._tiles)
