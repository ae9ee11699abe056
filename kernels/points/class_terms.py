"""What class distances take from a tile of scores, and where the tile finds it.

    logits_ij = scale S_ij + bias_j - lambda_y W[k_i, l_j] log2(e) / epsilon

No table of all columns is made for it. What is looked up depends on how rows and columns lie:

    in_bias   all rows have one class              nothing: the bias of columns holds it
    blocks    blocks of both sides have one class  a number for every 128 columns of a tile
    columns   blocks of rows have one class        a number for every column of a tile
    scores    a block of rows has several          a number for every score

`passes.half_step`, `passes.symmetric_step`, `passes.pair_sums` and `passes.plan_terms` make
`ClassTerms`; the kernels of `passes` call `row_offsets` and `add_bias`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.points.packed_points import Layout
from otdd_flash.kernels.tiling import BLOCK_ROWS

# Rows and columns of one class come in blocks of so many.
BLOCK = tl.constexpr(BLOCK_ROWS)


class ClassTerms(NamedTuple):
    """The class distances of two layouts, as tiles look them up.

    Attributes:
        kind: `in_bias`, `blocks`, `columns` or `scores`.
        rows: int32, the class of each block of rows (n / BLOCK_ROWS,), or of each row (n,) for
            `scores`.
        columns: int32, likewise (m / BLOCK_ROWS,) for `blocks`, or (m,).
        costs: (V_x, V_y) float32, lambda_y W.
    """

    kind: str
    rows: Tensor
    columns: Tensor
    costs: Tensor

    @classmethod
    def of(cls, rows: Layout, columns: Layout, costs: Tensor) -> ClassTerms:
        """The terms of class distances `costs` (V_x, V_y)."""
        if not rows.pure:
            return cls("scores", rows.labels, columns.labels, costs)
        if len(costs) == 1:
            return cls("in_bias", rows.block_class, columns.block_class, costs)
        if columns.pure:
            return cls("blocks", rows.block_class, columns.block_class, costs)
        return cls("columns", rows.block_class, columns.labels, costs)


@triton.jit
def row_offsets(
    row_classes_ptr,  # (n / BLOCK,) int32, or (n,) if CLASSES is "scores"
    i_block,
    o_row,  # (BLOCK_M,), rows of the block
    costs_width,
    CLASSES: tl.constexpr,
):
    """Where in the table the distances of a block's class are, or of each row's."""
    if CLASSES == "scores":
        # Indices into the table, below 2^31, take half of the registers of pointers.
        offsets = tl.load(row_classes_ptr + o_row) * costs_width
    else:
        offsets = tl.load(row_classes_ptr + i_block).to(tl.int64) * costs_width
    return offsets


@triton.jit
def add_bias(
    scores,  # (BLOCK_M, BLOCK_N) float32, in base-2 logarithms
    bias,  # (BLOCK_N,) float32
    column,  # the first of the tile
    o_costs,  # of `row_offsets`
    column_classes_ptr,  # (m / BLOCK,) int32 if CLASSES is "blocks", or (m,)
    costs_ptr,  # (V_x, costs_width) float32, in units of the cost
    costs_scale,  # log2(e) / epsilon
    BLOCK_N: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """The logits of a tile: scores and bias less class distances."""
    if CLASSES == "blocks":
        p_class = column_classes_ptr + column // BLOCK
        costs = tl.load(costs_ptr + o_costs + tl.load(p_class))
        if BLOCK_N > BLOCK:
            tl.static_assert(BLOCK_N == 2 * BLOCK)
            right = tl.load(costs_ptr + o_costs + tl.load(p_class + 1))
            costs = tl.where(tl.arange(0, BLOCK_N) < BLOCK, costs, right)  # (BLOCK_N,)
        bias -= costs * costs_scale
    if CLASSES == "columns":
        classes = tl.load(column_classes_ptr + column + tl.arange(0, BLOCK_N))
        bias -= tl.load(costs_ptr + o_costs + classes) * costs_scale
    logits = scores + bias[None, :]
    if CLASSES == "scores":
        classes = tl.load(column_classes_ptr + column + tl.arange(0, BLOCK_N))
        logits -= costs_scale * tl.load(costs_ptr + (o_costs[:, None] + classes[None, :]))
    return logits
