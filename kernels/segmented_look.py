"""From the sums of a segmented half-step to what a look at potentials g of columns has seen.

With T'_j merged from the ranges as in `segmented_softmin`, the residual r_j = T'_j - g_j is stored,
in float32. With the step s = g - g° and the fall y = r° - r from the potentials kept last, every
segment gets the numbers of `operators.segments.Look` from <1, g> on, of float64: with <u, v> =
sum_j b_j u_j v_j and c_j = exp(-r_j / epsilon) of the residual that was not rounded yet,

    <1, g>, <1, |g|>, min g, max g, <1, |c - 1|>, <1, c>,
    <1, s>, <1, y>, <1, r>, <s, s>, <s, y>, <y, y>, <s, r>, <y, r>,

and the products of each remembered vector with y, then with r.

One program per segment reads its columns in fixed blocks, so that the order of additions depends on
nothing but the segment. A segment of m columns has 2 MEMORY rows of m remembered numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.segmented_softmin import LN_2, merged_softmin
from otdd_flash.kernels.segmented_step import Sums

BLOCK = 256
# Numbers of a segment without those of remembered vectors.
NUMBERS = 14


class Vectors(NamedTuple):
    """Vectors of the columns of all segments, float32, in units of the cost.

    Attributes:
        candidate: (entries,) potentials to look at.
        fresh: (entries,) their residuals.
        kept: (entries,) the potentials kept last.
        residual: (entries,) their residuals.
        remembered: (2 memory entries,) differences of potentials, then falls of residuals.
    """

    candidate: Tensor
    fresh: Tensor
    kept: Tensor
    residual: Tensor
    remembered: Tensor


@triton.jit
def segmented_look_kernel(
    highest_ptr,  # (partial entries,) float32
    sums_ptr,  # (partial entries,) float64
    masses_ptr,  # (n,) float64
    segments_ptr,  # (S, 8) int64, columns as rows
    active_ptr,  # (S,) int8
    epsilon_ptr,  # (S,) float64
    candidate_ptr,  # (entries,) float32
    fresh_ptr,  # (entries,) float32, overwritten
    kept_ptr,  # (entries,) float32
    residual_ptr,  # (entries,) float32
    remembered_ptr,  # (VECTORS entries,) float32
    seen_ptr,  # (S, NUMBERS + 2 VECTORS) float64
    LN_2: tl.constexpr,
    NUMBERS: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per segment."""
    i_segment = tl.program_id(0).to(tl.int64)
    p_segment = segments_ptr + 8 * i_segment
    start, columns, offset = (
        tl.load(p_segment), tl.load(p_segment + 1), tl.load(p_segment + 2)
    )  # fmt: skip
    epsilon = tl.load(epsilon_ptr + i_segment)
    blocks = tl.where(tl.load(active_ptr + i_segment) != 0, tl.cdiv(columns, BLOCK), 0)
    o_vector = tl.arange(0, VECTORS)[:, None] * columns  # (VECTORS, 1)

    value = tl.zeros((BLOCK,), tl.float64)
    size = tl.zeros((BLOCK,), tl.float64)
    gap = tl.zeros((BLOCK,), tl.float64)
    mass = tl.zeros((BLOCK,), tl.float64)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    mean_step = tl.zeros((BLOCK,), tl.float64)
    mean_fall = tl.zeros((BLOCK,), tl.float64)
    mean_residual = tl.zeros((BLOCK,), tl.float64)
    step_step = tl.zeros((BLOCK,), tl.float64)
    step_fall = tl.zeros((BLOCK,), tl.float64)
    fall_fall = tl.zeros((BLOCK,), tl.float64)
    step_residual = tl.zeros((BLOCK,), tl.float64)
    fall_residual = tl.zeros((BLOCK,), tl.float64)
    remembered_fall = tl.zeros((VECTORS,), tl.float64)
    remembered_residual = tl.zeros((VECTORS,), tl.float64)
    for i_block in range(blocks):
        o_column = i_block * BLOCK + tl.arange(0, BLOCK)
        m_column = o_column < columns
        updated = merged_softmin(
            highest_ptr, sums_ptr, p_segment, o_column, m_column, epsilon, LN_2, BLOCK
        )
        potential = tl.load(candidate_ptr + offset + o_column, mask=m_column, other=0.0)
        kept = tl.load(kept_ptr + offset + o_column, mask=m_column, other=0.0)
        before = tl.load(residual_ptr + offset + o_column, mask=m_column, other=0.0)
        # Not yet rounded to what is stored.
        exact = tl.where(m_column, updated - potential.to(tl.float64), 0.0)
        fresh = exact.to(tl.float32)
        tl.store(fresh_ptr + offset + o_column, fresh, mask=m_column)
        # Columns past the end have no mass.
        masses = tl.load(masses_ptr + start + o_column, mask=m_column, other=0.0)
        change = tl.exp(-exact / epsilon)
        value += masses * potential
        size += masses * tl.abs(potential)
        gap += masses * tl.abs(change - 1)
        mass += masses * change
        lowest = tl.minimum(lowest, tl.where(m_column, potential, float("inf")))
        highest = tl.maximum(highest, tl.where(m_column, potential, -float("inf")))
        residual = fresh.to(tl.float64)
        step, fall = (potential - kept).to(tl.float64), (before - fresh).to(tl.float64)
        mean_step += masses * step
        mean_fall += masses * fall
        mean_residual += masses * residual
        step_step += masses * step * step
        step_fall += masses * step * fall
        fall_fall += masses * fall * fall
        step_residual += masses * step * residual
        fall_residual += masses * fall * residual
        p_remembered = remembered_ptr + VECTORS * offset + o_vector + o_column[None, :]
        remembered = tl.load(p_remembered, mask=m_column[None, :], other=0.0).to(tl.float64)
        remembered_fall += tl.sum(remembered * (masses * fall)[None, :], 1)
        remembered_residual += tl.sum(remembered * (masses * residual)[None, :], 1)
    p_seen = seen_ptr + (NUMBERS + 2 * VECTORS) * i_segment
    tl.store(p_seen, tl.sum(value, 0))
    tl.store(p_seen + 1, tl.sum(size, 0))
    tl.store(p_seen + 2, tl.min(lowest, 0).to(tl.float64))
    tl.store(p_seen + 3, tl.max(highest, 0).to(tl.float64))
    tl.store(p_seen + 4, tl.sum(gap, 0))
    tl.store(p_seen + 5, tl.sum(mass, 0))
    tl.store(p_seen + 6, tl.sum(mean_step, 0))
    tl.store(p_seen + 7, tl.sum(mean_fall, 0))
    tl.store(p_seen + 8, tl.sum(mean_residual, 0))
    tl.store(p_seen + 9, tl.sum(step_step, 0))
    tl.store(p_seen + 10, tl.sum(step_fall, 0))
    tl.store(p_seen + 11, tl.sum(fall_fall, 0))
    tl.store(p_seen + 12, tl.sum(step_residual, 0))
    tl.store(p_seen + 13, tl.sum(fall_residual, 0))
    p_products = p_seen + NUMBERS + tl.arange(0, VECTORS)
    tl.store(p_products, remembered_fall)
    tl.store(p_products + VECTORS, remembered_residual)


def segmented_look(
    partial: Sums,
    masses: Tensor,
    table: Tensor,
    active: Tensor,
    epsilon: Tensor,
    vectors: Vectors,
) -> Tensor:
    """What looks at the candidates of all active segments have seen.

    Args:
        partial: of `segmented_step` for the columns.
        masses: (n,) float64, of the pool.
        table: (S, 8) int64, as for `segmented_step`, with the columns as rows.
        active: (S,) bool, segments to work on.
        epsilon: (S,) float64, in units of the cost.
        vectors: of the columns; `fresh` is overwritten.

    Returns:
        (S, 14 + 4 memory) float64, the numbers above; void for segments that are not active.
    """
    count = vectors.remembered.numel() // vectors.candidate.numel()
    seen = masses.new_empty((len(table), NUMBERS + 2 * count))
    segmented_look_kernel[(len(table),)](
        *partial,
        masses,
        table,
        active.view(torch.int8),
        epsilon,
        *vectors,
        seen,
        LN_2=LN_2,
        NUMBERS=NUMBERS,
        VECTORS=count,
        BLOCK=BLOCK,
    )
    return seen
