"""A plan times points that are packed already, some rows of the result after the other.

    out = Q V,  or (Q o W) V,      W = factor sum A B^T + s 1^T + 1 t^T

Neither V nor A and B are copied, and no result as large as the points has to be there at once. Rows
out of `ROW_RANGE` go by the potential that makes them sum to 1, and are corrected after.
`operators.triton_plans` makes a `BlockProduct` for a plan and one for its transpose.

Shapes: V (m, d), A (n, d), B (m, d) packed, s (N,), t (M,).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.kernels.linear.halves import to_halves
from otdd_flash.kernels.passes.block_sums import add_columns, add_halves
from otdd_flash.kernels.passes.plan_blocks import (
    Pair,
    PlanBlocks,
    Weighting,
    largest_weight,
)
from otdd_flash.kernels.passes.plan_terms import LOG2_SCALE, ROW_RANGE, plan_terms
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import Layout, PackedPoints

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


class Found(NamedTuple):
    """Products of some rows.

    Attributes:
        rows: which (k,).
        points: (k, d) float32.
        numbers: (k,) float64, where any were multiplied.
    """

    rows: Rows
    points: Tensor
    numbers: Tensor | None


class _Columns:
    """Numbers (M,) as columns of halves (m, 16), hi parts in the first and lo parts in the ninth.

    It is what a product of tensor cores takes, which then reads a block once for both.
    """

    def __init__(self, numbers: Tensor, layout: Layout) -> None:
        packed, self._scales = to_halves(numbers[:, None], layout, multiple=8)
        self._packed = packed.flatten(1)

    def beside(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns, and memory for their product with as many rows as `found`."""
        return self._packed, found.new_empty((len(found), self._packed.shape[1]))

    def product(self, found: Tensor) -> Tensor:
        """Return the product with the numbers, (k,) float64, from that with the columns (k, 16)."""
        return found[:, ::8].double().sum(1) / self._scales


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
        terms = plan_terms(rows, columns, scores, (near, g), epsilon, masses)
        self._given = rows, columns, scores, terms
        self._rows, self._columns = rows.points.layout, columns.points.layout
        self._blocks: dict[bool, PlanBlocks] = {}

    def __call__(
        self,
        values: PackedPoints,
        dim: int,
        weights: Weights | None = None,
        numbers: Tensor | None = None,
    ) -> Iterator[Found]:
        """What is found for some rows after the other, until there are all.

        Args:
            values: V, packed as the columns.
            dim: the coordinates d of what is packed.
            weights: of the entries, A packed as the rows and B as the columns.
            numbers: q (M,), which is multiplied too.
        """
        blocks = self._blocks_of(weighted=weights is not None)
        weighting = blocks.unweighted if weights is None else self._weighting(blocks, weights)
        (high, low), buffer = values.coordinates.chunk(2), blocks.buffer()
        columns = None if numbers is None else _Columns(numbers, self._columns)
        for part in blocks.heights():
            rows, places = self._rows.points_of(part)
            unit = self._masses[rows] * (2.0**-LOG2_SCALE * weighting.unit)
            found = torch.empty((part.stop - part.start, high.shape[1]), device=blocks.device)
            beside = None if columns is None else columns.beside(found)
            for columns_of, block in blocks.blocks(part, buffer, weighting):
                add_halves(block, (high, low), columns_of, found)
                if beside is not None:
                    add_columns(block, beside[0], columns_of, beside[1])
            points = found[places, :dim].mul_((unit / values.scale).float()[:, None])
            of_numbers = None
            if columns is not None and beside is not None:
                of_numbers = columns.product(beside[1][places]) * unit
            yield Found(rows, points, of_numbers)
            # Before there is the next.
            del found, points

    def _weighting(self, blocks: PlanBlocks, weights: Weights) -> Weighting:
        sides = zip((self._rows, self._columns), weights.numbers, strict=True)
        of_rows, of_columns = (layout.spread(numbers, 0.0) for layout, numbers in sides)
        given = weights.pairs, weights.factor, (of_rows, of_columns)
        return blocks.weighting(weights.pairs, largest_weight(*given), *given[1:])

    def _blocks_of(self, *, weighted: bool) -> PlanBlocks:
        if weighted not in self._blocks:
            self._blocks[weighted] = PlanBlocks(*self._given, weighted=weighted)
        return self._blocks[weighted]
