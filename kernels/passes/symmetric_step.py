"""The half-step of a self term, each pair of points computed once.

    T(f)_i = f_i - epsilon log sum_j a_j e_ij,   e_ij = exp((f_i + f_j - C_ij) / epsilon) = e_ji

With one potential on both sides e is symmetric: a tile on or above the diagonal gives the sums of
its rows and, weighted by the masses of the rows instead, those of its columns. Half of the products
and exponentials remain. The potential itself is the shift of the exponentials; after an averaged
update f <- (f + T(f)) / 2 no e_ij exceeds 1 / sqrt(a_i a_j), because a_i e_ii does not exceed 1.
Sums that leave float32's range all the same mark their rows, which `half_step` then does with a
maximum. `operators.triton_operator` calls `symmetric_step` and `triangle_sums`.

Shapes: as in `half_step`, with x on both sides. Row blocks are done a stripe at a time, so that
sums over tiles take a bounded part of the memory: of_columns (stripe, n) holds in row k the column
sums that the k-th row block of the stripe gave to the blocks after it, of_rows (slots, stripe
BLOCK_ROWS) the row sums, one for each range of their columns. After a stripe they are added to
totals (n,) in float64, always in the same order, without atomics, so that every run gives the same
bits. `operators.build` counts `STRIPE_BYTES` as memory of a pass.

`pair_sums` are sums of rows and of columns of a rectangle of scores, each score computed once:

    r_i = sum_j b_j e_ij,   c_j = sum_i a_i e_ij,   e_ij = exp((f_i + g_j - C_ij) / epsilon)

A block beside the diagonal of a self term, whose points are not all on the device, gives its rows
what `half_step` would, and its columns as well. The kernel is that of a self term, and so are
shifts by the potentials and the stripes: of_columns (stripe, m) and of_rows (slots, stripe
BLOCK_ROWS) hold the sums over tiles of one stripe of row blocks, which are then added in float64 in
their order. `operators.triton_operator` calls `pair_sums`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import load_scales, log2_scale, on_its_device
from otdd_flash.kernels.passes.half_step import bias_of, repair
from otdd_flash.kernels.passes.score_terms import (
    NOTHING,
    ClassTerms,
    add_bias,
    column_bias,
    row_offsets,
)
from otdd_flash.kernels.passes.sides import LARGEST_SUM, LEAST_SUM, Scores, Side
from otdd_flash.kernels.tiling import (
    BLOCK_ROWS,
    gathering_tile,
    load_step,
    narrow_tile,
    operand,
    pipeline_stages,
)

# Column blocks of a program: short enough to balance the ragged ranges of a triangle.
BLOCKS_PER_RANGE = 16

# Bytes of the sums over tiles of one stripe; `operators.build` counts them as needed memory.
STRIPE_BYTES = 1 << 28


# Stripes of any size take one compilation.
@on_its_device
@triton.jit(do_not_specialize=["first_block", "stripe"])
def symmetric_step_kernel(
    x,  # (2 n, DIM) float16
    y,  # (2 m, DIM) float16; x for a self term, whose ranges are on and above the diagonal
    bias_ptr,  # (m,) float32
    row_term_ptr,  # (n,) float32
    row_masses_ptr,  # (n,) float32
    column_masses_ptr,  # (m,) float32
    costs_ptr,  # (V, costs_width) float32
    row_classes_ptr,  # int32, of `row_offsets`
    column_classes_ptr,  # int32, of `add_bias`
    ranges_ptr,  # (programs, 4) int32: row block, first column block, column blocks, slot
    of_columns_ptr,  # (stripe, m) float32
    of_rows_ptr,  # (slots, stripe BLOCK_M) float32
    epsilon_ptr,  # () float64
    n,
    m,
    first_block,  # of the stripe
    stripe,
    product_scale: tl.float64,  # in units of the cost
    costs_width,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """One program per range of column blocks of one block of rows."""
    p_range = ranges_ptr + 4 * tl.program_id(0)
    i_block, first, blocks, slot = (
        tl.load(p_range), tl.load(p_range + 1), tl.load(p_range + 2), tl.load(p_range + 3)
    )  # fmt: skip
    scale, costs_scale = load_scales(epsilon_ptr, product_scale)
    o_row = i_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_term = tl.load(row_term_ptr + o_row)
    masses_x = tl.load(row_masses_ptr + o_row)
    o_costs = row_offsets(row_classes_ptr, i_block, o_row, costs_width, CLASSES)
    p_columns = of_columns_ptr + (i_block - first_block).to(tl.int64) * m

    STEPS: tl.constexpr = PARTS * ((DIM + BLOCK_K - 1) // BLOCK_K)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    scores = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    for t in tl.range(0, blocks * STEPS, num_stages=STAGES):
        column = (first + t // STEPS) * BLOCK_M
        step = t % STEPS
        b_x, b_y = load_step(
            x, y, i_block * BLOCK_M, column, step, n, m,
            DIM, PARTS, BLOCK_M, BLOCK_M, BLOCK_K, DESCRIPTORS,
        )  # fmt: skip
        scores = tl.dot(b_x, b_y.T, scores)  # (BLOCK_M, BLOCK_M)
        if step == STEPS - 1:
            o_column = column + tl.arange(0, BLOCK_M)
            b_bias = tl.load(bias_ptr + o_column)
            masses_y = tl.load(column_masses_ptr + o_column)
            logits = add_bias(
                scores * scale, b_bias, column, o_costs,
                column_classes_ptr, costs_ptr, costs_scale, BLOCK_M, CLASSES,
            )  # fmt: skip
            kernel = tl.exp2(logits + row_term[:, None])
            sums += tl.sum(kernel * masses_y[None, :], 1)
            # Nobody reads those of the diagonal, but a branch here would spill registers.
            tl.store(p_columns + o_column, tl.sum(kernel * masses_x[:, None], 0))
            scores = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    o_out = slot.to(tl.int64) * (stripe * BLOCK_M) + o_row - first_block * BLOCK_M
    tl.store(of_rows_ptr + o_out, sums)


@triton.jit
def add_partial(sums, partial_ptr, rows, stride, o_row, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Add `rows` rows of partial sums to sums (BLOCK_M,) float64, in order."""
    for first in range(0, rows, BLOCK):
        o_partial = (first + tl.arange(0, BLOCK)).to(tl.int64)
        p_partial = partial_ptr + o_partial[:, None] * stride + o_row[None, :]
        partial = tl.load(p_partial, mask=o_partial[:, None] < rows, other=0.0)
        sums += tl.sum(partial.to(tl.float64), 0)
    return sums


