"""Kernels of small problems whose scores are stored: the scores, half-steps and plans.

`operators.kernel_pool` calls them. Scores and potentials of columns without mass must have no
influence, whatever they are. The launches are recorded in CUDA graphs that serve many batches, so
numbers that change with the batch, such as epsilon, are read from the device's memory.

`stored_scores` makes scores of labelled points from their products, and keeps them in both
directions.

    S_ij = -C_ij = lambda_x (2 x_i . y_j - ||x_i||^2 - ||y_j||^2) - lambda_y W[l_i, l_j]

is made in float64 and rounded once. A score is written where rows are those of x and where they are
those of y, so that passes over either read whole rows, and the same number.

`stored_step` is the Sinkhorn half-step of many small transport problems in one launch. For the rows
i and columns j of a segment, a block of a matrix of scores S,

    h_i + log2 s_i = log2 sum_j 2^((S_ij + u_j) log2(e) / epsilon)

with h_i the highest logit of a row, rounded up to a whole number, and u_j = g_j + epsilon log b_j
in float64, rounded once. S_ij + u_j is rounded to float32, like a cost. Its product with log2(e) /
epsilon, a sum of two float32, less h_i, is made by fused multiply-adds: a logit near the highest is
small, and so is its rounding. Every lane keeps a maximum and a sum of its own until the end of its
row.

One program owns a block of rows of a segment and all of its columns; a segment that is not active
ends at once. The engine turns the sums into potentials by `segmented_softmin` and
`segmented_evaluation`.

Plans over the stored scores S = -C of B problems have row sums, products of scores, and entries:

    stored_plan      sum_j b_j exp((f_i + g_j + S_ij) / epsilon)
    stored_product   sum_j S_ij q_j
    signed_plan      Q_ij = sign_ij a_i a_j exp((k_i + k_j + S_ij) / epsilon)

The first two are between the two sides of one term, in float64: `operators.kernel_pool.PooledTerm`
reads them for certificates. The last is over all points of a problem, those of x before those of y,
with their masses a. Between x and y the sign is 1 and k are the potentials of the cross term; among
the points of one side it is -1 and k are the potentials of the self terms, or 0 where there are no
self terms. `solver.small.pooled_solve` multiplies Q by the points for gradients of a divergence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.segments.step import LOG2_E, ROWS, Sums

# Rows and columns of a tile.
BLOCK = 32


@on_its_device
@triton.jit
def stored_scores_kernel(
    products_ptr,  # (B, rows, columns) float64, x_i . y_j
    row_squares_ptr,  # (B, .) float64, from the first row on
    column_squares_ptr,  # (B, .) float64
    row_labels_ptr,  # (B, .) int64
    column_labels_ptr,  # (B, .) int64
    class_costs_ptr,  # (B, classes, classes) float64
    lambda_x_ptr,  # (1,) float64
    scores_ptr,  # float32, of the first row and column; overwritten
    transposed_ptr,  # float32, of the first column and row; overwritten
    rows,
    columns,
    points,  # of a problem, the stride of squares, of labels and of scores
    classes,
    SYMMETRIC: tl.constexpr,  # the first row is the first column
    BLOCK: tl.constexpr,
):
    """One program per tile of a problem; in a symmetric one, those from the diagonal on."""
    i_row, i_column = tl.program_id(0), tl.program_id(1)
    i_problem = tl.program_id(2).to(tl.int64)
    if SYMMETRIC and i_column < i_row:
        return
    o_row, o_column = i_row * BLOCK + tl.arange(0, BLOCK), i_column * BLOCK + tl.arange(0, BLOCK)
    m_row, m_column = o_row < rows, o_column < columns
    m_tile = m_row[:, None] & m_column[None, :]
    if SYMMETRIC:
        # Each number once: two products of the same points may differ in their last bits.
        m_tile = m_tile & (o_row[:, None] <= o_column[None, :])
    o_point = i_problem * points
    p_products = products_ptr + (i_problem * rows + o_row[:, None]) * columns + o_column[None, :]
    products = tl.load(p_products, mask=m_tile, other=0.0)
    x = tl.load(row_squares_ptr + o_point + o_row, mask=m_row, other=0.0)
    y = tl.load(column_squares_ptr + o_point + o_column, mask=m_column, other=0.0)
    k = tl.load(row_labels_ptr + o_point + o_row, mask=m_row, other=0)
    l = tl.load(column_labels_ptr + o_point + o_column, mask=m_column, other=0)  # noqa: E741
    p_costs = class_costs_ptr + i_problem * classes * classes
    costs = tl.load(p_costs + k[:, None] * classes + l[None, :], mask=m_tile, other=0.0)
    scores = tl.load(lambda_x_ptr) * (2 * products - (x[:, None] + y[None, :])) - costs
    scores = scores.to(tl.float32)
    o_scores = i_problem * points * points
    p_scores = scores_ptr + o_scores + o_row[:, None].to(tl.int64) * points + o_column[None, :]
    tl.store(p_scores, scores, mask=m_tile)
    p_back = transposed_ptr + o_scores + o_column[None, :].to(tl.int64) * points + o_row[:, None]
    tl.store(p_back, scores, mask=m_tile)


def stored_scores(
    products: Tensor,
    squares: tuple[Tensor, Tensor],
    labels: tuple[Tensor, Tensor],
    class_costs: Tensor,
    lambda_x: Tensor,
    scores: tuple[Tensor, Tensor],
    *,
    symmetric: bool,
) -> None:
    """Write the scores of B problems between some of their points.

    Args:
        products: (B, r, c) float64, contiguous.
        squares: ||x_i||^2 (B, r) and ||y_j||^2 (B, c), float64, rows of larger tensors.
        labels: (B, r) and (B, c) int64, rows of larger tensors.
        class_costs: (B, V, V) float64, lambda_y W.
        lambda_x: (1,) float64.
        scores: (B, r, c) and (B, c, r) float32, blocks of (B, points, points); overwritten.
        symmetric: whether the first rows are the first columns, and products and scores both are
            from the diagonal of a symmetric matrix on.
    """
    count, rows, columns = products.shape
    grid = (triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK), count)
    stored_scores_kernel[grid](
        products,
        *squares,
        *labels,
        class_costs,
        lambda_x,
        *scores,
        rows,
        columns,
        scores[0].stride(1),
        class_costs.shape[1],
        SYMMETRIC=symmetric,
        BLOCK=BLOCK,
    )


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


BLOCK_ROWS, BLOCK_COLUMNS = 8, 256


@on_its_device
@triton.jit
def stored_plan_kernel(
    scores_ptr,  # (B, rows, columns) float32 of these strides
    problem_stride,
    stride,
    rows,
    columns,
    row_potential_ptr,  # (B, rows) float64
    column_potential_ptr,  # (B, columns) float64
    masses_ptr,  # (B, columns) float64, problems of this stride
    masses_stride,
    epsilon_ptr,  # () float64
    out_ptr,  # (B, rows) float64
    LEAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per block of rows of a problem."""
    i_problem = tl.program_id(1).to(tl.int64)
    o_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < rows
    epsilon = tl.load(epsilon_ptr)
    o_potential, o_masses = i_problem * columns, i_problem * masses_stride
    f = tl.load(row_potential_ptr + i_problem * rows + o_row, mask=m_row, other=0.0)
    p_row = scores_ptr + i_problem * problem_stride + o_row.to(tl.int64) * stride
    sums = tl.zeros((BLOCK_M,), tl.float64)
    for column in range(0, columns, BLOCK_N):
        o_column = column + tl.arange(0, BLOCK_N)
        m_column = o_column < columns
        masses = tl.load(masses_ptr + o_masses + o_column, mask=m_column, other=0.0)
        m_column = masses > 0
        g = tl.load(column_potential_ptr + o_potential + o_column, mask=m_column, other=0.0)
        m_tile = m_row[:, None] & m_column[None, :]
        scores = tl.load(p_row[:, None] + o_column[None, :], mask=m_tile, other=0.0)
        exponents = ((f[:, None] + g[None, :]) + scores.to(tl.float64)) / epsilon
        entries = tl.exp(tl.maximum(exponents, LEAST))
        sums += tl.sum(tl.where(m_tile, masses[None, :] * entries, 0.0), 1)
    tl.store(out_ptr + i_problem * rows + o_row, sums, mask=m_row)


