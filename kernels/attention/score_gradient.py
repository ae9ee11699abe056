"""The gradient of Sinkhorn attention by queries or keys: all iterations in one pass.

    out = scale A columns,
    A_ij = exp(S + u_c,i + v_c,j) (L_i . R_j - a_i - b_j)
           - sum_(t < c) [ exp(S + u_t,i + v_t,j) x_t,i + exp(S + u_t,i + v_(t+1),j) y_(t+1),j ],

i queries, j keys, c the iterations of a head, S = scale q k^T, with L the cotangents of the output
and R the values. x and y are the adjoints of u and v, y times m / n. Rows of `out` are queries, or
keys where A is transposed.

The exponentials of all iterations are P = exp(S + u_c + v_c) times numbers of rows and of columns,
exp(u_t - u_c) and exp(v_t - v_c): one exponential a score, and a multiplication and an addition a
term. In a head whose potentials have moved too far for that, as P might be 0 where a term is not
(`near` is 0), each term has an exponential of its own. The kernel is launched for either kind.
`otdd_flash.attention.passes` launches `score_gradient_kernel`.

Memory: nothing is (n, m); vectors of all iterations lie side by side. Work: 2 n m (2 d + e)
operations on tensor cores, n m exponentials a head that is near, else (2 c + 1) n m.
"""

from __future__ import annotations

import triton
import triton.language as tl

from otdd_flash.kernels.attention.tiles import block_of, in_units, load_block, power
from otdd_flash.kernels.launch import on_its_device


@triton.jit
def earlier_term(
    logits, p_u, p_v, p_x, p_y, r, count, o_u, o_v, m_row, m_column,
    QUERIES: tl.constexpr, NEAR: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The r-th term: of u_t and v_t where r = 2 t, of u_t and v_(t+1) where r = 2 t + 1.

    Weights of rows and of columns stand side by side by r. In a head that is near they are over P.
    """
    r = tl.cast(r, tl.int64)
    x = tl.load(p_x + r * o_u, mask=m_row, other=0.0)
    y = tl.load(p_y + r * o_v, mask=m_column, other=0.0)
    weights = x[:, None] * y[None, :]
    if NEAR:
        return weights
    # What a head has not made is not initialised, and its weights are 0.
    i = tl.minimum((r + (0 if QUERIES else 1)) // 2, count)
    j = tl.minimum((r + (1 if QUERIES else 0)) // 2, count)
    u = tl.load(p_u + i * o_u, mask=m_row, other=0.0)
    v = tl.load(p_v + j * o_v, mask=m_column, other=-float("inf"))
    exponents = logits + in_units(u, HALF)[:, None] + in_units(v, HALF)[None, :]
    return power(exponents, HALF) * weights


@on_its_device
@triton.jit
def score_gradient_kernel(
    rows_ptr,  # (H, n, DIM)
    columns_ptr,  # (H, m, DIM)
    counts_ptr,  # (H,) int32
    n,
    m,
    scale,
    row_factor_ptr,  # (H, n, WIDTH)
    column_factor_ptr,  # (H, m, WIDTH)
    row_potentials_ptr,  # (T + 1, H, n) float32
    column_potentials_ptr,  # (T + 1, H, m) float32
    row_weights_ptr,  # (2 T, H, n) float32
    column_weights_ptr,  # (2 T, H, m) float32
    row_offset_ptr,  # (H, n) float32
    column_offset_ptr,  # (H, m) float32
    near_ptr,  # (H,) bool
    out_ptr,  # (H, n, DIM)
    o_u,  # from vectors of rows to those of the next half-step, H n
    o_v,  # of columns, H m
    NEAR: tl.constexpr,  # whether this launch is for heads that are
    QUERIES: tl.constexpr,  # whether rows are queries
    TERMS: tl.constexpr,  # of earlier half-steps, the most; -1 where these are too many
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program per block of rows of a head."""
    i_head, o_row = block_of(n, BLOCK_M)
    if tl.load(near_ptr + i_head).to(tl.int32) != NEAR:
        return
    count = tl.load(counts_ptr + i_head).to(tl.int64)
    columns_ptr += i_head * m * DIM
    column_factor_ptr += i_head * m * WIDTH
    m_row = o_row < n
    b_rows = load_block(rows_ptr + i_head * n * DIM, o_row, n, DIM, BLOCK_D)
    b_row_factor = load_block(row_factor_ptr + i_head * n * WIDTH, o_row, n, WIDTH, BLOCK_E)
    a = tl.load(row_offset_ptr + i_head * n + o_row, mask=m_row, other=0.0)
    p_u = row_potentials_ptr + i_head * n + o_row
    p_x = row_weights_ptr + i_head * n + o_row
    u_last = tl.load(p_u + count * o_u, mask=m_row, other=0.0)
    out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in tl.range(0, m, BLOCK_N):
        o_column = start + tl.arange(0, BLOCK_N)
        m_column = o_column < m
        p_v = column_potentials_ptr + i_head * m + o_column
        p_y = column_weights_ptr + i_head * m + o_column
        b_columns = load_block(columns_ptr, o_column, m, DIM, BLOCK_D)
        b_factor = load_block(column_factor_ptr, o_column, m, WIDTH, BLOCK_E)
        b = tl.load(column_offset_ptr + i_head * m + o_column, mask=m_column, other=0.0)
        v_last = tl.load(p_v + count * o_v, mask=m_column, other=-float("inf"))
        products = tl.dot(b_rows, tl.trans(b_columns), input_precision=PRECISION)
        logits = products * in_units(scale, HALF)
        p = power(
            logits + in_units(u_last, HALF)[:, None] + in_units(v_last, HALF)[None, :], HALF
        )  # (BLOCK_M, BLOCK_N)
        slopes = (
            tl.dot(b_row_factor, tl.trans(b_factor), input_precision=PRECISION)
            - a[:, None]
            - b[None, :]
        )
        by_scores = slopes if NEAR else p * slopes
        if TERMS >= 0:
            # Triton loads ahead in innermost loops alone: this one must not be a loop.
            for r in tl.static_range(TERMS):
                by_scores -= earlier_term(
                    logits, p_u, p_v, p_x, p_y, r, count, o_u, o_v, m_row, m_column,
                    QUERIES, NEAR, HALF,
                )  # fmt: skip
        else:
            for r in range(2 * count):
                by_scores -= earlier_term(
                    logits, p_u, p_v, p_x, p_y, r, count, o_u, o_v, m_row, m_column,
                    QUERIES, NEAR, HALF,
                )  # fmt: skip
        if NEAR:
            by_scores *= p
        out = tl.dot(by_scores.to(b_columns.dtype), b_columns, out, input_precision=PRECISION)
    o_dim = tl.arange(0, BLOCK_D)
    tl.store(
        out_ptr + (i_head * n + o_row)[:, None] * DIM + o_dim[None, :],
        (out * scale).to(out_ptr.dtype.element_ty),
        mask=m_row[:, None] & (o_dim < DIM)[None, :],
    )
