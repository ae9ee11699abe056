"""A plan whose entries are weighted times some columns, of the same potentials again and again.

    out = (Q o sum A B^T) V,      Q_ij = b_j exp((f_i + g_j - C_ij) / epsilon)

Blocks go through memory as in `plan_application`; what does not depend on the weights is prepared
once, and what is found stays in packed order, as products of `halves` do. `operators.triton_plans`
makes a `WeightedProduct` for either side of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.kernels.linear.halves import Unmerged, from_halves, to_halves
from otdd_flash.kernels.passes.block_sums import add_columns
from otdd_flash.kernels.passes.plan_blocks import Pair, PlanBlocks
from otdd_flash.kernels.passes.plan_terms import LOG2_SCALE, PlanTerms
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import (
    Layout,
    PackedPoints,
    pack,
    power_of_two_scale,
)


class WeightedProduct:
    """(Q o sum A B^T) V for one A, B and V after another; rows of Q sum to what `ROW_RANGE` holds.

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

    def __call__(self, values: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The product (N, k) float64, times the masses of rows.

        Args:
            values: V (M, k) float64.
            pairs: A (N, r) and B (M, r), or two of them whose products are added up.
        """
        rows, columns = self._layouts
        blocks, n = self._blocks, rows.size
        weighting = blocks.weighting(*_packed(pairs, self._layouts))
        packed, scales = to_halves(values, columns, multiple=8)
        given, buffer = packed.flatten(1), blocks.buffer()
        out = torch.empty((n, given.shape[1]), device=values.device)
        for part in blocks.heights():
            for columns_of, block in blocks.blocks(part, buffer, weighting):
                add_columns(block, given, columns_of, out[part])
        weights = self._masses * (2.0**-LOG2_SCALE * weighting.unit)
        return from_halves(Unmerged.of(out.view(n, *packed.shape[1:])), scales, rows, weights)


def _packed(
    pairs: Sequence[tuple[Tensor, Tensor]], layouts: tuple[Layout, Layout]
) -> tuple[list[Pair], float]:
    """All in the layouts, each on one scale, and what no sum of products of their rows exceeds.

    One tensor that stands in several places of one layout is packed once.
    """
    sides = {id(side): side for pair in pairs for side in pair}
    norm = torch.linalg.vector_norm
    sizes = [norm(side, torch.inf) for side in sides.values()]
    sizes += [norm(side, dim=1).max() for side in sides.values()]
    # One tensor, so that the host waits once.
    told = torch.stack(sizes).tolist()
    largest, longest = (
        dict(zip(sides, part, strict=True)) for part in (told[: len(sides)], told[len(sides) :])
    )
    like = pairs[0][0]
    origin = torch.zeros(like.shape[1], dtype=torch.float64, device=like.device)
    found: dict[tuple[int, int], PackedPoints] = {}
    for pair in pairs:
        for side, layout in zip(pair, layouts, strict=True):
            key = id(side), id(layout)
            if key not in found:
                found[key] = pack(side, layout, origin, power_of_two_scale(largest[id(side)]))
    packed = [
        (found[id(left), id(layouts[0])], found[id(right), id(layouts[1])]) for left, right in pairs
    ]
    return packed, sum(longest[id(left)] * longest[id(right)] for left, right in pairs)
