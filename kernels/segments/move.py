"""The next potentials to evaluate in all segments, as combinations of their vectors.

With the step s = g - g° and the residual difference y = r° - r of an evaluation, less their means,
as the newest remembered vectors where they are learnt, and with (g°, r°) <- (g, r) where g is kept,

    h = g° + scale r° + shift + sum_k weights_k v_k,      v_k the remembered vectors,
    g <- h + extrapolation (h - level),

and level <- h where a level of epsilon ends. Of relaxed marginals r is less by a translation, the
last number of a move before its weights. Columns without mass take h = g° + r°, and nothing of
theirs is remembered.

One program per block of columns of a segment. `engine.quasi_newton_kernels` calls `segmented_move`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.segments.evaluation import BLOCK, Vectors

# Numbers of a move before its weights, and of one with relaxed marginals.
MOVE = 9
RELAXED_MOVE = 10


@on_its_device
@triton.jit
def segmented_move_kernel(
    masses_ptr,  # (n,) float64
    blocks_ptr,  # (programs, 2) int32: segment, and which of its blocks
    segments_ptr,  # (S, 8) int64, columns as rows
    active_ptr,  # (S,) int8
    move_ptr,  # (S, MOVE + VECTORS) float64
    candidate_ptr,  # (entries,) float32, overwritten
    fresh_ptr,  # (entries,) float32
    kept_ptr,  # (entries,) float32, overwritten
    residual_ptr,  # (entries,) float32, overwritten
    level_ptr,  # (entries,) float32, overwritten
    remembered_ptr,  # (VECTORS entries,) float32, overwritten
    RELAXED: tl.constexpr,
    MOVE: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of columns of a segment."""
    i_program = tl.program_id(0)
    i_segment = tl.load(blocks_ptr + 2 * i_program).to(tl.int64)
    p_segment = segments_ptr + 8 * i_segment
    start, columns, offset = (
        tl.load(p_segment), tl.load(p_segment + 1), tl.load(p_segment + 2)
    )  # fmt: skip
    o_column = tl.load(blocks_ptr + 2 * i_program + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < tl.where(tl.load(active_ptr + i_segment) != 0, columns, 0)
    p_move = move_ptr + (MOVE + VECTORS) * i_segment
    is_kept, is_learnt, ends = (
        tl.load(p_move) != 0, tl.load(p_move + 1) != 0, tl.load(p_move + 7) != 0
    )  # fmt: skip
    # There is no vector of a negative number.
    slot = tl.where(is_learnt, tl.load(p_move + 2).to(tl.int32), -VECTORS)
    mean_step, mean_difference = (
        tl.load(p_move + 3).to(tl.float32),
        tl.load(p_move + 4).to(tl.float32),
    )
    scale, shift = tl.load(p_move + 5).to(tl.float32), tl.load(p_move + 6).to(tl.float32)
    extrapolation = tl.load(p_move + 8).to(tl.float32)
    i_vector = tl.arange(0, VECTORS)
    weights = tl.load(p_move + MOVE + i_vector).to(tl.float32)  # (VECTORS,)
    m_step = (i_vector == slot)[:, None]
    m_newest = m_step | (i_vector == slot + VECTORS // 2)[:, None]
    o_entry = offset + o_column
    m_mass = tl.load(masses_ptr + start + o_column, mask=m_column, other=0.0) > 0
    potential = tl.load(candidate_ptr + o_entry, mask=m_column, other=0.0)
    fresh = tl.load(fresh_ptr + o_entry, mask=m_column, other=0.0)
    if RELAXED:
        fresh -= tl.load(p_move + 9).to(tl.float32)
    kept = tl.load(kept_ptr + o_entry, mask=m_column, other=0.0)
    residual = tl.load(residual_ptr + o_entry, mask=m_column, other=0.0)
    level = tl.load(level_ptr + o_entry, mask=m_column, other=0.0)
    p_remembered = (
        remembered_ptr + VECTORS * offset + i_vector[:, None] * columns + o_column[None, :]
    )
    remembered = tl.load(p_remembered, mask=m_column[None, :], other=0.0)
    step = tl.where(m_mass, potential - kept - mean_step, 0.0)
    difference = tl.where(m_mass, residual - fresh - mean_difference, 0.0)
    newest = tl.where(m_step, step[None, :], difference[None, :])  # (VECTORS, BLOCK)
    tl.store(p_remembered, newest, mask=m_newest & m_column[None, :])
    remembered = tl.where(m_newest, newest, remembered)
    kept = tl.where(is_kept, potential, kept)
    residual = tl.where(is_kept, fresh, residual)
    tl.store(kept_ptr + o_entry, kept, mask=m_column)
    tl.store(residual_ptr + o_entry, residual, mask=m_column)
    combined = scale * residual + shift + tl.sum(remembered * weights[:, None], 0)
    moved = kept + tl.where(m_mass, combined, residual)
    tl.store(level_ptr + o_entry, tl.where(ends, moved, level), mask=m_column)
    tl.store(candidate_ptr + o_entry, moved + extrapolation * (moved - level), mask=m_column)


def segmented_move(
    masses: Tensor, blocks: Tensor, table: Tensor, active: Tensor, move: Tensor, vectors: Vectors
) -> None:
    """Move the candidates of all active segments.

    Args:
        masses: (n,) float64, of the pool.
        blocks: (P, 2) int32, of `blocks_of`.
        table: (S, 8) int64, as for `segmented_step`, with the columns as rows.
        active: (S,) bool, segments to work on.
        move: (S, 9 + 2 memory) float64, the numbers of `engine.problems.Move`; of relaxed marginals
            with a translation before the weights.
        vectors: of the columns; overwritten.
    """
    numbers = move.shape[1] - vectors.vectors
    segmented_move_kernel[(len(blocks),)](
        masses,
        blocks,
        table,
        active.view(torch.int8),
        move,
        *vectors,
        RELAXED=numbers == RELAXED_MOVE,
        MOVE=numbers,
        VECTORS=vectors.vectors,
        BLOCK=BLOCK,
    )
