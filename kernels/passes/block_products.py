"""Products with a plan a block of it at a time, each block times columns by the library's matmul.

`operators.triton_plans` calls `BlockProduct`, `WeightedProduct`, `apply_plan_blocks` and
`hold_plan`. A block is (1 or 2, height, width) float16, hi and lo parts, as `plan_blocks` computes
it; `add_columns` and `add_halves` add its share to a product.

`BlockProduct`, one for a plan and one for its transpose, is a plan times points that are packed
already, some rows of the result after the other:

    out = Q V,  or (Q o W) V,      W = factor sum A B^T + s 1^T + 1 t^T

V, A and B are not copied, and no result of the size of the points is stored at once. If the sum of
a row is outside of `ROW_RANGE`, the row is computed with the potential that makes it sum to 1, and
its result is scaled back.

Shapes: V (m, d), A (n, d), B (m, d) packed, s (N,), t (M,).

`WeightedProduct`, one for either side of a plan, is a plan whose entries are weighted times some
columns, of the same potentials again and again:

    out = (Q o sum A B^T) V,      Q_ij = b_j exp((f_i + g_j - C_ij) / epsilon)

Blocks go through memory as in `apply_plan_blocks`; all that does not depend on the weights is
prepared once, and products stay in packed order until `from_halves` of `linear.halves`.

`apply_plan_blocks` applies the plan of two potentials to a matrix:

    out = Q V,  or (Q o A B^T) V,
    Q_ij = P_ij / a_i = b_j exp((f_i + g_j - C_ij) / epsilon)

A kernel computes a block of Q in float16 and cuBLAS multiplies it by the rows of V (Ye et al. 2026,
arXiv:2602.03067, Algorithms 2, 4 and 5, with the product of a block left to the library whose
matrix products are fastest); blocks share one buffer, so memory does not grow with the plan.
`hold_plan` stores all of Q, for a plan that many products read.

Shapes: V (m, k), A (n, r), B (m, r). Rows of Q sum to (P 1)_i / a_i, about 1, and are scaled by
2^10 so that entries down to 2^-24 of the row keep all their bits. A row whose unscaled sum is
outside of `ROW_RANGE`, [2^-5, 2^5], may overflow float16 or lose bits; the caller checks the sums.
V is a sum hi + lo of two float16. In `high` precision a block, A and B are too, and hi hi + hi lo +
lo hi is accumulated in float32; `WeightedProduct` adds lo lo of a block and V as well.

Work: 2 n m (d + 2 k + r) operations on tensor cores, in `high` 6 n m (d + k + r), and n m
exponentials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.kernels.linear.halves import Unmerged, from_halves, to_halves
from otdd_flash.kernels.passes.plan_blocks import (
    Pair,
    PlanBlocks,
    Weighting,
    largest_weight,
)
from otdd_flash.kernels.passes.score_terms import LOG2_SCALE, ROW_RANGE, PlanTerms, plan_terms
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import (
    Layout,
    PackedPoints,
    pack,
    power_of_two_scale,
)

# Some points of a side.
Rows = slice | Tensor


class Weights(NamedTuple):
    """The weights of the entries of a plan.

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
        rows: the rows (k,), by index or as a slice.
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
        """Yield the products of some rows after the other, until there are all.

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
    """All pairs in the layouts, each on one scale, and a bound on sums of products of their rows.

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


