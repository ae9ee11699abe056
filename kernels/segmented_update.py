"""From the sums of a segmented half-step to over-relaxed potentials, and what they tell.

    T_i = -epsilon ln(2) (h_i + log2 sum_k s_ki 2^(h_ki - h_i)),    h_i = max_k h_ki
    u_i <- T_i + epsilon s_i,    s_i = (omega - 1) delta_i, at most log(1 + delta_i) if delta_i > 0

with delta_i = (T_i - u_i) / epsilon, as `operators.segments` derives. Eight sums per segment come
with it, of float64: with the masses w of the rows and c_i = w_i exp(-delta_i),

    ||c - w||_1, sum c, <w, u>, <w, |u|>, min u, max u, <w, T>, <w, |T|>.

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


@triton.jit
def segmented_update_kernel(
    highest_ptr,  # (partial entries,) float32
    sums_ptr,  # (partial entries,) float32
    masses_ptr,  # (n,) float64
    segments_ptr,  # (S, 8) int64
    active_ptr,  # (S,) int8
    epsilon_ptr,  # (S,) float32
    relaxation_ptr,  # (S,) float32
    potential_ptr,  # (entries,) float32, overwritten
    seen_ptr,  # (S, 8) float64
    LN_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per segment."""
    i_segment = tl.program_id(0).to(tl.int64)
    p_segment = segments_ptr + 8 * i_segment
    start, rows = tl.load(p_segment), tl.load(p_segment + 1)
    p_potential, partial = potential_ptr + tl.load(p_segment + 2), tl.load(p_segment + 6)
    ranges = tl.load(p_segment + 7).to(tl.int32)
    epsilon, relaxation = tl.load(epsilon_ptr + i_segment), tl.load(relaxation_ptr + i_segment)
    blocks = tl.where(tl.load(active_ptr + i_segment) != 0, tl.cdiv(rows, BLOCK), 0)

    gap = tl.zeros((BLOCK,), tl.float64)
    mass = tl.zeros((BLOCK,), tl.float64)
    value = tl.zeros((BLOCK,), tl.float64)
    size = tl.zeros((BLOCK,), tl.float64)
    next_value = tl.zeros((BLOCK,), tl.float64)
    next_size = tl.zeros((BLOCK,), tl.float64)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for i_block in range(blocks):
        o_row = i_block * BLOCK + tl.arange(0, BLOCK)
        m_row = o_row < rows
        top = tl.full((BLOCK,), -float("inf"), tl.float32)
        sums = tl.zeros((BLOCK,), tl.float32)
        for i_range in range(ranges):
            o_partial = partial + i_range * rows + o_row
            part = tl.load(highest_ptr + o_partial, mask=m_row, other=0.0)
            raised = tl.maximum(top, part)
            added = tl.load(sums_ptr + o_partial, mask=m_row, other=1.0)
            sums = sums * tl.exp2(top - raised) + added * tl.exp2(part - raised)
            top = raised
        softmin = -epsilon * LN_2 * (top + tl.log2(sums))
        before = tl.load(p_potential + o_row, mask=m_row, other=0.0)
        step = (softmin - before) / epsilon
        beyond = (relaxation - 1) * step
        capped = tl.minimum(beyond, tl.log(1 + tl.maximum(step, 0.0)))
        moved = softmin + epsilon * tl.where(step > 0, capped, beyond)
        tl.store(p_potential + o_row, moved, mask=m_row)
        # Rows past the end have no mass and, set to 0, nothing that is not finite.
        masses = tl.load(masses_ptr + start + o_row, mask=m_row, other=0.0)
        change = tl.exp(tl.where(m_row, -step, 0.0)).to(tl.float64)
        gap += masses * tl.abs(change - 1)
        mass += masses * change
        value += masses * before
        size += masses * tl.abs(before)
        softmin = tl.where(m_row, softmin, 0.0)
        next_value += masses * softmin
        next_size += masses * tl.abs(softmin)
        lowest = tl.minimum(lowest, tl.where(m_row, before, float("inf")))
        highest = tl.maximum(highest, tl.where(m_row, before, -float("inf")))
    p_seen = seen_ptr + 8 * i_segment
    tl.store(p_seen, tl.sum(gap, 0))
    tl.store(p_seen + 1, tl.sum(mass, 0))
    tl.store(p_seen + 2, tl.sum(value, 0))
    tl.store(p_seen + 3, tl.sum(size, 0))
    tl.store(p_seen + 4, tl.min(lowest, 0).to(tl.float64))
    tl.store(p_seen + 5, tl.max(highest, 0).to(tl.float64))
    tl.store(p_seen + 6, tl.sum(next_value, 0))
    tl.store(p_seen + 7, tl.sum(next_size, 0))


def segmented_update(
    partial: Sums,
    masses: Tensor,
    table: Tensor,
    active: Tensor,
    epsilon: Tensor,
    relaxation: Tensor,
    potential: Tensor,
) -> Tensor:
    """Move the potentials of the rows of all active segments, in place.

    Args:
        partial: of `segmented_step`.
        masses: (n,) float64, of the pool.
        table: (S, 8) int64, as for `segmented_step`.
        active: (S,) bool, segments to work on.
        epsilon: (S,), in units of the cost.
        relaxation: (S,), omega in (0, 2].
        potential: (entries,) float32, of the rows, in units of the cost; overwritten.

    Returns:
        (S, 8) float64, the sums above; void for segments that are not active.
    """
    count = len(table)
    seen = masses.new_empty((count, 8))
    segmented_update_kernel[(count,)](
        *partial,
        masses,
        table,
        active.to(torch.int8),
        epsilon.float(),
        relaxation.float(),
        potential,
        seen,
        LN_2=math.log(2.0),
        BLOCK=BLOCK,
    )
    return seen
