"""From the sums of a segmented half-step to the numbers of an evaluation of the potentials g.

With T'_j merged from the ranges as in `segmented_softmin`, the residual r_j = T'_j - g_j is stored,
in float32. With the step s = g - g° and the residual difference y = r° - r from the potentials kept
last, every segment gets the numbers of `formulas.evidence.Evaluation` from <1, g> on, of float64:
with <u, v> = sum_j b_j u_j v_j and c_j = exp(-r_j / epsilon) of the residual before its rounding,

    <1, g>, <1, |g|>, min g, max g, <1, |c - 1|>, <1, c>,
    <1, s>, <1, y>, <1, r>, <s, s>, <s, y>, <y, y>, <s, r>, <y, r>,

and the products of each remembered vector with y, then with r.

Of relaxed marginals (`formulas.marginals`) T'_j is over 1 + epsilon / rho in r, <1, phi(g)> takes
the place of <1, g>, and with what columns owe, q = e^(-g / rho), <1, |c - q|> that of <1, |c - 1|>.
After <y, r> come <1, q>, what the update of columns adds to the dual value, less epsilon
(<1, c> - 1), and <1, q> of the updated potentials. The translation that follows from these is left
to `segmented_decision`.

`engine.quasi_newton_kernels.KernelVectors` calls it after `segmented_softmin`. One program per
block of columns of a segment; `segmented_totals` adds the blocks up. A segment of m
columns has 2 memory rows of m remembered numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.segments.softmin import BLOCK, LN_2, dual_of, merged_softmin
from otdd_flash.kernels.segments.step import Sums

# Numbers of a segment without those of remembered vectors, and of one with relaxed marginals.
NUMBERS = 14
RELAXED_NUMBERS = 17


class Vectors(NamedTuple):
    """Vectors of the columns of all segments, float32, in units of the cost.

    Attributes:
        candidate: (entries,) potentials to evaluate.
        fresh: (entries,) their residuals.
        kept: (entries,) the potentials kept last.
        residual: (entries,) their residuals.
        level: (entries,) the potentials at which the last level of epsilon ended.
        remembered: (2 memory entries,) steps of potentials, then residual differences.
    """

    candidate: Tensor
    fresh: Tensor
    kept: Tensor
    residual: Tensor
    level: Tensor
    remembered: Tensor

    @classmethod
    def at(cls, candidate: Tensor, memory: int) -> Vectors:
        """Return the vectors before the first evaluation, at a candidate."""
        every = candidate.new_zeros((4 + 2 * memory, len(candidate)))
        fresh, kept, residual, level = every[:4]
        return cls(candidate, fresh, kept, residual, level, every[4:].view(-1))

    @property
    def vectors(self) -> int:
        """The number of remembered vectors."""
        return self.remembered.numel() // self.candidate.numel()


@on_its_device
@triton.jit
def segmented_evaluation_kernel(
    highest_ptr,  # (partial entries,) float32; the softmin (entries,) float32 unless MERGED
    sums_ptr,  # (partial entries,) float64
    masses_ptr,  # (n,) float64
    blocks_ptr,  # (programs, 2) int32: segment, and which of its blocks
    segments_ptr,  # (S, 8) int64, columns as rows
    active_ptr,  # (S,) int8
    epsilon_ptr,  # (S,) float64
    softness_ptr,  # (S, 2) float64, read if RELAXED
    candidate_ptr,  # (entries,) float32
    fresh_ptr,  # (entries,) float32, overwritten
    kept_ptr,  # (entries,) float32
    residual_ptr,  # (entries,) float32
    remembered_ptr,  # (VECTORS entries,) float32
    partial_ptr,  # (programs, NUMBERS + 2 VECTORS) float64
    LN_2: tl.constexpr,
    MERGED: tl.constexpr,
    RELAXED: tl.constexpr,
    NUMBERS: tl.constexpr,
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
    epsilon = tl.load(epsilon_ptr + i_segment)
    o_column = tl.load(blocks_ptr + 2 * i_program + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < tl.where(tl.load(active_ptr + i_segment) != 0, columns, 0)
    if MERGED:
        updated = merged_softmin(
            highest_ptr, sums_ptr, p_segment, o_column, m_column, epsilon, LN_2, BLOCK
        )
    else:
        updated = tl.load(highest_ptr + o_column, mask=m_column, other=0.0).to(tl.float64)
    potential = tl.load(candidate_ptr + offset + o_column, mask=m_column, other=0.0)
    kept = tl.load(kept_ptr + offset + o_column, mask=m_column, other=0.0)
    before = tl.load(residual_ptr + offset + o_column, mask=m_column, other=0.0)
    # Not yet rounded to what is stored.
    exact = updated - potential.to(tl.float64)
    if RELAXED:
        softness = tl.load(softness_ptr + 2 * i_segment + 1)
        fresh = (updated / (1 + epsilon * softness) - potential.to(tl.float64)).to(tl.float32)
    else:
        fresh = exact.to(tl.float32)
    tl.store(fresh_ptr + offset + o_column, fresh, mask=m_column)
    # Columns past the end have no mass.
    masses = tl.load(masses_ptr + start + o_column, mask=m_column, other=0.0)
    m_mass = masses > 0
    change = tl.exp(tl.where(m_mass, -exact / epsilon, 0.0))
    value = tl.where(m_mass, potential, 0.0).to(tl.float64)
    residual = tl.where(m_mass, fresh, 0.0).to(tl.float64)
    step = tl.where(m_mass, potential - kept, 0.0).to(tl.float64)
    difference = tl.where(m_mass, before - fresh, 0.0).to(tl.float64)
    p_partial = partial_ptr + (NUMBERS + 2 * VECTORS) * i_program.to(tl.int64)
    if RELAXED:
        dual, owed = dual_of(value, softness)
        after, left = dual_of(value + residual, softness)
        raised = after - dual - epsilon * (left - 1)
        tl.store(p_partial, tl.sum(masses * dual, 0))
        tl.store(p_partial + 4, tl.sum(masses * tl.abs(change - owed), 0))
        tl.store(p_partial + 14, tl.sum(masses * owed, 0))
        tl.store(p_partial + 15, tl.sum(masses * raised, 0))
        tl.store(p_partial + 16, tl.sum(masses * left, 0))
    else:
        tl.store(p_partial, tl.sum(masses * value, 0))
        tl.store(p_partial + 4, tl.sum(masses * tl.abs(change - 1), 0))
    tl.store(p_partial + 1, tl.sum(masses * tl.abs(value), 0))
    lowest = tl.min(tl.where(m_mass, value, float("inf")), 0)
    highest = tl.max(tl.where(m_mass, value, -float("inf")), 0)
    tl.store(p_partial + 2, lowest)
    tl.store(p_partial + 3, highest)
    tl.store(p_partial + 5, tl.sum(masses * change, 0))
    tl.store(p_partial + 6, tl.sum(masses * step, 0))
    tl.store(p_partial + 7, tl.sum(masses * difference, 0))
    tl.store(p_partial + 8, tl.sum(masses * residual, 0))
    tl.store(p_partial + 9, tl.sum(masses * step * step, 0))
    tl.store(p_partial + 10, tl.sum(masses * step * difference, 0))
    tl.store(p_partial + 11, tl.sum(masses * difference * difference, 0))
    tl.store(p_partial + 12, tl.sum(masses * step * residual, 0))
    tl.store(p_partial + 13, tl.sum(masses * difference * residual, 0))
    o_vector = tl.arange(0, VECTORS)
    p_remembered = remembered_ptr + VECTORS * offset
    p_remembered += o_vector[:, None] * columns + o_column[None, :]
    remembered = tl.load(p_remembered, mask=m_column[None, :], other=0.0).to(tl.float64)
    p_products = p_partial + NUMBERS + o_vector
    tl.store(p_products, tl.sum(remembered * (masses * difference)[None, :], 1))
    tl.store(p_products + VECTORS, tl.sum(remembered * (masses * residual)[None, :], 1))


def segmented_evaluation(
    softmin: Sums | Tensor,
    masses: Tensor,
    blocks: Tensor,
    table: Tensor,
    active: Tensor,
    epsilon: Tensor,
    vectors: Vectors,
    softness: Tensor | None = None,
) -> Tensor:
    """The numbers of evaluations of all active segments, by blocks of columns.

    Args:
        softmin: sums of `segmented_step`, or of a single segment the softmin (m,) float32 itself.
        masses: (n,) float64, of the pool.
        blocks: (P, 2) int32, of `blocks_of`.
        table: (S, 8) int64, as for `segmented_step`, with the columns as rows.
        active: (S,) bool, segments to work on.
        epsilon: (S,) float64, in units of the cost.
        vectors: of the columns; `fresh` is overwritten.
        softness: (S, 2) float64, 1 / rho of rows and of columns; None where all are exact.

    Returns:
        (P, 14 + 4 memory) float64, or (P, 17 + 4 memory), the numbers above; unspecified for
        segments that are not active.
    """
    numbers = NUMBERS if softness is None else RELAXED_NUMBERS
    partial = masses.new_empty((len(blocks), numbers + 2 * vectors.vectors))
    merged = isinstance(softmin, Sums)
    segmented_evaluation_kernel[(len(blocks),)](
        *(softmin if merged else (softmin, partial)),
        masses,
        blocks,
        table,
        active.view(torch.int8),
        epsilon,
        epsilon if softness is None else softness,
        vectors.candidate,
        vectors.fresh,
        vectors.kept,
        vectors.residual,
        vectors.remembered,
        partial,
        LN_2=LN_2,
        MERGED=merged,
        RELAXED=softness is not None,
        NUMBERS=numbers,
        VECTORS=vectors.vectors,
        BLOCK=BLOCK,
    )
    return partial