def apply_plan_blocks(
    rows: Side,
    columns: Side,
    scores: Scores,
    potentials: tuple[Tensor, Tensor],
    epsilon: float,
    values: tuple[Tensor, Tensor],
    factors: Pair | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute Q V, or (Q o A B^T) V, and the row sums Q 1.

    Args:
        rows: n packed points.
        columns: m packed points.
        scores: how they make scores.
        potentials: f (N,) and g (M,), float32, in units of the cost.
        epsilon: in units of the cost.
        values: V as `halves` has it, (m, 2, width) float16 and scales (k,); widths that are
            multiples of eight take least time.
        factors: A (n, r) and B (m, r), packed as `rows` and `columns`.

    Returns:
        (N, k) float32 and (N,) float32, in the points' own order; the first is valid only if the
        second is within `ROW_RANGE`.
    """
    terms = plan_terms(rows, columns, scores, potentials, epsilon, None)
    launch = PlanBlocks(rows, columns, scores, terms, weighted=factors is not None)
    weighting = launch.unweighted
    if factors is not None:
        weighting = launch.weighting([factors], largest_weight([factors]))
    layout, device = rows.points.layout, launch.device
    count = len(layout.position)
    # Rows of padding go to one row past the end.
    origin = torch.where(layout.filled, layout.origin, count)
    halves, scales = values
    out = torch.empty((count + 1, halves.shape[2]), device=device)
    sums = torch.empty(count + 1, device=device)
    unit = 2.0**-LOG2_SCALE
    of_columns = unit * weighting.unit / scales
    (high, low), buffer = halves.unbind(1), launch.buffer()
    for rows_of in launch.heights():
        points = origin[rows_of]
        product = torch.empty((len(points), out.shape[1]), device=device)
        tile_sums: list[Tensor] = []
        for columns_of, block in launch.blocks(rows_of, buffer, weighting, tile_sums):
            add_halves(block, (high, low), columns_of, product)
        row_sums = torch.cat(tile_sums).sum(0)
        product[:, : len(scales)] *= of_columns
        out.index_copy_(0, points, product)
        sums.index_copy_(0, points, row_sums.mul_(unit))
    return out[:count, : len(scales)], sums[:count]


def hold_plan(rows: Side, columns: Side, scores: Scores, terms: PlanTerms) -> Tensor:
    """Compute all of Q, rounded to float16 and scaled by 2^LOG2_SCALE.

    Args:
        rows: n packed points.
        columns: m packed points.
        scores: how they make scores; of three parts, the points are not rounded, but only Q.
        terms: `plan_terms` of the potentials, given masses: rows of points without mass are 0.

    Returns:
        (n, m) float16 in packed order; valid only if its row sums, unscaled, are within `ROW_RANGE`
        for all points with mass.
    """
    launch = PlanBlocks(rows, columns, scores, terms)
    n, m = rows.points.layout.size, columns.points.layout.size
    out = torch.empty((n, m), dtype=torch.float16, device=launch.device)
    for rows_of in launch.heights():
        launch(out[None, rows_of], rows_of.start, 0)
    return out


def add_halves(block: Tensor, halves: tuple[Tensor, Tensor], columns: slice, out: Tensor) -> None:
    """A block's share of Q V, of hi and lo parts of V (m, k), with those of earlier columns.

    One after the other, so that `out` (height, k) float32 has no more columns than V.
    """
    high, low = (part[columns] for part in halves)
    _multiply(block[0], high, out, add=columns.start > 0)
    if len(block) == 2:
        _multiply(block[0], low, out, add=True)
        _multiply(block[1], high, out, add=True)


def add_columns(block: Tensor, values: Tensor, columns: slice, out: Tensor) -> None:
    """Add Q V of all parts with the same columns V (m, k) to `out` (height, k) float32."""
    for k, part in enumerate(block):
        _multiply(part, values[columns], out, add=columns.start + k > 0)


def _multiply(block: Tensor, values: Tensor, out: Tensor, *, add: bool) -> None:
    """Write block @ values to `out`, or add it; float16 in and float32 out."""
    if block.is_cuda:
        if add:
            torch.addmm(out, block, values, out_dtype=torch.float32, out=out)
        else:
            torch.mm(block, values, out_dtype=torch.float32, out=out)
    elif add:
        out.addmm_(block.float(), values.float())
    else:
        torch.mm(block.float(), values.float(), out=out)
