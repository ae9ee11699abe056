"""From the sums of a segmented half-step to potentials of rows.

    f_i = -epsilon ln(2) (h_i + log2 sum_k s_ki 2^(h_ki - h_i)),    h_i = max_k h_ki

over the ranges k of a row's columns, in float64, and two sums per segment: <a, f> and <a, |f|> of
the f that are stored, in float32.

One program per segment reads its rows in fixed blocks, so that the order of additions depends on
nothing but the segment.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.segmented_step import Sums

BLOCK = 512
LN_2 = math.log(2.0)


@triton.jit
def merged_softmin(
    highest_ptr,  # (partial entries,) float32
    sums_ptr,  # (partial entries,) float64
    p_segment,  # (8,) int64, of a table of segments
    o_row,  # (BLOCK,) rows of the segment
    m_row,  # which of them there are
    epsilon,
    LN_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The softmin (BLOCK,) float64 of rows of a segment, finite where there are none."""
    rows, partial = tl.load(p_segment + 1), tl.load(p_segment + 6)
    ranges = tl.load(p_segment + 7).to(tl.int32)
    top = tl.full((BLOCK,), -float("inf"), tl.float64)
    sums = tl.zeros((BLOCK,), tl.float64)
    for i_range in range(ranges):
        o_partial = partial + i_range * rows + o_row
        part = tl.load(highest_ptr + o_partial, mask=m_row, other=0.0).to(tl.float64)
        raised = tl.maximum(top, part)
        added = tl.load(sums_ptr + o_partial, mask=m_row, other=1.0)
        sums = sums * tl.exp2(top - raised) + added * tl.exp2(part - raised)
        top = raised
    return -epsilon * LN_2 * (top + tl.log2(sums))


@triton.jit
def segmented_softmin_kernel(
    highest_ptr,  # (partial entries,) float32
    sums_ptr,  # (partial entries,) float64
    masses_ptr,  # (n,) float64
    segments_ptr,  # (S, 8) int64
    active_ptr,  # (S,) int8
    epsilon_ptr,  # (S,) float64
    potential_ptr,  # (entries,) float32, overwritten
    seen_ptr,  # (S, 2) float64
    LN_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per segment."""
    i_segment = tl.program_id(0).to(tl.int64)
    p_segment = segments_ptr + 8 * i_segment
    start, rows = tl.load(p_segment), tl.load(p_segment + 1)
    p_potential = potential_ptr + tl.load(p_segment + 2)
    epsilon = tl.load(epsilon_ptr + i_segment)
    blocks = tl.where(tl.load(active_ptr + i_segment) != 0, tl.cdiv(rows, BLOCK), 0)
    value = tl.zeros((BLOCK,), tl.float64)
    size = tl.zeros((BLOCK,), tl.float64)
    for i_block in range(blocks):
        o_row = i_block * BLOCK + tl.arange(0, BLOCK)
        m_row = o_row < rows
        softmin = merged_softmin(
            highest_ptr, sums_ptr, p_segment, o_row, m_row, epsilon, LN_2, BLOCK
        ).to(tl.float32)
        tl.store(p_potential + o_row, softmin, mask=m_row)
        masses = tl.load(masses_ptr + start + o_row, mask=m_row, other=0.0)
        value += masses * softmin
        size += masses * tl.abs(softmin)
    tl.store(seen_ptr + 2 * i_segment, tl.sum(value, 0))
    tl.store(seen_ptr + 2 * i_segment + 1, tl.sum(size, 0))


def segmented_softmin(
    partial: Sums,
    masses: Tensor,
    table: Tensor,
    active: Tensor,
    epsilon: Tensor,
    potential: Tensor,
) -> Tensor:
    """Take the softmin as the potentials of the rows of all active segments.

    Args:
        partial: of `segmented_step`.
        masses: (n,) float64, of the pool.
        table: (S, 8) int64, as for `segmented_step`.
        active: (S,) bool, segments to work on.
        epsilon: (S,) float64, in units of the cost.
        potential: (entries,) float32, of the rows, in units of the cost; overwritten.

    Returns:
        (S, 2) float64, the sums above; void for segments that are not active.
    """
    seen = masses.new_empty((len(table), 2))
    segmented_softmin_kernel[(len(table),)](
        *partial,
        masses,
        table,
        active.view(torch.int8),
        epsilon,
        potential,
        seen,
        LN_2=LN_2,
        BLOCK=BLOCK,
    )
    return seen
