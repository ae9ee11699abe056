"""A plan times few columns, fused: every tile of the plan is multiplied where it was computed.

    out = Q V,      Q_ij = b_j exp((f_i + g_j - C_ij) / epsilon)

for V (m, k) in float16, k at most `MOST_COLUMNS`. Scores are those of `half_step`, rows of Q sum to
about 1 and are scaled by 2^LOG2_SCALE as in `plan_application`. A tile of Q is rounded to float16
and multiplied on tensor cores, with float32 sums; a column of ones in V gives the sums of just the
numbers that are multiplied.

One program owns a block of rows and a range of column blocks, its loop is that of `half_step`.

Work: 2 n m (d + k) operations on tensor cores and n m exponentials; nothing of size n m is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.epsilon import LOG2_E, on_device
from otdd_flash.kernels.passes.half_step import bias_of
from otdd_flash.kernels.passes.plan_application import LOG2_SCALE, NOTHING
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.tiling import (
    BLOCK_ROWS,
    column_ranges,
    gathering_tile,
    load_step,
    narrow_tile,
    operand,
    pipeline_stages,
)

# Columns of V: a multiple of what one product of a tensor core takes.
MOST_COLUMNS = 16


@triton.jit
def narrow_product_kernel(
    x,  # (2 n, DIM) float16
    y,  # (2 m, DIM) float16
    bias_ptr,  # (V, m) float32
    row_term_ptr,  # (n,) float32
    block_class_ptr,  # (n / BLOCK_M,) int32
    costs_ptr,  # (V_x, costs_width) float32, read if GATHER
    labels_x_ptr,  # (n,) int32, read if GATHER
    labels_y_ptr,  # (m,) int32, read if GATHER
    values_ptr,  # (m, COLUMNS) float16
    ranges_ptr,  # (programs, 4) int32: row block, first column block, column blocks, slot
    products_ptr,  # (slots, n, COLUMNS) float32
    n,
    m,
    scale,
    costs_width,
    costs_scale,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """One program per range of column blocks of one block of BLOCK_M rows."""
    p_range = ranges_ptr + 4 * tl.program_id(0)
    i_block, first, blocks, slot = (
        tl.load(p_range), tl.load(p_range + 1), tl.load(p_range + 2), tl.load(p_range + 3)
    )  # fmt: skip
    bias_ptr += tl.load(block_class_ptr + i_block).to(tl.int64) * m
    o_row = i_block * BLOCK_M + tl.arange(0, BLOCK_M)
    o_value = tl.arange(0, COLUMNS)
    row_term = tl.load(row_term_ptr + o_row)
    if GATHER:
        # Indices into the table, below 2^31, take half of the registers of pointers.
        o_costs = tl.load(labels_x_ptr + o_row) * costs_width

    STEPS: tl.constexpr = (DIM + BLOCK_K - 1) // BLOCK_K
    out = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for t in tl.range(0, blocks * STEPS, num_stages=STAGES):
        column = (first + t // STEPS) * BLOCK_N
        step = t % STEPS
        b_x, b_y = load_step(
            x, y, i_block * BLOCK_M, column, step, n, m,
            DIM, 1, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS,
        )  # fmt: skip
        scores = tl.dot(b_x, b_y.T, scores)  # (BLOCK_M, BLOCK_N)
        if step == STEPS - 1:
            o_column = column + tl.arange(0, BLOCK_N)
            logits = scores * scale + tl.load(bias_ptr + o_column)[None, :]
            if GATHER:
                labels_y = tl.load(labels_y_ptr + o_column)
                logits -= costs_scale * tl.load(costs_ptr + (o_costs[:, None] + labels_y[None, :]))
            plan = tl.exp2(logits + row_term[:, None]).to(tl.float16)
            values = tl.load(values_ptr + o_column[:, None] * COLUMNS + o_value[None, :])
            out = tl.dot(plan, values, out)  # (BLOCK_M, COLUMNS)
            scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    o_out = slot.to(tl.int64) * n + o_row
    tl.store(products_ptr + o_out[:, None] * COLUMNS + o_value[None, :], out)


class NarrowProduct:
    """Q V for one V after another, of the same potentials.

    Args:
        rows: n packed points.
        columns: m packed points.
        scores: how they make scores, of one part.
        potentials: f (N,) and g (M,), float32, in units of the cost.
        epsilon: in units of the cost.
        present: (N,) bool; the rows of other points, and of padding, are 0.
    """

    def __init__(
        self,
        rows: Side,
        columns: Side,
        scores: Scores,
        potentials: tuple[Tensor, Tensor],
        epsilon: float,
        present: Tensor,
    ) -> None:
        self._rows, self._columns, self._scores = rows.points, columns.points, scores
        self._scale, (f, g) = LOG2_E.value / epsilon, potentials
        self._bias = bias_of(rows, columns, scores, g, on_device(epsilon, f.device))
        layout = rows.points.layout
        row_term = (layout.spread(f, 0.0) - rows.squares) * self._scale + LOG2_SCALE
        filled = layout.spread(present.float(), 0.0) > 0
        self._row_term = torch.where(filled, row_term, NOTHING)

    def __call__(self, values: Tensor) -> Tensor:
        """Q V (n, k) float32 in packed order, scaled by 2^LOG2_SCALE, for V (m, k) float16."""
        layout, x, y = self._rows.layout, self._rows.coordinates, self._columns.coordinates
        count = values.shape[1]
        if count > MOST_COLUMNS:
            parts = values.split(MOST_COLUMNS, 1)
            return torch.cat([self(part) for part in parts], 1)
        padded = torch.nn.functional.pad(values, (0, MOST_COLUMNS - count)).contiguous()
        tile = narrow_tile(x.device) if layout.pure else gathering_tile(x.device)
        n, m = layout.size, self._columns.layout.size
        ranges = column_ranges(n // BLOCK_ROWS, m // tile.columns, tile, x.device)
        # Blocks of rows with fewer ranges leave the others 0.
        out = torch.zeros((ranges.most, n, MOST_COLUMNS), device=x.device)
        narrow_product_kernel[(len(ranges.programs),)](
            operand(x, BLOCK_ROWS, tile),
            operand(y, tile.columns, tile),
            self._bias,
            self._row_term,
            layout.block_class,
            self._scores.costs,
            layout.labels,
            self._columns.layout.labels,
            padded,
            ranges.programs,
            out,
            n,
            m,
            self._scores.scale * self._scale,
            self._scores.costs.shape[1],
            self._scale,
            DIM=x.shape[1],
            COLUMNS=MOST_COLUMNS,
            BLOCK_M=BLOCK_ROWS,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            STAGES=pipeline_stages(tile, not layout.pure),
            DESCRIPTORS=tile.descriptors,
            GATHER=not layout.pure,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out.sum(0)[:, :count]
