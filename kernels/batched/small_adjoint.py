"""Gradients through many small plans in one launch, each by a linear system in registers.

    diag(r) u + P v   = (G o P) 1 + s,        r = P 1
    P^T u + diag(c) v = (G o P)^T 1 + t,      c = P^T 1
    out = P o (G - u 1^T - 1 v^T)

for B plans P (n, m), cotangents G of them, s (n,) of rows and t (m,) of columns. The system is
eliminated and scaled as in `otdd_flash.batched.adjoint`: conjugate gradients on I - A^T A with A =
diag(r)^(-1/2) P diag(c)^(-1/2), of the smaller side, with A applied from the registers that hold P.

One program holds BATCH matrices as a tile (rows, BATCH, columns), padded by rows and columns of 0
to powers of two, and iterates until the last of them has stopped. A matrix that has stopped stays
as it is. Sums have an order that depends on sizes and type alone, so a matrix gets the same bits
among any others. `otdd_flash.batched.adjoint` calls `small_adjoint` with its `LIMITS`, and solves
the same system in PyTorch without Triton. So a change of the system, or of when a matrix stops,
must be made in both (`tests/kernels/test_small_adjoint.py`).

Memory: P and G are read, and `out` is written, once. Of padded matrices of 64 KB and more G is read
twice and P three times, or in float64 twice and at every step. Work: 4 n m operations a step, and
12 n m.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.batched.tiles import (
    Packing,
    batch_of,
    first_rows,
    load_numbers,
    load_tile,
    packing_for,
    padded,
    store_numbers,
    store_tile,
)
from otdd_flash.kernels.launch import on_its_device

# By the bytes of a padded matrix up to which it holds; the fastest without spilled registers of
# those measured on an H200 for 4, 16 and 64 rows in float32; for others the fewest warps that spill
# none. Float64 takes twice the warps where one is not enough.
PACKINGS = {
    1 << 4: Packing(32, 1),
    1 << 6: Packing(16, 1),
    1 << 8: Packing(4, 1),
    1 << 10: Packing(2, 1),
    1 << 12: Packing(1, 1),
    1 << 14: Packing(1, 2),
    1 << 15: Packing(1, 8),
}
# The packing of a larger one, and the bytes of the rows that it loads at once.
LARGER, ROW_BYTES = Packing(1, 8), 1 << 14


@on_its_device
@triton.jit
def small_adjoint_kernel(
    plan_ptr,  # (B, n, m) of any strides
    cotangent_ptr,  # (B, n, m) of any strides
    row_cotangent_ptr,  # (B, n), read if ROW_COTANGENTS
    column_cotangent_ptr,  # (B, m), read if COLUMN_COTANGENTS
    weighted_ptr,  # (B, n, m), rows or columns contiguous
    rows_ptr,  # (B, n), written if SIDES
    columns_ptr,  # (B, m), written if SIDES
    count,
    n,
    m,
    plan_stride,
    plan_row_stride,
    plan_column_stride,
    cotangent_stride,
    cotangent_row_stride,
    cotangent_column_stride,
    weighted_stride,
    weighted_row_stride,
    weighted_column_stride,
    TYPE: tl.constexpr,
    ROW_COTANGENTS: tl.constexpr,
    COLUMN_COTANGENTS: tl.constexpr,
    SIDES: tl.constexpr,
    GOAL: tl.constexpr,
    ROUNDING: tl.constexpr,
    SMALLEST: tl.constexpr,
    STEPS_PER_ROW: tl.constexpr,
    BATCH: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    HELD: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """One program per BATCH matrices, which loads ROWS of their rows at once.

    CONTIGUOUS where all that is (B, n, m) is N by M and contiguous.
    """
    if CONTIGUOUS:
        plan_stride, plan_row_stride, plan_column_stride = N * M, M, 1
        cotangent_stride, cotangent_row_stride, cotangent_column_stride = N * M, M, 1
        weighted_stride, weighted_row_stride, weighted_column_stride = N * M, M, 1
    o_batch = batch_of(BATCH)
    o_column = tl.arange(0, M)
    m_batch = o_batch < count
    m_column = m_batch[:, None] & (o_column < m)[None, :]  # (BATCH, M)
    p_plan = first_rows(plan_ptr, plan_stride, plan_column_stride, BATCH, M)
    p_cotangent = first_rows(cotangent_ptr, cotangent_stride, cotangent_column_stride, BATCH, M)
    p_weighted = first_rows(weighted_ptr, weighted_stride, weighted_column_stride, BATCH, M)
    o_row_batch, o_column_batch = o_batch[None, :], o_batch[:, None]

    c = tl.zeros((BATCH, M), TYPE)
    right = tl.zeros((BATCH, M), TYPE)
    for first in range(0, N, ROWS):
        o_row = first + tl.arange(0, ROWS)
        plan = load_rows(p_plan, o_row, plan_row_stride, n, m_column).to(TYPE)
        cotangent = load_rows(p_cotangent, o_row, cotangent_row_stride, n, m_column).to(TYPE)
        e = tl.sum(plan * cotangent, 2)
        if ROW_COTANGENTS:
            e += load_numbers(row_cotangent_ptr, o_row_batch, o_row[:, None], count, n)
        e *= inverse(tl.sum(plan, 2), SMALLEST)
        c += tl.sum(plan, 0)
        right += tl.sum(plan * (cotangent - e[:, :, None]), 0)
    if COLUMN_COTANGENTS:
        right += load_numbers(column_cotangent_ptr, o_column_batch, o_column[None, :], count, m)

    per_column = inverse_root(c, SMALLEST)
    # The null vector of the matrix, of which residuals keep no part.
    null = c * per_column
    null *= inverse_root(tl.sum(null * null, 1), SMALLEST)[:, None]
    left = per_column * right
    left -= null * tl.sum(null * left, 1)[:, None]
    largest = tl.max(tl.abs(left), 1)  # (BATCH,)
    largest = tl.where(largest > 0, largest, 1)
    left /= largest[:, None]
    # 0, or NaN where the right-hand side is not finite.
    values = 0 * left
    direction = left
    size = tl.sum(left * left, 1)
    length, goal = size, GOAL * size
    active = size > 0
    running = tl.max(active.to(tl.int32), 0)
    if HELD:
        held = load_rows(p_plan, tl.arange(0, N), plan_row_stride, n, m_column).to(TYPE)
        per_row = inverse(tl.sum(held, 2), SMALLEST)
    step = 0
    while (step < STEPS_PER_ROW * m) & (running > 0):
        scaled = per_column * direction
        if HELD:
            images = per_row * tl.sum(held * scaled[None, :, :], 2)
            image = tl.sum(held * images[:, :, None], 0)
        else:
            image = tl.zeros((BATCH, M), TYPE)
            for first in range(0, N, ROWS):
                o_rows = first + tl.arange(0, ROWS)
                part = load_rows(p_plan, o_rows, plan_row_stride, n, m_column).to(TYPE)
                parts = inverse(tl.sum(part, 2), SMALLEST)
                parts *= tl.sum(part * scaled[None, :, :], 2)
                image += tl.sum(part * parts[:, :, None], 0)
        image = direction - per_column * image
        energy = tl.sum(direction * image, 1)
        active = active & (energy > ROUNDING * length)
        taken = tl.where(active, size / energy, 0)
        values += taken[:, None] * direction
        left -= taken[:, None] * image
        left -= null * tl.sum(null * left, 1)[:, None]
        after = tl.sum(left * left, 1)
        kept = tl.where(active, after / size, 0)
        direction = left + kept[:, None] * direction
        # Residuals are orthogonal to the directions before them.
        length = after + kept * kept * length
        size = after
        active = active & (size > goal)
        running = tl.max(active.to(tl.int32), 0)
        step += 1

    v = per_column * (values * largest[:, None])
    for first in range(0, N, ROWS):
        o_row = first + tl.arange(0, ROWS)
        plan = load_rows(p_plan, o_row, plan_row_stride, n, m_column).to(TYPE)
        cotangent = load_rows(p_cotangent, o_row, cotangent_row_stride, n, m_column).to(TYPE)
        u = tl.sum(plan * (cotangent - v[None, :, :]), 2)
        if ROW_COTANGENTS:
            u += load_numbers(row_cotangent_ptr, o_row_batch, o_row[:, None], count, n)
        u *= inverse(tl.sum(plan, 2), SMALLEST)
        weighted = plan * (cotangent - u[:, :, None] - v[None, :, :])
        p_rows = p_weighted + o_row.to(tl.int64)[:, None] * weighted_row_stride
        store_tile(p_rows, weighted, m_column[None, :, :] & (o_row < n)[:, None, None])
        if SIDES:
            store_numbers(rows_ptr, o_row_batch, o_row[:, None], count, n, u)
    if SIDES:
        store_numbers(columns_ptr, o_column_batch, o_column[None, :], count, m, v)


@triton.jit
def load_rows(p_first, o_row, row_stride, n, m_column):
    """Rows (ROWS, BATCH, M) of matrices, of pointers to their first ones."""
    p_rows = p_first + o_row.to(tl.int64)[:, None] * row_stride
    return load_tile(p_rows, m_column[None, :, :] & (o_row < n)[:, None, None])


@triton.jit
def inverse(sums, SMALLEST: tl.constexpr):
    """1 / sums, 0 where there is no sum."""
    return tl.where(sums >= SMALLEST, 1 / sums, 0)


@triton.jit
def inverse_root(sums, SMALLEST: tl.constexpr):
    """1 / sqrt(sums), 0 where there is no sum."""
    return tl.where(sums >= SMALLEST, tl.rsqrt(sums), 0)


def small_adjoint(
    plans: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None,
    column_cotangents: Tensor | None,
    found: tuple[Tensor, Tensor, Tensor],
    *,
    tolerance: float,
    rounding: float,
    smallest: float,
    steps_per_row: int,
) -> None:
    """Solve for all matrices.

    Args:
        plans: P (B, n, m), n and m up to 128, float16 to float64, of any strides.
        cotangents: G (B, n, m), float16 to float64, of any strides.
        row_cotangents: s (B, n), None for 0.
        column_cotangents: t (B, m), None for 0.
        found: results to write: P o (G - u 1^T - 1 v^T) (B, n, m) of the type that plans and
            cotangents have together, u (B, n) and v (B, m) in float32, or float64 if one of them
            is; both may be empty.
        tolerance: of a residual over the right-hand side.
        rounding: a direction's curvature p^T S p over p^T p that rounding alone may make, and ends
            its matrix.
        smallest: sums below it are 0.
        steps_per_row: at the most, over the rows of the system.
    """
    weighted, u, v = found
    dtype, sides = u.dtype, u.numel() > 0
    # Empty results are not written, and tensors in place of None not read.
    u, v = (u, v) if sides else (weighted, weighted)
    s, t = (
        plans if given is None else given.to(dtype).contiguous()
        for given in (row_cotangents, column_cotangents)
    )
    given = row_cotangents is not None, column_cotangents is not None
    tensors = plans, cotangents, s, t, weighted, u, v
    if plans.shape[1] < plans.shape[2]:
        # The transposed problem, whose system is the smaller one.
        tensors, given = (plans.mT, cotangents.mT, t, s, weighted.mT, v, u), given[::-1]
    count, n, m = tensors[0].shape
    if count == 0:
        return
    packing, (tile_rows, tile_columns) = packing_for(PACKINGS, n, m, dtype, LARGER), padded(n, m)
    warps, small = packing.warps, packing is not LARGER
    if small and 1 < warps < LARGER.warps:
        warps *= dtype.itemsize // 4
    small_adjoint_kernel[(triton.cdiv(count, packing.matrices),)](
        *tensors,
        count,
        n,
        m,
        *tensors[0].stride(),
        *tensors[1].stride(),
        *tensors[4].stride(),
        TYPE=tl.float64 if dtype == torch.float64 else tl.float32,
        ROW_COTANGENTS=given[0],
        COLUMN_COTANGENTS=given[1],
        SIDES=sides,
        GOAL=tolerance**2,
        ROUNDING=rounding,
        SMALLEST=smallest,
        STEPS_PER_ROW=steps_per_row,
        BATCH=packing.matrices,
        N=tile_rows,
        M=tile_columns,
        ROWS=tile_rows if small else ROW_BYTES // (tile_columns * dtype.itemsize),
        HELD=small or dtype == torch.float32,
        CONTIGUOUS=(n, m) == (tile_rows, tile_columns)
        and all(tensors[place].is_contiguous() for place in (0, 1, 4)),
        num_warps=warps,
    )
