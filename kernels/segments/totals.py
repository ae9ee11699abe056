"""The numbers of whole segments from those of their blocks, always added in the same order.

`engine.quasi_newton_kernels` calls `segmented_totals`.

Shapes: partial numbers (P, 2) of rows and (P', 14 + 4 memory) of columns, the third and fourth of
which are a minimum and a maximum; totals (S, 2) and (S, 14 + 4 memory), all float64. Of relaxed
marginals they are 3 and 17 + 4 memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device

# Blocks that are added up at once.
BLOCK = 16
# Columns of partial numbers that are no sums.
LOWEST, HIGHEST = tl.constexpr(2), tl.constexpr(3)


@on_its_device
@triton.jit
def segmented_totals_kernel(
    rows_ptr,  # (P, ROWS) float64, read if ROWS is not 0
    columns_ptr,  # (P', WIDTH) float64
    row_blocks_ptr,  # (S + 1,) int64, the first block of each segment
    column_blocks_ptr,  # (S + 1,) int64
    active_ptr,  # (S,) int8
    row_totals_ptr,  # (S, ROWS) float64
    column_totals_ptr,  # (S, WIDTH) float64
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per segment."""
    i_segment = tl.program_id(0).to(tl.int64)
    active = tl.load(active_ptr + i_segment) != 0
    o, o_block = tl.arange(0, LANES), tl.arange(0, BLOCK)
    first, last = tl.load(column_blocks_ptr + i_segment), tl.load(column_blocks_ptr + i_segment + 1)
    sums = tl.zeros((BLOCK, LANES), tl.float64)
    lowest = tl.full((BLOCK, LANES), float("inf"), tl.float64)
    highest = tl.full((BLOCK, LANES), -float("inf"), tl.float64)
    for i_block in range(first, tl.where(active, last, first), BLOCK):
        o_row = i_block + o_block
        m_part = (o_row < last)[:, None] & (o < WIDTH)[None, :]
        part = tl.load(columns_ptr + o_row[:, None] * WIDTH + o[None, :], mask=m_part, other=0.0)
        sums += part
        lowest = tl.minimum(lowest, tl.where(m_part, part, float("inf")))
        highest = tl.maximum(highest, tl.where(m_part, part, -float("inf")))
    totals = tl.sum(sums, 0)
    totals = tl.where(o == LOWEST, tl.min(lowest, 0), totals)
    totals = tl.where(o == HIGHEST, tl.max(highest, 0), totals)
    tl.store(column_totals_ptr + i_segment * WIDTH + o, totals, mask=o < WIDTH)
    if ROWS:
        first, last = tl.load(row_blocks_ptr + i_segment), tl.load(row_blocks_ptr + i_segment + 1)
        o_pair = tl.arange(0, ROW_LANES)
        pairs = tl.zeros((BLOCK, ROW_LANES), tl.float64)
        for i_block in range(first, tl.where(active, last, first), BLOCK):
            o_row = i_block + o_block
            p_pair = rows_ptr + ROWS * o_row[:, None] + o_pair[None, :]
            m_pair = (o_row < last)[:, None] & (o_pair < ROWS)[None, :]
            pairs += tl.load(p_pair, mask=m_pair, other=0.0)
        p_totals = row_totals_ptr + ROWS * i_segment + o_pair
        tl.store(p_totals, tl.sum(pairs, 0), mask=o_pair < ROWS)


def first_blocks(blocks: Tensor, count: int) -> Tensor:
    """Where the blocks (P, 2) of each of `count` segments start, and where all end (S + 1,)."""
    owners, segments = blocks[:, 0].contiguous(), torch.arange(count + 1, device=blocks.device)
    return torch.searchsorted(owners, segments.to(owners.dtype))


def segmented_totals(
    rows: Tensor | None,
    columns: Tensor,
    row_blocks: Tensor,
    column_blocks: Tensor,
    active: Tensor,
) -> tuple[Tensor, Tensor]:
    """The numbers of all active segments.

    Args:
        rows: (P, 2) or (P, 3) float64, of `segmented_softmin`; None where columns are rows.
        columns: (P', 14 + 4 memory) float64, of `segmented_evaluation`.
        row_blocks: (S + 1,) int64, of `first_blocks`.
        column_blocks: (S + 1,) int64, likewise.
        active: (S,) bool, segments to work on.

    Returns:
        Totals of as many numbers, float64, and two of rows where columns are rows; unspecified for
        segments that are not active.
    """
    count, width = len(column_blocks) - 1, columns.shape[1]
    column_totals = columns.new_empty((count, width))
    of_rows = 0 if rows is None else rows.shape[1]
    row_totals = column_totals[:, :2] if rows is None else columns.new_empty((count, of_rows))
    segmented_totals_kernel[(count,)](
        columns if rows is None else rows,
        columns,
        row_blocks,
        column_blocks,
        active.view(torch.int8),
        row_totals,
        column_totals,
        WIDTH=width,
        LANES=triton.next_power_of_2(width),
        ROWS=of_rows,
        ROW_LANES=triton.next_power_of_2(max(1, of_rows)),
        BLOCK=BLOCK,
    )
    return row_totals, column_totals