@on_its_device
@triton.jit(do_not_specialize=["first_block", "stripe"])
def merge_triangle_kernel(
    of_columns_ptr,  # (stripe, n) float32
    of_rows_ptr,  # (slots, stripe BLOCK_M) float32
    totals_ptr,  # (n,) float64
    filled_ptr,  # (n,) int8
    marked_ptr,  # (n / BLOCK_M,) int32
    out_ptr,  # (n,) float32
    n,
    first_block,  # of the stripe
    stripe,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    RANGE: tl.constexpr,
    FINISH: tl.constexpr,
):
    """One program per row block from the stripe on.

    Totals; with FINISH, of the blocks of the stripe log2 of them and whether one left the range.
    """
    i_block = first_block + tl.program_id(0)
    o_row = i_block * BLOCK_M + tl.arange(0, BLOCK_M)
    within = i_block - first_block
    sums = tl.zeros((BLOCK_M,), tl.float64)
    if FINISH:
        if first_block > 0:
            sums += tl.load(totals_ptr + o_row)
    else:
        sums += tl.load(totals_ptr + o_row)
    before = tl.minimum(within, stripe)
    sums = add_partial(sums, of_columns_ptr, before, n, o_row, BLOCK_M, BLOCK_SLOTS)
    if within < stripe:
        slots = tl.cdiv(n // BLOCK_M - i_block, RANGE)
        o_within = within * BLOCK_M + tl.arange(0, BLOCK_M)
        sums = add_partial(
            sums, of_rows_ptr, slots, stripe * BLOCK_M, o_within, BLOCK_M, BLOCK_SLOTS
        )
    if FINISH:
        if within < stripe:
            # NaN compares as neither, and so is not good.
            good = (sums >= LEAST) & (sums <= LARGEST)
            bad = tl.where(good, 0, tl.load(filled_ptr + o_row).to(tl.int32))
            tl.store(marked_ptr + i_block, tl.max(bad, 0))
            tl.store(out_ptr + o_row, tl.log2(sums.to(tl.float32)))
        else:
            tl.store(totals_ptr + o_row, sums)
    else:
        tl.store(totals_ptr + o_row, sums)


def symmetric_step(
    side: Side, scores: Scores, masses: Tensor, potential: Tensor, epsilon: Tensor
) -> Tensor:
    """-epsilon log sum_j a_j exp((f_j - C_ij) / epsilon) of a cloud with itself.

    Args:
        side: both sides of the cost.
        scores: how they make scores; the costs of classes are symmetric.
        masses: (n,) float32, packed, 0 for padding.
        potential: (N,) float32, in units of the cost.
        epsilon: () float64, in units of the cost.

    Returns:
        (N,) float32, in units of the cost.
    """
    layout, blocks = side.points.layout, side.points.layout.size // BLOCK_ROWS
    logs = torch.empty(layout.size, dtype=torch.float32, device=potential.device)
    marked = torch.empty(blocks, dtype=torch.int32, device=potential.device)
    height = stripe_height(blocks)
    totals = torch.empty(
        layout.size if height < blocks else 0, dtype=torch.float64, device=potential.device
    )
    _sum_stripes(side, scores, masses, potential, epsilon, [(0, blocks)], totals, marked, logs)
    out = potential - (epsilon * math.log(2.0)) * logs[layout.position]
    bias = bias_of(side, scores, potential, epsilon)
    repair(side, side, scores, bias, epsilon, marked, out)
    return out


def triangle_sums(
    side: Side,
    scores: Scores,
    masses: Tensor,
    potential: Tensor,
    epsilon: Tensor,
    stripes: Sequence[tuple[int, int]],
) -> Tensor:
    """sum_j a_j e_ij over the pairs of some stripes, each pair given to both of its points.

    Args:
        side: both sides of the cost.
        scores: how they make scores; the costs of classes are symmetric.
        masses: (n,) float32, packed, 0 for padding.
        potential: (N,) float32, in units of the cost.
        epsilon: () float64, in units of the cost.
        stripes: first block and end of each: their rows with all columns from the diagonal on.

    Returns:
        (n,) float64, packed. Stripes that cover all blocks once add up to exp((f_i - T(f)_i) /
        epsilon), where float32 holds the sums of a tile.
    """
    totals = torch.zeros(side.points.layout.size, dtype=torch.float64, device=potential.device)
    _sum_stripes(side, scores, masses, potential, epsilon, stripes, totals)
    return totals


def _sum_stripes(
    side: Side,
    scores: Scores,
    masses: Tensor,
    potential: Tensor,
    epsilon: Tensor,
    stripes: Sequence[tuple[int, int]],
    totals: Tensor,
    marked: Tensor | None = None,
    logs: Tensor | None = None,
) -> None:
    """Add sums to totals and, if all stripes are done, leave marks and logarithms of rows."""
    layout, device = side.points.layout, potential.device
    n, unbiased = layout.size, torch.zeros_like(side.squares)
    bias = column_bias(potential, layout, unbiased, side.squares, scores.costs, epsilon)
    terms = ClassTerms.of(layout, layout, scores.costs)
    row_term = (layout.spread(potential, 0.0) - side.squares) * log2_scale(epsilon)
    blocks = n // BLOCK_ROWS
    height = min(stripe_height(blocks), max((end - first for first, end in stripes), default=1))
    of_columns = torch.empty((height, n), dtype=torch.float32, device=device)
    of_rows = torch.empty(
        (triton.cdiv(blocks, BLOCKS_PER_RANGE), height * BLOCK_ROWS), device=device
    )
    filled = layout.filled.to(torch.int8)
    starts = [(first, end) for top, end in stripes for first in range(top, end, height)]
    for first, end in starts:
        stripe = min(height, end - first)
        ranges = ranges_of_stripe(first, stripe, blocks, device)
        _sum_stripe(
            (side, side),
            (bias, row_term, masses, masses),
            (scores, terms),
            epsilon,
            (ranges, first, stripe),
            (of_columns, of_rows),
        )
        merge_triangle_kernel[(blocks - first,)](
            of_columns,
            of_rows,
            totals,
            filled,
            layout.block_class if marked is None else marked,
            row_term if logs is None else logs,
            n,
            first,
            stripe,
            LEAST=LEAST_SUM,
            LARGEST=LARGEST_SUM,
            BLOCK_M=BLOCK_ROWS,
            BLOCK_SLOTS=16,
            RANGE=BLOCKS_PER_RANGE,
            FINISH=logs is not None,
        )


def _sum_stripe(
    sides: tuple[Side, Side],
    terms: tuple[Tensor, Tensor, Tensor, Tensor],
    scores: tuple[Scores, ClassTerms],
    epsilon: Tensor,
    stripe: tuple[Tensor, int, int],
    out: tuple[Tensor, Tensor],
) -> None:
    """Launch `symmetric_step_kernel` for a stripe of row blocks.

    Args:
        sides: rows and columns.
        terms: bias of columns, row terms, and masses of rows and of columns, packed.
        scores: how points make scores, and class distances.
        epsilon: () float64, in units of the cost.
        stripe: its ranges, its first row block and their number.
        out: sums of columns and of rows.
    """
    (rows, columns), (ranges, first, height), (how, classes) = sides, stripe, scores
    layout, x, y = rows.points.layout, rows.points.coordinates, columns.points.coordinates
    tile = narrow_tile(x.device) if layout.pure else gathering_tile(x.device)
    symmetric_step_kernel[(len(ranges),)](
        operand(x, BLOCK_ROWS, tile),
        operand(y, BLOCK_ROWS, tile),
        *terms,
        classes.costs,
        classes.rows,
        classes.columns,
        ranges,
        *out,
        epsilon,
        layout.size,
        columns.points.layout.size,
        first,
        height,
        how.scale,
        how.costs.shape[1],
        DIM=x.shape[1],
        PARTS=how.parts,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_K=tile.depth,
        STAGES=pipeline_stages(tile, not layout.pure),
        DESCRIPTORS=tile.descriptors,
        CLASSES=classes.kind,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def stripe_height(blocks: int) -> int:
    """Row blocks whose sums over tiles fit `STRIPE_BYTES`."""
    return max(1, min(blocks, STRIPE_BYTES // (4 * BLOCK_ROWS * blocks)))


@lru_cache(maxsize=64)
def ranges_of_stripe(first: int, height: int, blocks: int, device: torch.device) -> Tensor:
    """Ranges of column blocks (programs, 4) int32 of row blocks [first, first + height) of so many.

    Longest first: row block, first column block, number of column blocks, and slot, which is how
    many ranges before it are of the same row block.
    """
    rows = torch.arange(first, first + height)
    counts = (blocks - rows + BLOCKS_PER_RANGE - 1) // BLOCKS_PER_RANGE
    row = torch.repeat_interleave(rows, counts)
    slot = torch.arange(len(row)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    start = row + slot * BLOCKS_PER_RANGE
    length = (blocks - start).clamp_max(BLOCKS_PER_RANGE)
    order = torch.argsort(-length, stable=True)
    return torch.stack((row, start, length, slot), 1)[order].to(device, torch.int32)


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
    layout, across, device = rows.points.layout, columns.points.layout, f.device
    n, m = layout.size, across.size
    terms = ClassTerms.of(layout, across, scores.costs)
    # Exponentials of padding are 0, so that their products with no mass are.
    padding = torch.where(across.filled, 0.0, NOTHING)
    bias = column_bias(g, across, padding, columns.squares, scores.costs, epsilon)
    row_term = (layout.spread(f, 0.0) - rows.squares) * log2_scale(epsilon)
    row_term = torch.where(layout.filled, row_term, NOTHING)
    blocks, column_blocks = n // BLOCK_ROWS, m // BLOCK_ROWS
    height = max(1, min(blocks, STRIPE_BYTES // (4 * m)))
    slots = -(-column_blocks // BLOCKS_PER_RANGE)
    row_sums = torch.empty(n, dtype=torch.float64, device=device)
    column_sums = torch.zeros(m, dtype=torch.float64, device=device)
    for first in range(0, blocks, height):
        stripe = min(height, blocks - first)
        of_columns = torch.empty((stripe, m), dtype=torch.float32, device=device)
        of_rows = torch.empty((slots, stripe * BLOCK_ROWS), device=device)
        ranges = _ranges(first, stripe, column_blocks, device)
        _sum_stripe(
            (rows, columns),
            (bias, row_term, of_x, of_y),
            (scores, terms),
            epsilon,
            (ranges, first, stripe),
            (of_columns, of_rows),
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
