"""The Sinkhorn half-step for a cost matrix in memory, along its rows and along its columns.

    f_i = -epsilon ln(2) (h_i + log2 s_i),    h_i + log2 s_i = log2 sum_j 2^(x_ij log2(e) / epsilon)
    x_ij = u_j - C_ij,    u_j = g_j + epsilon log b_j,

and the same with rows and columns exchanged. u is computed in float64 and rounded once; x is
rounded like a cost. The logit of x is its product with log2(e) / epsilon, a sum of two float32,
less the highest logit, rounded up to a whole number. Both are fused multiply-adds, so a logit near
the highest is small, and so is its rounding. An entry of +inf adds nothing.

C is read once per pass, in tiles of contiguous entries of rows: by ranges of columns in a pass
along rows, by groups of rows in a pass along columns. Lanes keep maxima and sums of their own until
the end of the range or group. Additions must have one order, so that every run gives the same bits.
`operators.matrix_kernel` gets potentials from `matrix_half_step`, which merges the partial (h, s)
in float64, and partial sums from `matrix_sums_of_lines`, which the engine merges by
`segmented_softmin` and `segmented_evaluation`. `sweep` uses the device functions, `sums` the number
of programs.

Memory: 12 bytes per row and range, or per column and group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import LN_2, LOG2_E, on_its_device
from otdd_flash.kernels.segments.step import Sums

# Rows and columns of a tile, as (rows, strips, lanes): of passes along rows and along columns.
ROW_TILE, COLUMN_TILE = (2, 4, 512), (8, 512)

WARPS = 4

# Programs that a card should have at the least: four of each of 132 multiprocessors.
PROGRAMS = 528

# Points of a program that merges or prepares.
BLOCK = 128

# In place of the maximum and the sum where nothing was added: below every logit, and so small a
# number that it counts for nothing beside others, yet makes a finite potential alone.
LOWEST, NOTHING = tl.constexpr(-1e29), tl.constexpr(2.0**-1000)


@on_its_device
@triton.jit
def matrix_bias_kernel(
    potential_ptr,  # (n,) float32
    log_masses_ptr,  # (n,) float64, natural logarithms
    epsilon_ptr,  # () float64
    out_ptr,  # (n,) float32
    n,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK points: their potential and mass as one number."""
    o_point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_point = o_point < n
    logs = tl.load(log_masses_ptr + o_point, mask=m_point, other=0.0)
    potential = tl.load(potential_ptr + o_point, mask=m_point, other=0.0).to(tl.float64)
    bias = (potential + tl.load(epsilon_ptr) * logs).to(tl.float32)
    # A point without mass takes no part, whatever its potential is.
    tl.store(out_ptr + o_point, tl.where(logs == -float("inf"), logs, bias), mask=m_point)


@triton.jit
def load_factor(epsilon_ptr):
    """log2(e) / epsilon as the sum of two float32."""
    exact = tl.full((), LOG2_E, tl.float64) / tl.load(epsilon_ptr)
    scale = exact.to(tl.float32)
    return scale, (exact - scale.to(tl.float64)).to(tl.float32)


@triton.jit
def add_scores(scores, highest, sums, scale, rest, AXIS: tl.constexpr):
    """Maxima and sums of lanes after one more tile of scores, which has one more axis."""
    raised = tl.maximum(highest, tl.max(tl.ceil(scores * scale), AXIS))
    top = tl.expand_dims(raised, AXIS)
    # Above 0 by rounding alone, and far above it where logits exceed 2^24.
    logits = tl.minimum(tl.fma(scores, rest, tl.fma(scores, scale, -top)), 1.0)
    terms = tl.where(scores > -float("inf"), tl.exp2(logits), 0.0)
    return raised, sums * tl.exp2(highest - raised) + tl.sum(terms, AXIS)


