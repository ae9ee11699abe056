"""Apply the plan of two potentials to a matrix, a block of the plan at a time; or store all of it.

    out = Q V,  or (Q o A B^T) V,
    Q_ij = P_ij / a_i = b_j exp((f_i + g_j - C_ij) / epsilon)

`operators.triton_plans` calls both functions. In `apply_plan_blocks` a kernel computes a block of Q
in float16 and cuBLAS multiplies it by the rows of V (Ye et al. 2026, arXiv:2602.03067, Algorithms
2, 4 and 5, with the product of a block left to the library whose matrix products are fastest);
blocks share one buffer, so memory does not grow with the plan. `hold_plan` stores all of Q, for a
plan that many products read.

Shapes: V (m, k), A (n, r), B (m, r). Rows of Q sum to (P 1)_i / a_i, about 1, and are scaled by
2^10 so that entries down to 2^-24 of the row keep all their bits. A row whose unscaled sum is
outside of `plan_terms.ROW_RANGE`, [2^-5, 2^5], may overflow float16 or lose bits; the caller checks
the sums. In `high` precision a block, V, A and B are sums hi + lo of two float16, of which
hi hi + hi lo + lo hi is accumulated in float32.

Work: 2 n m (d + k + r) operations on tensor cores, times three in `high`, and n m exponentials.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.kernels.passes.block_sums import add_halves
from otdd_flash.kernels.passes.plan_blocks import Pair, PlanBlocks, largest_weight
from otdd_flash.kernels.passes.plan_terms import LOG2_SCALE, PlanTerms, plan_terms
from otdd_flash.kernels.passes.sides import Scores, Side


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
