"""The division of a self term's pairs among ranks: each pair of points is on one rank.

The points are cut into 2 R ranges, as even as possible. Rank r has ranges r and 2 R - 1 - r, and
with each the pairs of its points with those of the same and of all later ranges. An early range has
many pairs and a late one few, so that all ranks have equally many. `sharing` builds the share of a
rank: `FoldedPairs` here, or `triton_operator.KernelSelfShare`. In a ring `ring.RingPairs` is the
share. `parts` merges the results.

A pair (i, j) contributes to the sum of i and to that of j. Rank r computes

    p_ri = -epsilon log sum_j a_j exp((f_j - C_ij) / epsilon)

over those j whose pair with i is its own, +inf without such pairs, and

    T(f)_i = -epsilon log sum_r exp(-p_ri / epsilon).

So one float64 number per point and rank is exchanged, instead of a maximum and a sum. A change must
keep every pair in exactly one share (`tests/ranks/test_self_share.py`) and merge in the order of
the ranks, so that results are the same in every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.host_points import Block
from otdd_flash.cost.points import LabelledCost
from otdd_flash.distributed.exchange import added
from otdd_flash.operators.base import Epsilon, Marginals
from otdd_flash.operators.blocked import BlockOperator, BlockSums, Build, Tile
from otdd_flash.operators.packed_blocks import DeviceBlock

if TYPE_CHECKING:
    from otdd_flash.distributed.ranks import Ranks


class SelfShare(Protocol):
    """One rank's share of the pairs of a cloud of n points with itself."""

    def softmin(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """Return the p_ri (n,), float64."""
        ...

    def marginals(self, f: Tensor, g: None, epsilon: Epsilon, *, accurate: bool) -> Marginals:
        """Compute sums (n,) of the plan of f and f over this rank's pairs; there is no g.

        The plan is the mean of the computed one and its transpose: row and column sums are equal.
        """
        ...

    def mean_error(self, ranks: Ranks) -> float:
        """Return `CostFacts.error` of the whole cost; all ranks must call it together."""
        ...

    @property
    def refined(self) -> SelfShare:
        """The share at full accuracy."""
        ...


class NearShare(ABC):
    """A `SelfShare` whose sums in Triton are relative to f and leave the range of float32 far off.

    Attributes:
        reach: largest |f - T(f)| over epsilon for which `softmin` is accurate; inf in PyTorch.
        repairs_alone: whether `repaired` computes the marked rows only, without other ranks, which
            takes nothing where there are none.
    """

    reach: float
    repairs_alone: bool

    @abstractmethod
    def repaired(self, f: Tensor, epsilon: Epsilon, rows: Tensor) -> Tensor:
        """Compute T(f) (n,) for the marked `rows` (n,), out of reach of f, from all pairs."""


def folded(count: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return (first, end) of a rank's two ranges of `count` points; empty ones are left out.

    The ranges of all ranks cover all points.
    """
    ranges = 2 * size
    found = (
        (each * count // ranges, (each + 1) * count // ranges) for each in (rank, ranges - 1 - rank)
    )
    return [(first, end) for first, end in found if end > first]


def merged(parts: Tensor, epsilon: Epsilon) -> Tensor:
    """Compute -epsilon log sum_r exp(-p_r / epsilon) (n,) of p (R, n) float64, in the ranks' order.

    If all p_r are +inf, so is the result.
    """
    lowest = parts.amin(0).clamp_max(torch.finfo(parts.dtype).max)
    total = added((lowest - parts).div_(epsilon).exp_())
    return lowest - epsilon * total.log_()


class BlockShare(BlockSums):
    """A share of the pairs of a self term, as pairs of blocks, each once."""

    def softmin(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        return self.accumulate_pairs(f, epsilon).potential

    def mean_error(self, ranks: Ranks) -> float:
        of_rows, _ = self.accurate_errors
        own = torch.cat((of_rows, of_rows.new_full((1,), self.rounding)))
        every = ranks.all_gathered(own).amax(0)
        return float(every[-1] + 2 * (self.a @ every[:-1]))


class FoldedPairs(BlockShare):
    """A rank's pairs in PyTorch, of points that are all on the device.

    Each range has a square, the pairs (i, j) and (j, i) of its own points, and a rectangle, those
    with later points.

    Args:
        cost: of the cloud with itself.
        ranges: of this rank, see `folded`.
        build: builds the operator of a part of the cost.
    """

    def __init__(self, cost: LabelledCost, ranges: list[tuple[int, int]], build: Build) -> None:
        super().__init__(cost, build)
        points, count = cost.held[0], cost.shape[0]
        self._tiles = []
        for first, end in ranges:
            one, later = (
                DeviceBlock(Block(rows, rows), points[rows], None)
                for rows in (slice(first, end), slice(end, count))
            )
            self._tiles.append(self.tile((one, one)))
            if len(later.points) > 0:
                self._tiles.append(self.tile((one, later)))

    @property
    def refined(self) -> FoldedPairs:
        """The share itself: nothing was rounded."""
        return self

    @property
    def first(self) -> BlockOperator:
        return self._tiles[0].operator

    @property
    def additions(self) -> int:
        return len(self._tiles)

    def tiles(self, *, upper: bool = False, points: bool = False) -> Iterator[Tile]:
        return iter(self._tiles)
