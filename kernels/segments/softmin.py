"""Potentials of rows and their sums, from a segmented half-step or from a finished softmin.

    f_i = -epsilon ln(2) (h_i + log2 sum_k s_ki 2^(h_ki - h_i)),    h_i = max_k h_ki

over the ranges k of a row's columns, in float64, and two sums per segment: <a, f> and <a, |f|> of
the f that are stored, in float32.

Of relaxed marginals (`formulas.marginals`) f_i is what is above over 1 + epsilon / rho, and sums
are <a, phi(f)>, <a, |f|> and <a, e^(-f / rho)>. Segments have 1 / rho of rows and of columns, which
is 0 where one of both is exact.

`engine.quasi_newton_kernels.KernelVectors` calls it in every evaluation. One program per block of
rows of a segment; `segmented_totals` adds the blocks up. Blocks are fixed
within a segment, so that the order of additions depends on nothing but the segment.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.segments.step import ROWS, Sums

# Rows or columns of one program.
BLOCK = 256
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
def dual_of(potential, softness):
    """phi(f) and e^(-f / rho) of potentials, float64, for 1 / rho in `softness`: f and 1 for 0.

    Of a large rho the difference loses digits that are far below those of float32.
    """
    owed = tl.exp(-softness * potential)
    inverse = 1 / tl.where(softness > 0, softness, 1.0)
    return tl.where(softness > 0, (1 - owed) * inverse, potential), owed


@on_its_device
@triton.jit
def segmented_softmin_kernel(
    highest_ptr,  # (partial entries,) float32; the softmin (entries,) float32 unless MERGED
    sums_ptr,  # (partial entries,) float64
    masses_ptr,  # (n,) float64
    blocks_ptr,  # (programs, 2) int32: segment, and which of its blocks
    segments_ptr,  # (S, 8) int64
    active_ptr,  # (S,) int8
    epsilon_ptr,  # (S,) float64
    softness_ptr,  # (S, 2) float64, read if RELAXED
    potential_ptr,  # (entries,) float32, overwritten
    partial_ptr,  # (programs, SUMS) float64
    LN_2: tl.constexpr,
    MERGED: tl.constexpr,
    RELAXED: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of rows of a segment."""
    i_program = tl.program_id(0)
    i_segment = tl.load(blocks_ptr + 2 * i_program).to(tl.int64)
    p_segment = segments_ptr + 8 * i_segment
    start, rows = tl.load(p_segment), tl.load(p_segment + 1)
    o_row = tl.load(blocks_ptr + 2 * i_program + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < tl.where(tl.load(active_ptr + i_segment) != 0, rows, 0)
    p_potential = potential_ptr + tl.load(p_segment + 2) + o_row
    if MERGED:
        softmin = merged_softmin(
            highest_ptr, sums_ptr, p_segment, o_row, m_row, tl.load(epsilon_ptr + i_segment),
            LN_2, BLOCK,
        ).to(tl.float32)  # fmt: skip
    else:
        softmin = tl.load(highest_ptr + o_row, mask=m_row, other=0.0)
    if RELAXED:
        softness = tl.load(softness_ptr + 2 * i_segment)
        rate = 1 + tl.load(epsilon_ptr + i_segment) * softness
        softmin = (softmin.to(tl.float64) / rate).to(tl.float32)
    tl.store(p_potential, softmin, mask=m_row)
    masses = tl.load(masses_ptr + start + o_row, mask=m_row, other=0.0)
    softmin = tl.where(masses > 0, softmin, 0.0)
    p_partial = partial_ptr + SUMS * i_program
    tl.store(p_partial + 1, tl.sum(masses * tl.abs(softmin), 0))
    if RELAXED:
        value, owed = dual_of(softmin.to(tl.float64), softness)
        tl.store(p_partial, tl.sum(masses * value, 0))
        tl.store(p_partial + 2, tl.sum(masses * owed, 0))
    else:
        tl.store(p_partial, tl.sum(masses * softmin, 0))


def blocks_of(table: Tensor) -> Tensor:
    """Segments (P,) and their blocks of rows (P,), as (P, 2) int32, in order."""
    counts = (table[:, ROWS] + BLOCK - 1) // BLOCK
    owners = torch.repeat_interleave(torch.arange(len(table), device=table.device), counts)
    index = torch.arange(len(owners), device=table.device)
    return torch.stack((owners, index - (counts.cumsum(0) - counts)[owners]), 1).to(torch.int32)


def segmented_softmin(
    softmin: Sums | Tensor,
    masses: Tensor,
    blocks: Tensor,
    table: Tensor,
    active: Tensor,
    epsilon: Tensor,
    potential: Tensor,
    softness: Tensor | None = None,
) -> Tensor:
    """Take the softmin as the potentials of the rows of all active segments.

    Args:
        softmin: sums of `segmented_step`, or of a single segment the softmin (n,) float32 itself.
        masses: (n,) float64, of the pool.
        blocks: (P, 2) int32, of `blocks_of`.
        table: (S, 8) int64, as for `segmented_step`.
        active: (S,) bool, segments to work on.
        epsilon: (S,) float64, in units of the cost.
        potential: (entries,) float32, of the rows, in units of the cost; overwritten.
        softness: (S, 2) float64, 1 / rho of rows and of columns; None where all are exact.

    Returns:
        (P, 2) or (P, 3) float64, the sums above by blocks; unspecified for segments that are not
        active.
    """
    sums = 2 if softness is None else 3
    partial = masses.new_empty((len(blocks), sums))
    merged = isinstance(softmin, Sums)
    segmented_softmin_kernel[(len(blocks),)](
        *(softmin if merged else (softmin, partial)),
        masses,
        blocks,
        table,
        active.view(torch.int8),
        epsilon,
        epsilon if softness is None else softness,
        potential,
        partial,
        LN_2=LN_2,
        MERGED=merged,
        RELAXED=softness is not None,
        SUMS=sums,
        BLOCK=BLOCK,
    )
    return partial
