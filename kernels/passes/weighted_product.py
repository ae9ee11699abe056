"""A plan whose entries are weighted times some columns, of the same potentials again and again.

    out = (Q o A B^T) V,      Q_ij = b_j exp((f_i + g_j - C_ij) / epsilon)

Blocks go through memory as in `plan_application`; what does not depend on the weights is prepared
once, and what is found stays in packed order, as products of `halves` do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.kernels.linear.halves import Unmerged, from_halves, to_halves
from otdd_flash.kernels.passes.block_sums import add_columns
from otdd_flash.kernels.passes.plan_blocks import Pair, PlanBlocks
from otdd_flash.kernels.passes.plan_terms import LOG2_SCALE, PlanTerms
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import Layout, pack, power_of_two_scale


class WeightedProduct:
    """(Q o A B^T) V for one A, B and V after another; rows of Q sum to what `ROW_RANGE` holds.

    Args:
        rows: n packed points.
        columns: m packed points.
        scores: how they make scores, of three parts.
        terms: of the potentials.
        masses: a (N,) float64, that products are weighted by.
    """

    def __init__(
        self,
        rows: Side,
        columns: Side,
        scores: Scores,
        terms: PlanTerms,
        masses: Tensor,
    ) -> None:
        self._layouts = rows.points.layout, columns.points.layout
        self._masses = masses
        self._blocks = PlanBlocks(rows, columns, scores, terms, weighted=True)

    def __call__(self, values: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The product (N, k) float64, times the masses of rows.

        Args:
            values: V (M, k) float64.
            left: A (N, r).
            right: B (M, r).
        """
        rows, columns = self._layouts
        blocks, n = self._blocks, rows.size
        pair, most = _packed(left, right, self._layouts)
        weighting = blocks.weighting([pair], most)
        packed, scales = to_halves(values, columns, multiple=8)
        given, buffer = packed.flatten(1), blocks.buffer()
        out = torch.empty((n, given.shape[1]), device=values.device)
        for part in blocks.heights():
            for columns_of, block in blocks.blocks(part, buffer, weighting):
                add_columns(block, given, columns_of, out[part])
        weights = self._masses * (2.0**-LOG2_SCALE * weighting.unit)
        return from_halves(Unmerged.of(out.view(n, *packed.shape[1:])), scales, rows, weights)


def _packed(left: Tensor, right: Tensor, layouts: tuple[Layout, Layout]) -> tuple[Pair, float]:
    """Both in the layouts, each on one scale, and what no product of their rows exceeds."""
    norm, sides = torch.linalg.vector_norm, (left, right)
    sizes = [norm(side, torch.inf) for side in sides]
    sizes += [norm(side, dim=1).max() for side in sides]
    # One tensor, so that the host waits once.
    *largest, longest_left, longest_right = torch.stack(sizes).tolist()
    origin = torch.zeros(left.shape[1], dtype=torch.float64, device=left.device)
    one, other = (
        pack(side, layout, origin, power_of_two_scale(size))
        for side, layout, size in zip(sides, layouts, largest, strict=True)
    )
    return (one, other), longest_left * longest_right