def stored_plan(
    scores: Tensor, f: Tensor, g: Tensor, masses: Tensor, epsilon: Tensor, least: float
) -> Tensor:
    """Compute row sums (B, n) float64 of exp((f_i + g_j + S_ij) / epsilon) b_j.

    Args:
        scores: (B, n, m) float32, rows contiguous.
        f: (B, n) float64, contiguous.
        g: (B, m) float64, contiguous; not read where there is no mass.
        masses: (B, m) float64, b, rows contiguous.
        epsilon: () float64.
        least: exponents are raised to it.
    """
    out = torch.empty_like(f)
    problems, rows, columns = scores.shape
    stored_plan_kernel[(triton.cdiv(rows, BLOCK_ROWS), problems)](
        scores,
        scores.stride(0),
        scores.stride(1),
        rows,
        columns,
        f,
        g,
        masses,
        masses.stride(0),
        epsilon,
        out,
        LEAST=least,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=BLOCK_COLUMNS,
        num_warps=4,
    )
    return out


@on_its_device
@triton.jit
def stored_product_kernel(
    scores_ptr,  # (B, rows, columns) float32 of these strides
    problem_stride,
    stride,
    rows,
    columns,
    masses_ptr,  # (B, columns) float64
    out_ptr,  # (B, rows) float64
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per block of rows of a problem."""
    i_problem = tl.program_id(1).to(tl.int64)
    o_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row, o_masses = o_row < rows, i_problem * columns
    p_row = scores_ptr + i_problem * problem_stride + o_row.to(tl.int64) * stride
    sums = tl.zeros((BLOCK_M,), tl.float64)
    for column in range(0, columns, BLOCK_N):
        o_column = column + tl.arange(0, BLOCK_N)
        masses = tl.load(masses_ptr + o_masses + o_column, mask=o_column < columns, other=0.0)
        m_tile = m_row[:, None] & (masses != 0)[None, :]
        scores = tl.load(p_row[:, None] + o_column[None, :], mask=m_tile, other=0.0)
        sums += tl.sum(scores.to(tl.float64) * masses[None, :], 1)
    tl.store(out_ptr + i_problem * rows + o_row, sums, mask=m_row)


def stored_product(scores: Tensor, masses: Tensor) -> Tensor:
    """Compute S q (B, n) float64 for scores (B, n, m) float32 and q (B, m) float64, contiguous."""
    problems, rows, columns = scores.shape
    out = masses.new_empty((problems, rows))
    stored_product_kernel[(triton.cdiv(rows, BLOCK_ROWS), problems)](
        scores,
        scores.stride(0),
        scores.stride(1),
        rows,
        columns,
        masses,
        out,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=BLOCK_COLUMNS,
        num_warps=4,
    )
    return out


@on_its_device
@triton.jit
def signed_plan_kernel(
    scores_ptr,  # (B, points, points) float32
    cross_ptr,  # (B, points) float32, potentials of the cross term
    own_ptr,  # (B, points) float32, of the self terms, read if OWN
    masses_ptr,  # (B, points) float64
    epsilon_ptr,  # () float64
    out_ptr,  # (B, rows, points) float32
    first,
    rows,
    points,
    n,
    OWN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per tile of a problem."""
    i_problem = tl.program_id(2).to(tl.int64)
    p_cross, p_own = cross_ptr + i_problem * points, own_ptr + i_problem * points
    p_masses = masses_ptr + i_problem * points
    o_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i_row, o_column = first + o_row, tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_row, m_column = o_row < rows, o_column < points
    within = (i_row < n)[:, None] == (o_column < n)[None, :]
    a = tl.load(p_masses + i_row, mask=m_row, other=0.0)
    b = tl.load(p_masses + o_column, mask=m_column, other=0.0)
    f = tl.load(p_cross + i_row, mask=m_row, other=0.0).to(tl.float64)
    g = tl.load(p_cross + o_column, mask=m_column, other=0.0).to(tl.float64)
    potentials = f[:, None] + g[None, :]
    if OWN:
        f = tl.load(p_own + i_row, mask=m_row, other=0.0).to(tl.float64)
        g = tl.load(p_own + o_column, mask=m_column, other=0.0).to(tl.float64)
        potentials = tl.where(within, f[:, None] + g[None, :], potentials)
    m_tile = m_row[:, None] & m_column[None, :]
    o_scores = i_problem * points * points + i_row[:, None].to(tl.int64) * points
    p_scores = scores_ptr + o_scores + o_column[None, :]
    scores = tl.load(p_scores, mask=m_tile, other=0.0).to(tl.float64)
    m_plan = (a > 0)[:, None] & (b > 0)[None, :]
    exponents = tl.where(m_plan, (potentials + scores) / tl.load(epsilon_ptr), 0.0)
    entries = (a[:, None] * b[None, :]).to(tl.float32) * tl.exp(exponents.to(tl.float32))
    sign = tl.where(within, -1.0 if OWN else 0.0, 1.0)
    p_out = out_ptr + (i_problem * rows + o_row[:, None]) * points + o_column[None, :]
    tl.store(p_out, tl.where(m_plan, sign * entries, 0.0), mask=m_tile)


def signed_plan(
    scores: Tensor,
    cross: Tensor,
    own: Tensor | None,
    masses: Tensor,
    epsilon: Tensor,
    rows: slice,
    n: int,
) -> Tensor:
    """Compute rows of Q (B, r, points) float32: the cross term's plan less the self terms' plans.

    Args:
        scores: (B, points, points) float32, between the first n points, x, and all others, y.
        cross: (B, points) float32, potentials of the cross term.
        own: (B, points) float32, of the self terms; None leaves their plans 0.
        masses: (B, points) float64, of both sides.
        epsilon: () float64.
        rows: the r rows to compute.
        n: number of points of x.
    """
    problems, points, count = *scores.shape[:2], rows.stop - rows.start
    out = torch.empty((problems, count, points), dtype=torch.float32, device=scores.device)
    grid = (triton.cdiv(count, BLOCK_ROWS), triton.cdiv(points, BLOCK_COLUMNS), problems)
    signed_plan_kernel[grid](
        scores,
        cross,
        cross if own is None else own,
        masses,
        epsilon,
        out,
        rows.start,
        count,
        points,
        n,
        OWN=own is not None,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=BLOCK_COLUMNS,
        num_warps=4,
    )
    return out
