"""Kernels of Sinkhorn attention: passes over the scores of many heads, which are never stored.

`otdd_flash.attention.passes` launches the three kernels by `launch`. It has the same passes in
PyTorch, so a change of a formula must be made in both (`tests/attention` runs both). A program has
one block of rows of one head, loads it once and streams all columns of that head. Rows and columns
are queries and keys, or keys and queries. With half types scores and potentials are multiplied by
log2(e) before they are added, one operation a score, for exp2. With float32 they are added first,
because large terms would lose digits by that product before they cancel. On a CPU blocks are large,
because Triton's interpreter takes time for each tile.

`half_step_kernel`: new potentials of rows, and with the last one the output.

    u_i = t_i - log sum_j exp(S_ij + v_j),      O_i = sum_j P_ij V_j,  P_ij ~ exp(S_ij + v_j),

S = scale rows columns^T (n, m) of rows (n, d), columns (m, d) and values V (m, e), of H heads side
by side, with rows of P that sum to 1. It is the online normalisation of attention (Milakov &
Gimelshein 2018; Dao et al. 2022) with a bias of columns: with v = 0 and t = 0, O is softmax
attention. Columns are updated by the same kernel, rows and columns swapped. A column with v_j =
-inf takes no part; if no column takes part, u is +inf and O is NaN.

A half-step without values, but for the first, has a `guess`, the potential of its rows one
iteration earlier: entries of exp(S + v + guess) are at most 1, or n / m, and sums need no maximum.
If a sum then leaves the range of float32, because potentials have moved far, the online pass
follows. The output is made by the online pass alone: its weights are relative to the largest of
their row, and keep their digits in float16.

Memory: rows, columns and values are read, u and O written; nothing is (n, m). Work: 2 n m (d + e)
operations on tensor cores and n m exponentials a head.

`plan_product_kernel`: products with a plan, of a vector, or of a matrix and a vector.

    y_i = w sum_j P_ij x_j,        P_ij = exp(S_ij + alpha_i + beta_j),  S = scale rows columns^T,

or, with matrices Z of columns and R of rows,

    M_i = sum_j P_ij Z_j,          y_i = w (<R_i, M_i> - sum_j P_ij x_j),

of H heads side by side, w a number of each. No maximum is needed: entries of the plans of
half-steps are at most 1, or n / m. P is rounded to the type of Z in both sums, as they cancel.

Memory: nothing is (n, m). Work: 2 n m (d + e) operations on tensor cores, n m exponentials a head.

`score_gradient_kernel`: the gradient by queries or keys, all iterations in one pass.

    out = scale A columns,
    A_ij = exp(S + u_c,i + v_c,j) (L_i . R_j - a_i - b_j)
           - sum_(t < c) [ exp(S + u_t,i + v_t,j) x_t,i + exp(S + u_t,i + v_(t+1),j) y_(t+1),j ],

i queries, j keys, c the iterations of a head, S = scale q k^T, with L the cotangents of the output
and R the values. x and y are the adjoints of u and v, y times m / n. Rows of `out` are queries, or
keys where A is transposed.

The exponentials of all iterations are P = exp(S + u_c + v_c) times numbers of rows and of columns,
exp(u_t - u_c) and exp(v_t - v_c): one exponential a score, and a multiplication and an addition a
term. If the potentials of a head have moved so far that P might be 0 where a term is not, `near` of
the head is 0, and each term has an exponential of its own. The kernel is launched once for heads
that are near and, where there are earlier terms, once for the others.

Memory: nothing is (n, m); vectors of all iterations lie side by side. Work: 2 n m (2 d + e)
operations on tensor cores, n m exponentials a head that is near, else (2 c + 1) n m.

`tests/kernels/test_compilation.py` compiles every kernel at widths of 64 and 256. It limits the
registers that kernels of half types may spill at width 64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.kernels.launch import LOG2_E, on_its_device

# Sums below it may have lost digits of their terms: float32 ends at 2^-126.
SMALLEST = tl.constexpr(2.0**-80)


@on_its_device
@triton.jit(do_not_specialize=["step"])
def half_step_kernel(
    rows_ptr,  # (H, n, DIM)
    columns_ptr,  # (H, m, DIM)
    counts_ptr,  # (H,) int32
    n,
    m,
    scale,
    potential_ptr,  # (H, m) float32
    target_ptr,  # (H, n) float32
    out_ptr,  # (H, n) float32
    values_ptr,  # (H, m, WIDTH), read if BLOCK_E
    product_ptr,  # (H, n, WIDTH), written if BLOCK_E
    guess_ptr,  # (H, n) float32, read if GUESSED, without BLOCK_E; may be out_ptr
    step,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    HALF: tl.constexpr,
    GUESSED: tl.constexpr,
):
    """One program per block of rows of a head that makes this step."""
    i_head, o_row = block_of(n, BLOCK_M)
    if tl.load(counts_ptr + i_head) < step:
        return
    columns_ptr += i_head * m * DIM
    potential_ptr += i_head * m
    values_ptr += i_head * m * WIDTH
    b_rows = load_block(rows_ptr + i_head * n * DIM, o_row, n, DIM, BLOCK_D)
    highest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    product = tl.zeros((BLOCK_M, BLOCK_E if BLOCK_E else 1), tl.float32)
    target = tl.load(target_ptr + i_head * n + o_row, mask=o_row < n, other=-float("inf"))
    online = True
    if GUESSED:
        guess = tl.load(guess_ptr + i_head * n + o_row, mask=o_row < n, other=0.0)
        guess = in_units(guess, HALF)
        for start in tl.range(0, m, BLOCK_N):
            o_column = start + tl.arange(0, BLOCK_N)
            logits = exponents_of(
                b_rows, columns_ptr, potential_ptr, o_column, m, scale,
                DIM, BLOCK_D, PRECISION, HALF,
            )  # fmt: skip
            total += tl.sum(power(logits + guess[:, None], HALF), 1)
        highest = -guess
        # The potential of a row without a part is -inf, whatever its sum.
        read = target > -float("inf")
        online = tl.sum((read & ((total < SMALLEST) | (total == float("inf")))).to(tl.int32)) > 0
    if online:
        highest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for start in tl.range(0, m, BLOCK_N):
            o_column = start + tl.arange(0, BLOCK_N)
            logits = exponents_of(
                b_rows, columns_ptr, potential_ptr, o_column, m, scale,
                DIM, BLOCK_D, PRECISION, HALF,
            )  # fmt: skip
            top = tl.maximum(highest, tl.max(logits, 1))
            # No column so far has a part: every exponential is 0, not that of -inf + inf.
            shift = tl.where(top == -float("inf"), 0.0, top)
            p = power(logits - shift[:, None], HALF)  # (BLOCK_M, BLOCK_N)
            kept = power(highest - shift, HALF)
            total = total * kept + tl.sum(p, 1)
            if BLOCK_E:
                b_values = load_block(values_ptr, o_column, m, WIDTH, BLOCK_E)
                product = product * kept[:, None]
                product = tl.dot(p.to(b_values.dtype), b_values, product, input_precision=PRECISION)
            highest = top
    u = target - from_units(highest + logarithm(total, HALF), HALF)
    u = tl.where(target == -float("inf"), target, u)
    tl.store(out_ptr + i_head * n + o_row, u, mask=o_row < n)
    if BLOCK_E:
        o_width = tl.arange(0, BLOCK_E)
        tl.store(
            product_ptr + (i_head * n + o_row)[:, None] * WIDTH + o_width[None, :],
            (product / total[:, None]).to(product_ptr.dtype.element_ty),
            mask=(o_row < n)[:, None] & (o_width < WIDTH)[None, :],
        )


@triton.jit
def exponents_of(
    b_rows,
    columns_ptr,
    potential_ptr,
    o_column,
    m,
    scale,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    HALF: tl.constexpr,
):
    """S + v of a tile, `in_units`; -inf past the last column."""
    v = tl.load(potential_ptr + o_column, mask=o_column < m, other=-float("inf"))
    b_columns = load_block(columns_ptr, o_column, m, DIM, BLOCK_D)
    products = tl.dot(b_rows, tl.trans(b_columns), input_precision=PRECISION)
    return products * in_units(scale, HALF) + in_units(v, HALF)[None, :]


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
    # Iterations that a head has not made are not initialised, and have weights of 0.
    i = tl.minimum((r + (0 if QUERIES else 1)) // 2, count)
    j = tl.minimum((r + (1 if QUERIES else 0)) // 2, count)
    u = tl.load(p_u + i * o_u, mask=m_row, other=0.0)
    v = tl.load(p_v + j * o_v, mask=m_column, other=-float("inf"))
    exponents = logits + in_units(u, HALF)[:, None] + in_units(v, HALF)[None, :]
    return power(exponents, HALF) * weights


# The narrowest operand of a product on tensor cores.
NARROWEST = 16

# Entries of a matrix of one head, whose places in it, and past its end in the last tile, are int32:
# fewer operations a load.
MOST_ENTRIES = 2**31 - 2**10


class Blocks(NamedTuple):
    """Rows of a program, columns that it loads at once, warps and stages."""

    rows: int
    columns: int
    warps: int
    stages: int


def blocks_for(kind: str, width: int, dtype: torch.dtype, device: torch.device) -> Blocks:
    """Return the blocks of a pass.

    Args:
        kind: `vector` where the result is a number a row, `matrix` where it is a row of a matrix
            too, `gradient`.
        width: the wider of the padded d and e.
        dtype: of q, k and v.
        device: where they are.
    """
    if device.type != "cuda":
        return Blocks(128, 128, 4, 1)
    wide = width * dtype.itemsize
    if wide <= 128:
        # The fastest of 12 on an H100, at d = e = 64 in float16.
        rows, columns = {"vector": (64, 128), "gradient": (128, 32)}.get(kind, (128, 64))
        return Blocks(rows, columns, 4, 3)
    if wide <= 256:
        rows = 64 if kind == "gradient" else 128
        return Blocks(rows, 128 if kind == "vector" else 64, 8, 2)
    if wide <= 512:
        return Blocks(64, 64 if kind == "vector" else 32, 4 if kind == "vector" else 8, 2)
    return Blocks(32 if kind == "gradient" else 64, 32, 8, 1)


def padded_width(width: int) -> int:
    """The power of two to which coordinates are padded in registers."""
    return max(NARROWEST, int(triton.next_power_of_2(width)))


def launch(
    kernel: Any,
    kind: str,
    points: tuple[Tensor, Tensor],
    scale: float,
    counts: Tensor,
    width: int,
    *given: Tensor | int,
    **constants: Any,
) -> None:
    """Launch a kernel with a program for each block of rows.

    Args:
        kernel: takes rows, columns, counts, n, m and the scale, then `given`.
        kind: of the pass, see `blocks_for`.
        points: rows (H, n, d) and columns (H, m, d), contiguous as all tensors.
        scale: of the scores.
        counts: (H,) int32, how many iterations each head makes.
        width: e where matrices are read, else 0.
        *given: its other tensors and integers; vectors are float32.
        **constants: beyond those of tiles.
    """
    (rows, columns), depth = points, padded_width(points[0].shape[2])
    (heads, n, dim), padded = rows.shape, padded_width(width) if width else 0
    m = columns.shape[1]
    if max(n, m) * max(dim, width) >= MOST_ENTRIES:
        raise InputError(f"a head has {max(n, m):,} points, too many for kernels; use fewer")
    blocks = blocks_for(kind, max(depth, padded), rows.dtype, rows.device)
    # Three products of TF32 have the accuracy of float32 but for some units.
    constants["PRECISION"] = "tf32x3" if rows.dtype == torch.float32 else "tf32"
    constants["HALF"] = rows.dtype != torch.float32
    constants |= {"DIM": dim, "WIDTH": width, "BLOCK_D": depth, "BLOCK_E": padded}
    constants |= {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.columns}
    constants |= {"num_warps": blocks.warps, "num_stages": blocks.stages}
    grid = (heads * triton.cdiv(n, blocks.rows),)
    kernel[grid](rows, columns, counts, n, m, scale, *given, **constants)


@triton.jit
def block_of(n, BLOCK_M: tl.constexpr):
    """The head of a program, int64, and the rows of its block, int32."""
    blocks = tl.cdiv(n, BLOCK_M)
    i_head = (tl.program_id(0) // blocks).to(tl.int64)
    return i_head, (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def load_block(pointer, o_row, rows, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of a matrix (rows, DIM) of a head; 0 past its ends."""
    o_dim = tl.arange(0, BLOCK_D)
    return tl.load(
        pointer + o_row[:, None] * DIM + o_dim[None, :],
        mask=(o_row < rows)[:, None] & (o_dim < DIM)[None, :],
        other=0.0,
    )


@triton.jit
def in_units(values, HALF: tl.constexpr):
    """Exponents, or a scale of them, in the units of `power`."""
    return values * LOG2_E if HALF else values


@triton.jit
def power(exponents, HALF: tl.constexpr):
    """The exponentials of exponents that are `in_units`."""
    return tl.exp2(exponents) if HALF else tl.exp(exponents)


@triton.jit
def logarithm(sums, HALF: tl.constexpr):
    """The inverse of `power`."""
    return tl.log2(sums) if HALF else tl.log(sums)


@triton.jit
def from_units(values, HALF: tl.constexpr):
    """The inverse of `in_units`."""
    return values / LOG2_E if HALF else values
