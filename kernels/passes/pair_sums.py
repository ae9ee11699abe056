"""Sums of rows and of columns of a rectangle of scores, each score computed once.

    r_i = sum_j b_j e_ij,   c_j = sum_i a_i e_ij,   e_ij = exp((f_i + g_j - C_ij) / epsilon)

A block beside the diagonal of a self term, whose points are not all on the device, gives its rows
what `half_step` would, and its columns as well. The kernel is that of `symmetric_step`, and so are
shifts by the potentials and the stripes: of_columns (stripe, m) and of_rows (slots, stripe
BLOCK_ROWS) hold the sums over tiles of one stripe of row blocks, which are then added in float64 in
their order. `operators.triton_operator` calls `pair_sums`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from otdd_flash.kernels.launch import log2_scale
from otdd_flash.kernels.passes import symmetric_step
from otdd_flash.kernels.passes.plan_terms import NOTHING
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.passes.symmetric_step import BLOCKS_PER_RANGE, symmetric_step_kernel
from otdd_flash.kernels.points.class_terms import ClassTerms
from otdd_flash.kernels.points.column_bias import column_bias
from otdd_flash.kernels.tiling import (
    BLOCK_ROWS,
    gathering_tile,
    narrow_tile,
    operand,
    pipeline_stages,
)


def pair_sums(
    rows: Side,
    columns: Side,
    scores: Scores,
    masses: tuple[Tensor, Tensor],
    potentials: tuple[Tensor, Tensor],
    epsilon: Tensor,
) -> tuple[Tensor, Tensor]:
    """The sums r (N,) and c (M,), float64, in the points' own order; 0 where float32 lost them.

    Args:
        rows: N points.
        columns: M points.
        scores: how they make scores.
        masses: a (n,) and b (m,), float32, packed, 0 for padding.
        potentials: f (N,) and g (M,), float32, in units of the cost.
        epsilon: () float64, in units of the cost.
    """
    (f, g), (of_x, of_y) = potentials, masses
    layout, x, y = rows.points.layout, rows.points.coordinates, columns.points.coordinates
    n, m, dim = layout.size, columns.points.layout.size, x.shape[1]
    tile = narrow_tile(x.device) if layout.pure else gathering_tile(x.device)
    terms = ClassTerms.of(layout, columns.points.layout, scores.costs)
    across = columns.points.layout
    # Exponentials of padding are 0, so that their products with no mass are.
    padding = torch.where(across.filled, 0.0, NOTHING)
    bias = column_bias(g, across, padding, columns.squares, scores.costs, epsilon)
    row_term = (layout.spread(f, 0.0) - rows.squares) * log2_scale(epsilon)
    row_term = torch.where(layout.filled, row_term, NOTHING)
    blocks, column_blocks = n // BLOCK_ROWS, m // BLOCK_ROWS
    height = max(1, min(blocks, symmetric_step.STRIPE_BYTES // (4 * m)))
    slots = -(-column_blocks // BLOCKS_PER_RANGE)
    row_sums = torch.empty(n, dtype=torch.float64, device=x.device)
    column_sums = torch.zeros(m, dtype=torch.float64, device=x.device)
    for first in range(0, blocks, height):
        stripe = min(height, blocks - first)
        of_columns = torch.empty((stripe, m), dtype=torch.float32, device=x.device)
        of_rows = torch.empty((slots, stripe * BLOCK_ROWS), device=x.device)
        ranges = _ranges(first, stripe, column_blocks, x.device)
        symmetric_step_kernel[(len(ranges),)](
            operand(x, BLOCK_ROWS, tile),
            operand(y, BLOCK_ROWS, tile),
            bias,
            row_term,
            of_x,
            of_y,
            terms.costs,
            terms.rows,
            terms.columns,
            ranges,
            of_columns,
            of_rows,
            epsilon,
            n,
            m,
            first,
            stripe,
            scores.scale,
            scores.costs.shape[1],
            DIM=dim,
            PARTS=scores.parts,
            BLOCK_M=BLOCK_ROWS,
            BLOCK_K=tile.depth,
            STAGES=pipeline_stages(tile, not layout.pure),
            DESCRIPTORS=tile.descriptors,
            CLASSES=terms.kind,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        here = slice(first * BLOCK_ROWS, (first + stripe) * BLOCK_ROWS)
        row_sums[here] = of_rows.sum(0, dtype=torch.float64)
        column_sums += of_columns.sum(0, dtype=torch.float64)
    return row_sums[layout.position], column_sums[across.position]


@lru_cache(maxsize=64)
def _ranges(first: int, stripe: int, column_blocks: int, device: torch.device) -> Tensor:
    """Ranges (programs, 4) int32 of a stripe: row block, first column block, their number, slot."""
    starts = torch.arange(0, column_blocks, BLOCKS_PER_RANGE)
    rows = torch.arange(first, first + stripe)
    # Rows vary fastest: programs that run together read the same columns.
    row, start = rows.repeat(len(starts)), starts.repeat_interleave(stripe)
    length = (column_blocks - start).clamp_max(BLOCKS_PER_RANGE)
    slot = start // BLOCKS_PER_RANGE
    return torch.stack((row, start, length, slot), 1).to(device, torch.int32)
