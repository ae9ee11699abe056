"""The next potentials to look at in all segments, as combinations of their vectors.

With the step s = g - g° and the fall y = r° - r of a look, less their means, as the newest
remembered vectors where they are learnt, and with (g°, r°) <- (g, r) where g is kept,

    g <- g° + scale r° + shift + sum_k weights_k v_k,      v_k the remembered vectors.

One program per segment.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.segmented_look import Vectors

BLOCK = 256


@triton.jit
def segmented_move_kernel(
    segments_ptr,  # (S, 8) int64, columns as rows
    active_ptr,  # (S,) int8
    move_ptr,  # (S, 7 + VECTORS) float64
    candidate_ptr,  # (entries,) float32, overwritten
    fresh_ptr,  # (entries,) float32
    kept_ptr,  # (entries,) float32, overwritten
    residual_ptr,  # (entries,) float32, overwritten
    remembered_ptr,  # (VECTORS entries,) float32, overwritten
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per segment."""
    i_segment = tl.program_id(0).to(tl.int64)
    p_segment = segments_ptr + 8 * i_segment
    columns, offset = tl.load(p_segment + 1), tl.load(p_segment + 2)
    blocks = tl.where(tl.load(active_ptr + i_segment) != 0, tl.cdiv(columns, BLOCK), 0)
    p_move = move_ptr + (7 + VECTORS) * i_segment
    is_kept, is_learnt = tl.load(p_move), tl.load(p_move + 1)
    # There is no vector of a negative number.
    slot = tl.where(is_learnt != 0, tl.load(p_move + 2).to(tl.int32), -VECTORS)
    mean_step, mean_fall = tl.load(p_move + 3).to(tl.float32), tl.load(p_move + 4).to(tl.float32)
    scale, shift = tl.load(p_move + 5).to(tl.float32), tl.load(p_move + 6).to(tl.float32)
    i_vector = tl.arange(0, VECTORS)
    weights = tl.load(p_move + 7 + i_vector).to(tl.float32)  # (VECTORS,)
    m_step = (i_vector == slot)[:, None]
    m_newest = m_step | (i_vector == slot + VECTORS // 2)[:, None]
    for i_block in range(blocks):
        o_column = i_block * BLOCK + tl.arange(0, BLOCK)
        m_column = o_column < columns
        o_entry = offset + o_column
        potential = tl.load(candidate_ptr + o_entry, mask=m_column, other=0.0)
        fresh = tl.load(fresh_ptr + o_entry, mask=m_column, other=0.0)
        kept = tl.load(kept_ptr + o_entry, mask=m_column, other=0.0)
        residual = tl.load(residual_ptr + o_entry, mask=m_column, other=0.0)
        p_remembered = (
            remembered_ptr + VECTORS * offset + i_vector[:, None] * columns + o_column[None, :]
        )
        remembered = tl.load(p_remembered, mask=m_column[None, :], other=0.0)
        step = potential - kept - mean_step
        fall = residual - fresh - mean_fall
        newest = tl.where(m_step, step[None, :], fall[None, :])  # (VECTORS, BLOCK)
        tl.store(p_remembered, newest, mask=m_newest & m_column[None, :])
        remembered = tl.where(m_newest, newest, remembered)
        kept = tl.where(is_kept != 0, potential, kept)
        residual = tl.where(is_kept != 0, fresh, residual)
        tl.store(kept_ptr + o_entry, kept, mask=m_column)
        tl.store(residual_ptr + o_entry, residual, mask=m_column)
        moved = kept + (scale * residual + shift + tl.sum(remembered * weights[:, None], 0))
        tl.store(candidate_ptr + o_entry, moved, mask=m_column)


def segmented_move(table: Tensor, active: Tensor, move: Tensor, vectors: Vectors) -> None:
    """Move the candidates of all active segments.

    Args:
        table: (S, 8) int64, as for `segmented_step`, with the columns as rows.
        active: (S,) bool, segments to work on.
        move: (S, 7 + 2 memory) float64, per segment: whether the candidate is kept, whether the
            newest differences are remembered, in which place, means of s and y, scale, shift and
            weights.
        vectors: of the columns; overwritten.
    """
    segmented_move_kernel[(len(table),)](
        table,
        active.view(torch.int8),
        move,
        *vectors,
        VECTORS=vectors.remembered.numel() // vectors.candidate.numel(),
        BLOCK=BLOCK,
    )
