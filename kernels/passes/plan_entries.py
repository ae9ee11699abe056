"""Entries of a plan from integer scores, and their sums over a part of a tile, to stated errors.

    p_ij = 2^e_ij,   e_ij = scale (N_ij + M_ij / B^2) + u_i + v_j - W[l_i, l_j]

The kernel of `plan_marginals` calls `sum_piece`; `operators.fixed_point` makes bounds on its sums
from the errors below. N and M are int32 sums of products of digits in base B (`points.digits`), so
that (N + M / B^2) / B is the score of two points, or N with one digit; M is there for four digits
of few coordinates only (`FRACTIONS`). `scale` brings them to exponents of 2. u and v are float64:
potentials, norms and logarithms of masses. W are class distances, l the classes of the points.

Errors hold in the worst case and on every card; a unit is 2^-24:

- e is computed in float64. Its roundings, seven with M and five without, are at most 2^-50 of
  |scale N| + |u| + |v| + |W|.
- p is known to 5 units: e is rounded to a multiple of 2^-23, which is 0.7 units of p, and cut into
  k + t, 0 <= t < 1; the hardware's 2^t is known to 2^-22, 4 units; 2^k is exact. Entries below
  2^-125 count as 0, those from 2^128 on make a sum infinite. Terms are finite.
- In float32 an entry takes part in at most 11 additions of a column and 5 of a row, whatever their
  order; then float64 takes over.

So a sum of the p of the computed e is known to `SUM_ERROR` of itself, plus 2^-125 for each entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Bound on the relative error of a sum: 4 + ln 2 units of each entry, 11 additions, and terms of
# second order and of float64.
ENTRY_ERROR, ADDITION_ERROR = 4.75 * 2.0**-24, 11.25 * 2.0**-24
SUM_ERROR = ENTRY_ERROR + ADDITION_ERROR
# Of an exponent, over the sizes of its terms.
EXPONENT_ERROR = 2.0**-50
# Entries below count as 0.
LEAST_ENTRY = 2.0**-125


@triton.jit
def exact_double(integers):
    """Convert int32 to float64.

    The bits of 2^52 + 2^31 + N are put together and the constant subtracted, which is exact; the
    conversion takes four times as long.
    """
    bits = integers.to(tl.uint32, bitcast=True) ^ 0x80000000
    biased = bits.to(tl.uint64) | 0x4330000000000000
    return biased.to(tl.float64, bitcast=True) - 4503601774854144.0


@triton.jit
def power_of_two(exponents):
    """Compute 2^e in float32 of e in float64."""
    bits = exponents.to(tl.int64, bitcast=True)
    # The upper words of 128.5 and of -125.5 as limits; bits of negative numbers grow with their
    # size. e of 128 and more give infinity, below -125 give 0.
    high = tl.minimum((bits >> 32).to(tl.int32), 0x40601000)
    high = tl.minimum(high.to(tl.uint32, bitcast=True), 0xC05F6000)
    bits = (high.to(tl.uint64) << 32) | bits.to(tl.uint32).to(tl.uint64)
    # Next to 1.5 2^29 neighbours are 2^-23 apart: the lower word becomes e 2^23, rounded.
    shifted = bits.to(tl.float64, bitcast=True) + 805306368.0
    fixed = shifted.to(tl.int64, bitcast=True).to(tl.int32)
    # e = k + t: the bits of 1 + t, and of 2^(k - 1), which are 0 for k = -126.
    fraction = (fixed & 0x7FFFFF) | 0x3F800000
    power = fixed - fraction + 0x7E800000
    return tl.exp2(fraction.to(tl.float32, bitcast=True)) * power.to(tl.float32, bitcast=True)


@triton.jit
def halve_columns(scores, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Split (BLOCK_M, WIDTH) into its left and its right half."""
    return tl.split(tl.permute(tl.reshape(scores, (BLOCK_M, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def join_columns(left, right, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Join two (ROWS, WIDTH) to (ROWS, 2 WIDTH)."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, 2 * WIDTH))


@triton.jit
def sum_piece(
    scores,  # (128, WIDTH) int32, N
    fractions,  # (128, WIDTH) int32, M, if FRACTIONS
    row_term,  # (128,) float64, u
    o_costs,  # (128,) int32, the rows' offsets in W, if GATHER
    column,
    column_term_ptr,  # float64, v
    labels_y_ptr,  # int32
    costs_ptr,  # float64, W
    product_scale,  # float64, `scale`
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG_WIDTH: tl.constexpr,
    GATHER: tl.constexpr,
    FRACTIONS: tl.constexpr,
    BASE: tl.constexpr,
):
    """Sum entries from `column` on over columns, (128, 4), and over each 16 rows, (8, WIDTH).

    Pairs are added, those of one thread first. 16 rows are those of a warp; of a row four threads
    hold two columns of every eight, and keep their sums apart.
    """
    o_column = column + tl.arange(0, WIDTH)
    exponents = exact_double(scores) * product_scale + row_term[:, None]
    if FRACTIONS:
        exponents += exact_double(fractions) * (product_scale / (BASE * BASE))
    exponents += tl.load(column_term_ptr + o_column)[None, :]
    if GATHER:
        labels_y = tl.load(labels_y_ptr + o_column)
        exponents -= tl.load(costs_ptr + (o_costs[:, None] + labels_y[None, :]))
    plan = power_of_two(exponents)  # (128, WIDTH)
    of_columns = tl.sum(tl.reshape(plan, (BLOCK_M // 16, 2, 8, WIDTH)), 1)
    of_columns = tl.sum(tl.reshape(of_columns, (BLOCK_M // 16, 2, 4, WIDTH)), 1)
    of_columns = tl.sum(tl.reshape(of_columns, (BLOCK_M // 16, 2, 2, WIDTH)), 1)
    of_columns = tl.sum(of_columns, 1)  # (8, WIDTH)
    of_rows = tl.sum(tl.reshape(plan, (BLOCK_M, WIDTH // 8, 4, 2)), 3)
    for _ in tl.static_range(LOG_WIDTH - 3):
        of_rows = tl.sum(tl.reshape(of_rows, (BLOCK_M, 2, of_rows.shape[1] // 2, 4)), 1)
    return tl.reshape(of_rows, (BLOCK_M, 4)), of_columns
