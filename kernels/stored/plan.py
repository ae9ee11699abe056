"""Plans over the stored scores S = -C of B problems: row sums, products of scores, and entries.

    stored_plan      sum_j b_j exp((f_i + g_j + S_ij) / epsilon)
    stored_product   sum_j S_ij q_j
    signed_plan      Q_ij = sign_ij a_i a_j exp((h_i + h_j + S_ij) / epsilon)

The first two are between the two sides of one term, in float64: `operators.kernel_pool.PooledTerm`
reads them for certificates. The last is over all points of a problem, those of x before those of y,
with their masses a. Between x and y the sign is 1 and h are the potentials of the cross term; among
the points of one side it is -1 and h are the potentials of the self terms, or 0 where there are no
self terms. `solver.small.pooled_solve` multiplies Q by the points for gradients of a divergence.

Scores and potentials of columns without mass have no influence, whatever they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device

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


def stored_plan(
    scores: Tensor, f: Tensor, g: Tensor, masses: Tensor, epsilon: Tensor, least: float
) -> Tensor:
    """Compute row sums (B, n) float64 of exp((f_i + g_j + S_ij) / epsilon) b_j.

    Args:
        scores: (B, n, m) float32, rows contiguous.
        f: (B, n) float64, contiguous.
        g: (B, m) float64, likewise; not read where there is no mass.
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
