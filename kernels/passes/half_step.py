"""The streaming Sinkhorn half-step on labelled scores.

    f_i = lambda_x ||x_i||^2 - epsilon ln(2) log2 sum_j 2^(scale x_i . y_j + bias_j - w[k_i, l_j])

with `column_bias` and `ClassTerms` for the rest of the score and scale = 2 lambda_x log2(e) /
epsilon. Shapes: x (n, d) and y (m, d) packed in float16, f (N,) in float32 in the points' own
order. The n x m scores are never stored.

Rows of one block have one class, and so have columns: a tile takes a class distance or two, and
labels cost nothing. Where classes are so small that padding them to blocks would cost more, points
stay mixed: a tile gathers a distance per column, or per score if its rows are mixed.

Coordinates carry the 11 significant bits that TF32 would keep, at twice its rate; with PARTS = 3
each is a sum hi + lo of two float16 and hi hi + hi lo + lo hi is accumulated, about 22 bits.

On Hopper, for class-pure rows of one part and 256 < d <= 512, `resident_half_step` computes the
same sums, so a change of the sums must be made there too (`tests/kernels/test_half_step.py`).

One program owns a block of rows and all columns or a range of them. Its loop runs over (column
block, part, K block) as one flat sequence, so that loads are in flight across column blocks.
Exponentials are shifted by a running maximum per row (Ye et al. 2026, arXiv:2602.03067, Algorithm
1), or by a guess of the result, which saves finding the maximum. A sum that left float32's
comfortable range (`sides`) marks its block of rows, which is done again with the maximum: a bad
guess costs time, not accuracy. `operators.triton_operator` and `operators.triton_plans` call
`half_step`; `symmetric_step` and `operators.triton_operator` call `bias_of` and `repair`.

Work: 2 n m d PARTS operations on tensor cores and n m exponentials. Memory traffic: y once per row
block, through the second-level cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import load_scales, log2_scale, on_its_device
from otdd_flash.kernels.passes.score_terms import ClassTerms, add_bias, column_bias, row_offsets
from otdd_flash.kernels.passes.sides import Partial, Scores, Side, merge_ranges
from otdd_flash.kernels.tiling import (
    BLOCK_ROWS,
    column_ranges,
    gathering_tile,
    load_step,
    operand,
    pipeline_stages,
    tile_for,
)


@on_its_device
@triton.jit
def half_step_kernel(
    x,  # (2 n, DIM) float16
    y,  # (2 m, DIM) float16
    bias_ptr,  # (m,) float32
    costs_ptr,  # (V_x, costs_width) float32
    row_classes_ptr,  # int32, of `row_offsets`
    column_classes_ptr,  # int32, of `add_bias`
    shift_ptr,  # (n,) float32, read if SHIFTED
    marked_ptr,  # (n / BLOCK_M,) int32, read if REPAIR
    ranges_ptr,  # (programs, 4) int32: row block, first column block, column blocks, slot
    highest_ptr,  # (slots, n) float32
    sums_ptr,  # (slots, n) float32
    epsilon_ptr,  # () float64
    n,
    m,
    product_scale: tl.float64,  # in units of the cost
    costs_width,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY_BIAS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    CLASSES: tl.constexpr,
    SHIFTED: tl.constexpr,
    REPAIR: tl.constexpr,
):
    """One program per range of column blocks of one block of BLOCK_M rows."""
    p_range = ranges_ptr + 4 * tl.program_id(0)
    i_block, first, blocks, slot = (
        tl.load(p_range), tl.load(p_range + 1), tl.load(p_range + 2), tl.load(p_range + 3)
    )  # fmt: skip
    o_row = i_block * BLOCK_M + tl.arange(0, BLOCK_M)
    scale, costs_scale = load_scales(epsilon_ptr, product_scale)
    rows = n
    if REPAIR:
        marked = tl.load(marked_ptr + i_block)
        blocks = tl.where(marked != 0, blocks, 0)
        rows = tl.where(marked != 0, n, 0)
    o_costs = row_offsets(row_classes_ptr, i_block, o_row, costs_width, CLASSES)

    STEPS: tl.constexpr = PARTS * ((DIM + BLOCK_K - 1) // BLOCK_K)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    if SHIFTED:
        highest = tl.load(shift_ptr + o_row)
    else:
        highest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for t in tl.range(0, blocks * STEPS, num_stages=STAGES):
        column = (first + t // STEPS) * BLOCK_N
        step = t % STEPS
        b_x, b_y = load_step(
            x, y, i_block * BLOCK_M, column, step, n, m,
            DIM, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS,
        )  # fmt: skip
        o_column = column + tl.arange(0, BLOCK_N)
        if EARLY_BIAS:
            # Loaded in every step, so that it is in flight like the coordinates.
            b_bias = tl.load(bias_ptr + o_column)
        scores = tl.dot(b_x, b_y.T, scores)  # (BLOCK_M, BLOCK_N)
        if step == STEPS - 1:
            if not EARLY_BIAS:
                b_bias = tl.load(bias_ptr + o_column)
            logits = add_bias(
                scores * scale, b_bias, column, o_costs,
                column_classes_ptr, costs_ptr, costs_scale, BLOCK_N, CLASSES,
            )  # fmt: skip
            if SHIFTED:
                sums += tl.sum(tl.exp2(logits - highest[:, None]), 1)
            else:
                raised = tl.maximum(highest, tl.max(logits, 1))
                sums = sums * tl.exp2(highest - raised)
                sums += tl.sum(tl.exp2(logits - raised[:, None]), 1)
                highest = raised
            scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    o_out = slot.to(tl.int64) * n + o_row
    m_out = o_row < rows
    tl.store(highest_ptr + o_out, highest, mask=m_out)
    tl.store(sums_ptr + o_out, sums, mask=m_out)


def half_step(
    rows: Side,
    columns: Side,
    scores: Scores,
    potential: Tensor,
    epsilon: Tensor,
    guess: Tensor | None = None,
    *,
    partly: bool = False,
) -> Tensor:
    """-epsilon log sum_j b_j exp((g_j - C_ij) / epsilon).

    Args:
        rows: the side whose potential is computed.
        columns: the side that is summed over.
        scores: how they make scores, with classes of `rows` first.
        potential: (M,) float32, of the columns, in units of the cost.
        epsilon: () float64, in units of the cost.
        guess: (N,) float32, near the result.
        partly: the guess is of a sum over further columns. Sums that are lost beside it are left at
            0, for the caller to tell whether the whole sum lies within float32's range.

    Returns:
        (N,) float32, in units of the cost.
    """
    layout = rows.points.layout
    bias = bias_of(columns, scores, potential, epsilon)
    n = layout.size
    out = torch.empty(len(layout.position), dtype=torch.float32, device=bias.device)
    if guess is None:
        merge_ranges(_launch(rows, columns, scores, bias, epsilon), rows, epsilon, out)
        return out
    shift = (rows.squares - layout.spread(guess, 0.0)) * log2_scale(epsilon)
    marked = torch.zeros(n // BLOCK_ROWS, dtype=torch.int32, device=bias.device)
    if partly:
        merge_ranges(_launch(rows, columns, scores, bias, epsilon, shift=shift), rows, epsilon, out)
        return out
    # No name holds the partial sums, so their memory is free when `repair` allocates its own.
    merge_ranges(
        _launch(rows, columns, scores, bias, epsilon, shift=shift), rows, epsilon, out, mark=marked
    )
    repair(rows, columns, scores, bias, epsilon, marked, out)
    return out


def repair(
    rows: Side,
    columns: Side,
    scores: Scores,
    bias: Tensor,
    epsilon: Tensor,
    marked: Tensor,
    out: Tensor,
) -> None:
    """Do marked blocks of rows again, with a running maximum; `out` (N,) is overwritten there."""
    partial = _launch(rows, columns, scores, bias, epsilon, marked=marked)
    merge_ranges(partial, rows, epsilon, out, only=marked)


def bias_of(columns: Side, scores: Scores, potential: Tensor, epsilon: Tensor) -> Tensor:
    """The bias (m,) of the columns, with class distances if all rows have one class."""
    return column_bias(
        potential,
        columns.points.layout,
        columns.log2_masses,
        columns.squares,
        scores.costs,
        epsilon,
    )


def _launch(
    rows: Side,
    columns: Side,
    scores: Scores,
    bias: Tensor,
    epsilon: Tensor,
    *,
    shift: Tensor | None = None,
    marked: Tensor | None = None,
) -> Partial:
    """Highest logit, or the shift, and sum of each row over each of its ranges of columns."""
    layout, x, y = rows.points.layout, rows.points.coordinates, columns.points.coordinates
    terms = ClassTerms.of(layout, columns.points.layout, scores.costs)
    n, m, dim = layout.size, len(bias), x.shape[1]
    tile = tile_for(dim * scores.parts, x.device) if layout.pure else gathering_tile(x.device)
    ranges = column_ranges(n // BLOCK_ROWS, m // tile.columns, tile, x.device)
    highest = torch.empty((ranges.most, n), dtype=torch.float32, device=x.device)
    sums = torch.empty_like(highest)
    if tile.resident and scores.parts == 1 and layout.pure and marked is None:
        # Imported where it runs: its dialect knows no other device.
        from otdd_flash.kernels.passes.resident_half_step import resident_half_step

        resident_half_step(
            x,
            y,
            bias,
            terms,
            shift,
            ranges.programs,
            highest,
            sums,
            epsilon,
            scores.scale,
            tile,
        )
        return Partial(highest, sums, ranges.slots)
    half_step_kernel[(len(ranges.programs),)](
        operand(x, BLOCK_ROWS, tile),
        operand(y, tile.columns, tile),
        bias,
        terms.costs,
        terms.rows,
        terms.columns,
        bias if shift is None else shift,
        terms.rows if marked is None else marked,
        ranges.programs,
        highest,
        sums,
        epsilon,
        n,
        m,
        scores.scale,
        scores.costs.shape[1],
        DIM=dim,
        PARTS=scores.parts,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        STAGES=pipeline_stages(tile, not layout.pure),
        EARLY_BIAS=tile.early_bias,
        DESCRIPTORS=tile.descriptors,
        CLASSES=terms.kind,
        SHIFTED=shift is not None,
        REPAIR=marked is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return Partial(highest, sums, ranges.slots)
