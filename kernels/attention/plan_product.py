"""Products with a plan of Sinkhorn attention, of a vector, or of a matrix and a vector.

    y_i = w sum_j P_ij x_j,        P_ij = exp(S_ij + alpha_i + beta_j),  S = scale rows columns^T,

or, with matrices Z of columns and R of rows,

    M_i = sum_j P_ij Z_j,          y_i = w (<R_i, M_i> - sum_j P_ij x_j),

of H heads side by side, w a number of each. No maximum is needed: entries of the plans of
half-steps are at most 1, or n / m. P is rounded to the type of Z in both sums, as they cancel.
`otdd_flash.attention.passes` launches `plan_product_kernel`.

Memory: nothing is (n, m). Work: 2 n m (d + e) operations on tensor cores, n m exponentials a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from otdd_flash.kernels.attention.tiles import block_of, in_units, load_block, power
from otdd_flash.kernels.launch import on_its_device


@on_its_device
@triton.jit(do_not_specialize=["step"])
def plan_product_kernel(
    rows_ptr,  # (H, n, DIM)
    columns_ptr,  # (H, m, DIM)
    counts_ptr,  # (H,) int32
    n,
    m,
    scale,
    row_potential_ptr,  # (H, n) float32
    column_potential_ptr,  # (H, m) float32
    vector_ptr,  # (H, m) float32
    weight_ptr,  # (H,) float32
    out_ptr,  # (H, n) float32
    matrix_ptr,  # (H, m, WIDTH), read if BLOCK_E
    own_ptr,  # (H, n, WIDTH), read if BLOCK_E
    product_ptr,  # (H, n, WIDTH), written if BLOCK_E
    step,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program per block of rows of a head that makes this step."""
    i_head, o_row = block_of(n, BLOCK_M)
    if tl.load(counts_ptr + i_head) < step:
        return
    columns_ptr += i_head * m * DIM
    column_potential_ptr += i_head * m
    vector_ptr += i_head * m
    matrix_ptr += i_head * m * WIDTH
    o_vector = i_head * n + o_row
    m_row = o_row < n
    b_rows = load_block(rows_ptr + i_head * n * DIM, o_row, n, DIM, BLOCK_D)
    alpha = tl.load(row_potential_ptr + o_vector, mask=m_row, other=-float("inf"))
    found = tl.zeros((BLOCK_M,), tl.float32)
    product = tl.zeros((BLOCK_M, BLOCK_E if BLOCK_E else 1), tl.float32)
    for start in tl.range(0, m, BLOCK_N):
        o_column = start + tl.arange(0, BLOCK_N)
        m_column = o_column < m
        b_columns = load_block(columns_ptr, o_column, m, DIM, BLOCK_D)
        beta = tl.load(column_potential_ptr + o_column, mask=m_column, other=-float("inf"))
        x = tl.load(vector_ptr + o_column, mask=m_column, other=0.0)
        products = tl.dot(b_rows, tl.trans(b_columns), input_precision=PRECISION)
        logits = products * in_units(scale, HALF) + in_units(beta, HALF)[None, :]
        p = power(logits + in_units(alpha, HALF)[:, None], HALF)  # (BLOCK_M, BLOCK_N)
        if BLOCK_E:
            b_matrix = load_block(matrix_ptr, o_column, m, WIDTH, BLOCK_E)
            rounded = p.to(b_matrix.dtype)
            product = tl.dot(rounded, b_matrix, product, input_precision=PRECISION)
            p = rounded.to(tl.float32)
        found += tl.sum(p * x[None, :], 1)
    if BLOCK_E:
        b_own = load_block(own_ptr + i_head * n * WIDTH, o_row, n, WIDTH, BLOCK_E)
        found = tl.sum(b_own.to(tl.float32) * product, 1) - found
        o_width = tl.arange(0, BLOCK_E)
        tl.store(
            product_ptr + o_vector[:, None] * WIDTH + o_width[None, :],
            product.to(product_ptr.dtype.element_ty),
            mask=m_row[:, None] & (o_width < WIDTH)[None, :],
        )
    tl.store(out_ptr + o_vector, found * tl.load(weight_ptr + i_head), mask=m_row)
