"""A plan times points that are packed already, some rows of the result after the other.

    out = Q V,  or (Q o W) V,      W = factor sum A B^T + s 1^T + 1 t^T

Neither V nor A and B are copied, and no result as large as the points has to be there at once. Rows
out of `ROW_RANGE` go by the potential that makes them sum to 1, and are corrected after.

Shapes: V (m, d), A (n, d), B (m, d) packed, s (N,), t (M,).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.kernels.passes.plan_blocks import Pair, PlanBlocks
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import PackedPoints
from otdd_flash.kernels.points.row_terms import LOG2_SCALE, ROW_RANGE

# Some points of a side.
Rows = slice | Tensor


class Weights(NamedTuple):
    """What the entries of a plan are weighted by.

    Attributes:
        pairs: one or two of A and B.
        factor: of their products, positive.
        numbers: s (N,) and t (M,) float32, in the order of the points.
    """

    pairs: Sequence[Pair]
    factor: float
    numbers: tuple[Tensor, Tensor]


class BlockProduct:
    """Q V for one V after another, times the masses of rows.

    Args:
        rows: n packed points.
        columns: m packed points.
        scores: how they make scores, of three parts.
        potentials: f (N,) and g (M,), float32, in units of the cost.
        epsilon: in units of the cost.
        masses: a (N,) float64.
        sums: P 1 (N,) float64, of these potentials.
    """

    def __init__(
        self,
        rows: Side,
        columns: Side,
        scores: Scores,
        potentials: tuple[Tensor, Tensor],
        epsilon: float,
        masses: Tensor,
        sums: Tensor,
    ) -> None:
        (f, g), (low, high) = potentials, ROW_RANGE
        there = (masses > 0) & (sums > 0)
        share = torch.where(there, sums / masses, 1)
        # Rows in range keep their potential, and so the rounding that their sums have.
        outside = (share < low) | (share > high)
        near = torch.where(outside, f.double() - epsilon * share.log(), f).float()
        off = (f.double() - near.double()) / epsilon
        self._masses = torch.where(there, masses * off.exp(), 0)
        self._given = rows, columns, scores, (near, g), epsilon, masses
        self._rows, self._columns = rows.points.layout, columns.points.layout
        self._blocks: dict[bool, PlanBlocks] = {}

    def __call__(
        self, values: PackedPoints, dim: int, weights: Weights | None = None
    ) -> Iterator[tuple[Rows, Tensor]]:
        """Some rows (k,), and what is found for them (k, d) float32, until there are all.

        Args:
            values: V, packed as the columns.
            dim: the coordinates d of what is packed.
            weights: of the entries, A packed as the rows and B as the columns.
        """
        blocks = self._blocks_of(weighted=weights is not None)
        weighting = blocks.unweighted
        if weights is not None:
            layouts = self._rows, self._columns
            numbers = zip(layouts, weights.numbers, strict=True)
            of_rows, of_columns = (layout.spread(side, 0.0) for layout, side in numbers)
            weighting = blocks.weighting(weights.pairs, weights.factor, (of_rows, of_columns))
        parts, buffer = values.coordinates.chunk(2), blocks.buffer()
        unit = 2.0**-LOG2_SCALE * weighting.unit / values.scale
        for part in blocks.heights():
            found = torch.empty((part.stop - part.start, parts[0].shape[1]), device=blocks.device)
            blocks.multiply(part.start, parts, found, buffer, weighting)
            rows, places = self._rows.points_of(part)
            yield rows, found[places, :dim].mul_((self._masses[rows] * unit).float()[:, None])
            # Before there is the next.
            del found

    def _blocks_of(self, *, weighted: bool) -> PlanBlocks:
        if weighted not in self._blocks:
            self._blocks[weighted] = PlanBlocks(*self._given, weighted=weighted)
        return self._blocks[weighted]
