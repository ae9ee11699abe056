"""A half-step of Sinkhorn attention: new potentials of rows, and with the last one the output.

    u_i = t_i - log sum_j exp(S_ij + v_j),      O_i = sum_j P_ij V_j,  P_ij ~ exp(S_ij + v_j),

S = scale rows columns^T, of H heads side by side, with rows of P that sum to 1. It is the online
normalisation of attention (Milakov & Gimelshein 2018; Dao et al. 2022) with a bias of columns: with
v = 0 and t = 0, O is softmax attention. Columns are updated by the same kernel, rows and columns
swapped. A column with v_j = -inf has no part; where all have none, u is +inf and O is NaN.

After the first half-steps there is a potential of rows of the half-step before, `guess`: entries of
exp(S + v + guess) are at most 1, or n / m, and sums need no maximum. Where a sum then leaves the
range of float32, as potentials have moved far, the online pass follows. The output is made by that
alone: relative to the largest of a row, weights keep their digits in float16.
`otdd_flash.attention.passes` launches `half_step_kernel`.

Memory: rows, columns and values are read, u and O written; nothing is (n, m). Work: 2 n m (d + e)
operations on tensor cores and n m exponentials a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from otdd_flash.kernels.attention.tiles import (
    block_of,
    from_units,
    in_units,
    load_block,
    logarithm,
    power,
)
from otdd_flash.kernels.launch import on_its_device

# Sums below it may have lost digits of their terms: float32 ends at 2^-126.
SMALLEST = tl.constexpr(2.0**-80)


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
        # Of a row without a part the potential is -inf, whatever its sum.
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
