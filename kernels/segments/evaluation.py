"""The numbers of an evaluation in all segments, from the sums of a segmented half-step.

`engine.quasi_newton_kernels.KernelVectors` calls the three functions, one after the other, in every
evaluation; `segmented_softmin` only where columns are not rows. One program per block of rows or
columns of a segment; blocks are fixed within a segment, so that the order of additions depends on
nothing but the segment.

`segmented_softmin` makes potentials of rows and their sums, or takes a finished softmin:

    f_i = -epsilon ln(2) (h_i + log2 sum_k s_ki 2^(h_ki - h_i)),    h_i = max_k h_ki

over the ranges k of a row's columns, in float64, and two sums per segment: <a, f> and <a, |f|> of
the f that are stored, in float32.

With relaxed marginals (`formulas.marginals`) this f_i is divided by 1 + epsilon / rho, and the sums
are <a, phi(f)>, <a, |f|> and <a, e^(-f / rho)>. Every segment has 1 / rho of its rows and of its
columns, which is 0 for an exact marginal.

`segmented_evaluation` makes the numbers of the potentials g of columns. With T'_j merged from the
ranges in the same way, the residual r_j = T'_j - g_j is stored, in float32. With g° and r°, the
potentials kept last and their residual, s = g - g° is the step and y = r° - r the residual
difference. With <u, v> = sum_j b_j u_j v_j and c_j = exp((g_j - T'_j) / epsilon), in float64, every
segment gets these numbers:

    <1, g>, <1, |g|>, min g, max g, <1, |c - 1|>, <1, c>,
    <1, s>, <1, y>, <1, r>, <s, s>, <s, y>, <y, y>, <s, r>, <y, r>,

and the products of each remembered vector with y, then with r. They are those of
`formulas.evidence.Evaluation` from <1, g> on; `segmented_decision` reads them by their places, so a
change of their order must be made there too.

With relaxed marginals T'_j is divided by 1 + epsilon / rho in r, but not in c. <1, phi(g)> takes
the place of <1, g>. With q = e^(-g / rho), the target sums of columns per mass, <1, |c - q|>
takes that of <1, |c - 1|>. Three numbers follow <y, r>: <1, q>; the gain of the dual value by the
update of columns, less epsilon (<1, c> - 1); and <1, q> of the updated potentials.
`segmented_decision` makes the translation that follows from these. A segment of m columns has 2
memory rows of m remembered numbers.

`segmented_totals` adds up the numbers of blocks to those of whole segments, always in the same
order.

Shapes: partial numbers (P, 2) of rows and (P', 14 + 4 memory) of columns, the third and fourth of
which are a minimum and a maximum; totals (S, 2) and (S, 14 + 4 memory), all float64. With relaxed
marginals there are 3 and 17 + 4 memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

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


# Blocks that are added up at once.
BLOCKS_AT_ONCE = 16
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
    """The first of `blocks` (P, 2) of each of `count` segments, and the end of all (S + 1,)."""
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
        column_blocks: (S + 1,) int64, of `first_blocks`.
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
        BLOCK=BLOCKS_AT_ONCE,
    )
    return row_totals, column_totals
