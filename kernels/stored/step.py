"""The Sinkhorn half-step of many small transport problems whose scores are stored, in one launch.

For the rows i and columns j of a segment, a block of a matrix of scores S,

    h_i + log2 s_i = log2 sum_j 2^((S_ij + u_j) log2(e) / epsilon)

with u_j = g_j + epsilon log b_j in float64, rounded once. S_ij + u_j is rounded to float32, like a
cost; it is multiplied by a factor of two parts and lowered by the highest logit, rounded up to a
whole number, in fused steps: what is left is small where it counts, and so is its rounding. Every
lane keeps a maximum and a sum of its own until the end of its row.

One program owns a block of rows of a segment and all of its columns; a segment that is not active
ends at once. `operators.kernel_pool.ScoredSegments` calls it; the engine turns the sums into
potentials by `segmented_softmin` and `segmented_evaluation`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.segments.step import LOG2_E, ROWS, Sums

# Rows of a program, and columns that it reads at once: the fastest of 40 sizes on an H100, at 500,
# 1,000 and 5,000 columns.
ROWS_OF_PROGRAM, COLUMNS_AT_ONCE = 4, 256

# Below every logit but those of columns without mass.
LOWEST = tl.constexpr(-3e38)


@on_its_device
@triton.jit
def stored_step_kernel(
    scores_ptr,  # (B points, points) float32
    log2_masses_ptr,  # (B points,) float64
    potential_ptr,  # (entries,) float32
    programs_ptr,  # (programs, 2) int32: segment, and which of its programs
    segments_ptr,  # (S, 8) int64
    active_ptr,  # (S,) int8
    epsilon_ptr,  # (S,) float64
    highest_ptr,  # (partial entries,) float32
    sums_ptr,  # (partial entries,) float64
    points,
    LOG2_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per block of BLOCK_M rows of a segment."""
    i_segment = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    i_block = tl.load(programs_ptr + 2 * tl.program_id(0) + 1)
    p_segment = segments_ptr + 8 * i_segment
    row_start, rows = tl.load(p_segment), tl.load(p_segment + 1).to(tl.int32)
    column_start, columns = tl.load(p_segment + 3), tl.load(p_segment + 4).to(tl.int32)
    active = tl.load(active_ptr + i_segment) != 0
    o_row = i_block * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < tl.where(active, rows, 0)
    stop = tl.where(active & (i_block * BLOCK_M < rows), columns, 0)
    epsilon = tl.load(epsilon_ptr + i_segment)
    exact, unit = LOG2_E / epsilon, epsilon / LOG2_E
    scale = exact.to(tl.float32)
    rest = (exact - scale.to(tl.float64)).to(tl.float32)
    p_row = scores_ptr + (row_start + o_row) * points + column_start % points
    p_masses = log2_masses_ptr + column_start
    p_potential = potential_ptr + tl.load(p_segment + 5)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    highest = tl.full((BLOCK_M, BLOCK_N), LOWEST, tl.float32)
    for column in range(0, stop, BLOCK_N):
        o_column = column + tl.arange(0, BLOCK_N)
        m_column = o_column < columns
        masses = tl.load(p_masses + o_column, mask=m_column, other=-float("inf"))
        potential = tl.load(p_potential + o_column, mask=m_column, other=0.0)
        bias = (potential.to(tl.float64) + masses * unit).to(tl.float32)
        m_tile = m_row[:, None] & m_column[None, :]
        scores = tl.load(p_row[:, None] + o_column[None, :], mask=m_tile, other=0.0)
        scores += bias[None, :]
        raised = tl.maximum(highest, tl.ceil(scores * scale))
        # Above 0 by rounding alone, and far above it where logits exceed 2^24.
        logits = tl.minimum(tl.fma(scores, rest, tl.fma(scores, scale, -raised)), 1.0)
        sums = sums * tl.exp2(highest - raised) + tl.where(
            scores > -float("inf"), tl.exp2(logits), 0.0
        )
        highest = raised
    top = tl.max(highest, 1)
    total = tl.sum((sums * tl.exp2(highest - top[:, None])).to(tl.float64), 1)
    o_out = tl.load(p_segment + 6) + o_row
    tl.store(highest_ptr + o_out, top, mask=m_row)
    tl.store(sums_ptr + o_out, total, mask=m_row)


def stored_programs(table: Tensor) -> Tensor:
    """The programs (P, 2) int32 of a table of segments (S, 8)."""
    counts = (table[:, ROWS] + ROWS_OF_PROGRAM - 1) // ROWS_OF_PROGRAM
    owners = torch.repeat_interleave(torch.arange(len(table), device=table.device), counts)
    index = torch.arange(len(owners), device=table.device) - (counts.cumsum(0) - counts)[owners]
    return torch.stack((owners, index), 1).to(torch.int32)


def stored_step(
    scores: Tensor,
    log2_masses: Tensor,
    programs: Tensor,
    table: Tensor,
    active: Tensor,
    epsilon: Tensor,
    potential: Tensor,
    out: Sums,
) -> None:
    """Sums of all rows of all active segments over their columns.

    Args:
        scores: (B, points, points) float32.
        log2_masses: (B points,) float64.
        programs: of `stored_programs`; of a table with segments at least as large.
        table: (S, 8) int64 as for `segmented_step`, of points, each segment's of one problem, and
            with one range.
        active: (S,) bool, segments to work on.
        epsilon: (S,) float64, in units of the cost.
        potential: (entries,) float32, of the columns.
        out: overwritten for active segments.
    """
    stored_step_kernel[(len(programs),)](
        scores,
        log2_masses,
        potential,
        programs,
        table,
        active.view(torch.int8),
        epsilon,
        *out,
        scores.shape[-1],
        LOG2_E=LOG2_E,
        BLOCK_M=ROWS_OF_PROGRAM,
        BLOCK_N=COLUMNS_AT_ONCE,
        num_warps=4,
    )