@on_its_device
@triton.jit
def matrix_rows_kernel(
    costs_ptr,  # (n, m), columns contiguous
    stride,
    bias_ptr,  # (m,) float32
    epsilon_ptr,  # () float64
    highest_ptr,  # (ranges, n) float32
    sums_ptr,  # (ranges, n) float64
    n,
    m,
    columns_per_range,
    ROWS: tl.constexpr,
    STRIPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per ROWS rows and range of columns."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < n
    start = tl.program_id(1) * columns_per_range
    stop = tl.minimum(start + columns_per_range, m)
    scale, rest = load_factor(epsilon_ptr)
    o_lane = tl.arange(0, STRIPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    p_row = costs_ptr + o_row * stride
    highest = tl.full((ROWS, LANES), LOWEST, tl.float32)
    sums = tl.zeros((ROWS, LANES), tl.float32)
    for column in range(start, stop, STRIPS * LANES):
        o_column = column + o_lane  # (STRIPS, LANES)
        m_column = o_column < stop
        bias = tl.load(bias_ptr + o_column, mask=m_column, other=-float("inf"))
        m_tile = m_row[:, None, None] & m_column[None, :, :]
        costs = tl.load(p_row[:, None, None] + o_column[None, :, :], mask=m_tile, other=0.0)
        scores = bias[None, :, :] - costs.to(tl.float32)  # (ROWS, STRIPS, LANES)
        highest, sums = add_scores(scores, highest, sums, scale, rest, 1)
    top = tl.max(highest, 1)
    total = tl.sum((sums * tl.exp2(highest - top[:, None])).to(tl.float64), 1)
    o_out = tl.program_id(1).to(tl.int64) * n + o_row
    tl.store(highest_ptr + o_out, top, mask=m_row)
    tl.store(sums_ptr + o_out, tl.maximum(total, NOTHING), mask=m_row)


@on_its_device
@triton.jit
def matrix_columns_kernel(
    costs_ptr,  # (n, m), columns contiguous
    stride,
    bias_ptr,  # (n,) float32
    epsilon_ptr,  # () float64
    highest_ptr,  # (groups, m) float32
    sums_ptr,  # (groups, m) float64
    n,
    m,
    rows_per_group,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per LANES columns and group of contiguous rows."""
    o_column = tl.program_id(0) * LANES + tl.arange(0, LANES)
    m_column = o_column < m
    start = tl.program_id(1) * rows_per_group
    stop = tl.minimum(start + rows_per_group, n)
    scale, rest = load_factor(epsilon_ptr)
    highest = tl.full((LANES,), LOWEST, tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    for row in range(start, stop, ROWS):
        o_row = row + tl.arange(0, ROWS)
        m_row = o_row < stop
        bias = tl.load(bias_ptr + o_row, mask=m_row, other=-float("inf"))
        p_row = costs_ptr + o_row.to(tl.int64) * stride
        m_tile = m_row[:, None] & m_column[None, :]
        costs = tl.load(p_row[:, None] + o_column[None, :], mask=m_tile, other=0.0)
        scores = bias[:, None] - costs.to(tl.float32)  # (ROWS, LANES)
        highest, sums = add_scores(scores, highest, sums, scale, rest, 0)
    o_out = tl.program_id(1).to(tl.int64) * m + o_column
    tl.store(highest_ptr + o_out, highest, mask=m_column)
    tl.store(sums_ptr + o_out, tl.maximum(sums.to(tl.float64), NOTHING), mask=m_column)


@on_its_device
@triton.jit
def matrix_merge_kernel(
    highest_ptr,  # (parts, n) float32
    sums_ptr,  # (parts, n) float64
    epsilon_ptr,  # () float64
    out_ptr,  # (n,) float32
    n,
    parts,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK points: their potentials."""
    o_point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_point = o_point < n
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float64)
    o_part = o_point
    for _ in range(parts):
        part = tl.load(highest_ptr + o_part, mask=m_point, other=LOWEST)
        added = tl.load(sums_ptr + o_part, mask=m_point, other=1.0)
        raised = tl.maximum(top, part)
        # Differences of whole numbers that float32 holds, or of what is next to nothing.
        low, high = (top - raised).to(tl.float64), (part - raised).to(tl.float64)
        sums = sums * tl.exp2(low) + added * tl.exp2(high)
        top = raised
        o_part += n
    potential = -tl.load(epsilon_ptr) * LN_2 * (top.to(tl.float64) + tl.log2(sums))
    tl.store(out_ptr + o_point, potential.to(tl.float32), mask=m_point)


def matrix_half_step(
    costs: Tensor,
    log_masses: Tensor,
    potential: Tensor,
    epsilon: Tensor,
    *,
    columns: bool = False,
) -> Tensor:
    """The softmin of all rows (n,) float32 for a potential of the columns, in units of the cost.

    With `columns`, that of all columns (m,) for a potential of the rows. Arguments as for
    `matrix_sums_of_lines`.
    """
    highest, sums = matrix_sums_of_lines(costs, log_masses, potential, epsilon, columns=columns)
    points = costs.shape[1 if columns else 0]
    out = torch.empty(points, dtype=torch.float32, device=costs.device)
    matrix_merge_kernel[(triton.cdiv(points, BLOCK),)](
        highest, sums, epsilon, out, points, len(highest) // points, BLOCK=BLOCK
    )
    return out


def matrix_sums_of_lines(
    costs: Tensor,
    log_masses: Tensor,
    potential: Tensor,
    epsilon: Tensor,
    *,
    columns: bool = False,
) -> Sums:
    """Partial (h, s) of all rows, range by range, or with `columns`, of columns by groups.

    Args:
        costs: C (n, m) of float16, bfloat16 or float32; a row is contiguous.
        log_masses: (m,) float64, log b; with `columns` (n,), log a.
        potential: (m,) float32, g; with `columns` (n,), f. Not read where there is no mass.
        epsilon: () float64, in units of the cost.
        columns: sum columns instead of rows.
    """
    (n, m), size = costs.shape, len(log_masses)
    bias = torch.empty_like(log_masses, dtype=torch.float32)
    matrix_bias_kernel[(triton.cdiv(size, BLOCK),)](
        potential, log_masses, epsilon, bias, size, BLOCK=BLOCK
    )
    parts, length = line_parts((n, m), columns=columns)
    entries = parts * (m if columns else n)
    found = Sums(
        torch.empty(entries, dtype=torch.float32, device=costs.device),
        torch.empty(entries, dtype=torch.float64, device=costs.device),
    )
    given = costs, costs.stride(0), bias, epsilon, *found, n, m, length
    if columns:
        rows, lanes = COLUMN_TILE
        matrix_columns_kernel[(triton.cdiv(m, lanes), parts)](
            *given, ROWS=rows, LANES=lanes, num_warps=WARPS
        )
    else:
        rows, strips, lanes = ROW_TILE
        matrix_rows_kernel[(triton.cdiv(n, rows), parts)](
            *given, ROWS=rows, STRIPS=strips, LANES=lanes, num_warps=WARPS
        )
    return found


def line_parts(shape: tuple[int, int], *, columns: bool) -> tuple[int, int]:
    """How many ranges of columns, or groups of rows, a pass has, and how long they are."""
    n, m = shape
    if columns:
        rows, lanes = COLUMN_TILE
        return parts_of(n, rows, triton.cdiv(PROGRAMS, triton.cdiv(m, lanes)))
    rows, strips, lanes = ROW_TILE
    return parts_of(m, strips * lanes, triton.cdiv(PROGRAMS, triton.cdiv(n, rows)))


def parts_of(length: int, block: int, wanted: int) -> tuple[int, int]:
    """In how many parts to cut a length, and how long they are: whole blocks, none empty."""
    blocks = triton.cdiv(length, block)
    size = triton.cdiv(blocks, min(wanted, blocks)) * block
    return triton.cdiv(length, size), size
