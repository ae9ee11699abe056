"""A rank's share of a self term's pairs in Triton: two stripes of the upper triangle.

All ranks hold the whole cloud in the same packed order. With f as the shift of all exponentials,
partial sums of all ranks simply add up. `triton_operator` builds these for `sharing`; a softmin of
one process over its own pairs of blocks uses `KernelSelf` as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.distributed.ranks import Ranks
from otdd_flash.kernels.launch import on_device
from otdd_flash.kernels.passes.half_step import bias_of, repair
from otdd_flash.kernels.passes.sides import LARGEST_SUM, Scores, Side
from otdd_flash.kernels.passes.symmetric_step import triangle_sums
from otdd_flash.kernels.tiling import BLOCK_ROWS
from otdd_flash.operators.base import Epsilon, Marginals
from otdd_flash.operators.fixed_point import FixedPoint
from otdd_flash.operators.self_share import NearShare, folded
from otdd_flash.operators.triton_plans import single


class KernelSelf(NamedTuple):
    """The operands of kernels for the cost of a cloud with itself.

    Attributes:
        side: both sides of the cost.
        scores: parameters of the scores.
        masses: (n,) float32, packed, 0 for padding.
        fixed_point: for the plan's marginals.
    """

    side: Side
    scores: Scores
    masses: Tensor
    fixed_point: FixedPoint

    def softmin(
        self, f: Tensor, epsilon: Tensor, blocks: Sequence[tuple[int, int]] | None = None
    ) -> Tensor:
        """Compute the softmin (n,) near f, float64, over pairs of some stripes of blocks or all."""
        layout, potential = self.side.points.layout, single(f)
        stripes = [(0, layout.size // BLOCK_ROWS)] if blocks is None else blocks
        given = self.side, self.scores, self.masses, potential, epsilon
        return potential.double() - epsilon * triangle_sums(*given, stripes).log_()[layout.position]


class KernelSelfShare(NearShare):
    """A rank's stripes of a self term between labelled points on a GPU.

    Args:
        cost: the whole cost.
        place: the rank and the number of ranks.
        refine: builds the same share of the cost at full accuracy.
    """

    # Beyond it sums leave the range of float32.
    reach = math.log(LARGEST_SUM)
    repairs_alone = True

    def __init__(
        self, cost: KernelSelf, place: tuple[int, int], refine: Callable[[], KernelSelfShare]
    ) -> None:
        self._cost, self._refine = cost, refine
        self._blocks = folded(cost.side.points.layout.size // BLOCK_ROWS, *place)

    @property
    def refined(self) -> KernelSelfShare:
        return self._refine()

    def softmin(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        return self._cost.softmin(f, on_device(epsilon, f.device), self._blocks)

    def repaired(self, f: Tensor, epsilon: Epsilon, rows: Tensor) -> Tensor:
        (side, scores, _, _), potential = self._cost, single(f)
        level, layout = on_device(epsilon, f.device), side.points.layout
        marked = torch.zeros_like(layout.block_class)
        blocks = layout.position // BLOCK_ROWS
        marked.scatter_reduce_(0, blocks, rows.to(marked.dtype), "amax")
        bias, found = bias_of(side, scores, potential, level), potential.clone()
        repair(side, side, scores, bias, level, marked, found)
        return found

    def marginals(self, f: Tensor, epsilon: Epsilon, *, accurate: bool) -> Marginals:
        stripes = [(first * BLOCK_ROWS, end * BLOCK_ROWS) for first, end in self._blocks]
        fixed_point = self._cost.fixed_point
        return fixed_point.marginals(f, None, float(epsilon), accurate=accurate, stripes=stripes)

    def mean_error(self, ranks: Ranks) -> float:
        """Return `CostFacts.error` of the whole cost; every rank computes the same."""
        return self._cost.fixed_point.cost_error
