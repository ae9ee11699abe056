"""Scalings of the rows and columns of tiles (N, BATCH, M), of themselves or by logarithms.

Those of rows are (N, BATCH), those of columns (BATCH, M).

With LOG kernel and masses are logarithms to base 2, and a scaling is a pair whose sum is its
logarithm: the largest exponent of its sum, with the opposite sign, and what is left, which is
small. Logits and the first of a pair are multiples of a number, so that their sums are exact: in
float32 those of logits of 1e4 would be rounded by 1e-3, in every iteration anew. A grid (BATCH,) is
a number that values are rounded by, as (value + grid) - grid. `small_balance`, `tiny_balance` and
their backward passes call these functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What scalings may grow to where an entry of E was lost to 0, and where none was.
MOST_SCALING = tl.constexpr(2.0**30)
MOST_WITHOUT_LOSS = tl.constexpr(2.0**96)
# Entries of E below it have their scalings in the log domain.
LOG2_SMALL = tl.constexpr(-60.0)
SMALL = tl.constexpr(2.0**-60)


@triton.jit
def first_scalings(logits, a, b, m_row, m_column):
    """Logarithms to base 2 of the scalings of the first iteration."""
    exponents = logits if b is None else logits + tl.log2(b)[None, :, :]
    u = tl.where(m_row, -log_sum(exponents, 2), 0)
    exponents = logits + (u if a is None else u + tl.log2(a))[:, :, None]
    return u, tl.where(m_column, -log_sum(exponents, 0), 0)


@triton.jit
def first_kernel(logits, u, v, a, m_column):
    """E (N, BATCH, M) of the scalings of the first iteration; without masses columns sum to 1.

    Logarithms are rounded by the range of logits, and columns by as much after a single iteration.
    """
    kernel = tl.exp2(logits + u[:, :, None] + v[None, :, :])
    if a is None:
        kernel *= tl.where(m_column, 1 / tl.sum(kernel, 0), 0)[None, :, :]
    return kernel


@triton.jit
def with_masses(values, masses, AXIS: tl.constexpr):
    """Values times the masses of rows (AXIS 2), or of columns, which are 1 where they are None."""
    return values if masses is None else values * tl.expand_dims(masses, AXIS)


@triton.jit
def log_sum(exponents, AXIS: tl.constexpr):
    """log2 sum 2^exponents along an axis, -inf where all of them are."""
    highest = tl.max(exponents, AXIS)
    highest = tl.where(highest > -float("inf"), highest, 0)
    return highest + tl.log2(tl.sum(tl.exp2(exponents - tl.expand_dims(highest, AXIS)), AXIS))


@triton.jit
def scaling(kernel, other, rest, masses, grid, m_side, AXIS: tl.constexpr, LOG: tl.constexpr):
    """1 / sums along columns (AXIS 2) or rows, a pair with LOG, and 0 beyond the side."""
    sums, sums_rest = sums_of(kernel, other, rest, masses, grid, AXIS, LOG)
    return inverse(sums, sums_rest, m_side, LOG)


@triton.jit
def sums_of(kernel, other, rest, masses, grid, AXIS: tl.constexpr, LOG: tl.constexpr):
    """Sums along columns (AXIS 2) or rows of the kernel, times what is scaled and its masses.

    With LOG, of scalings other + rest, the pair of largest exponents and what they leave.
    """
    if LOG:
        low = tl.expand_dims(rest if masses is None else rest + masses, 2 - AXIS)
        exponents = kernel + tl.expand_dims(other, 2 - AXIS)
        found = on_grid(tl.max(exponents + low, AXIS), tl.expand_dims(grid, 1 - AXIS // 2))
        found = tl.where(found > -float("inf"), found, 0)
        terms = exponents - tl.expand_dims(found, AXIS) + low
        # A coarse grid leaves much of the largest in what is left.
        left = tl.max(terms, AXIS)
        left = tl.where(left > -float("inf"), left, 0)
        found_rest = left + tl.log2(tl.sum(tl.exp2(terms - tl.expand_dims(left, AXIS)), AXIS))
    else:
        other = other if masses is None else other * masses
        found = tl.sum(kernel * tl.expand_dims(other, 2 - AXIS), AXIS)
        found_rest = tl.zeros_like(found)
    return found, found_rest


@triton.jit
def inverse(sums, rest, m_side, LOG: tl.constexpr):
    """1 / sums, the negative of both with LOG, 0 beyond the side."""
    found = -sums if LOG else reciprocal(sums)
    return tl.where(m_side, found, 0), tl.where(m_side, -rest, 0)


@triton.jit
def reciprocal(x):
    """1 / x of positive numbers: the square of 1 / sqrt(x), but for float64.

    One instruction each where a quotient is eight, and right to three units in the last place.
    """
    if x.dtype == tl.float64:
        found = 1 / x
    else:
        root = tl.rsqrt(x)
        found = root * root
    return found


@triton.jit
def scaled(kernel, phi, phi_rest, gamma, gamma_rest, a, b, LOG: tl.constexpr):
    """a_i phi_i K_ij gamma_j b_j (N, BATCH, M) of scalings and masses, themselves with LOG as well.

    Masses that are None are 1.
    """
    if LOG:
        phi_rest = phi_rest if a is None else phi_rest + a
        gamma_rest = gamma_rest if b is None else gamma_rest + b
        exponents = kernel + phi[:, :, None] + gamma[None, :, :]
        found = tl.exp2(exponents + (phi_rest[:, :, None] + gamma_rest[None, :, :]))
    else:
        phi = phi if a is None else phi * a
        gamma = gamma if b is None else gamma * b
        # Scalings may be far apart, and their product is nearer to 1 than that with an entry.
        found = kernel * (phi[:, :, None] * gamma[None, :, :])
    return found


@triton.jit
def grid_of(logits):
    """A number (BATCH,) that takes values to a grid by its sum, of twice the range of logits."""
    lowest = tl.min(tl.min(tl.where(logits > -float("inf"), logits, 0), 0), 1)
    return -2 * lowest


@triton.jit
def on_grid(values, grid):
    """Values rounded to multiples of the last place of the grid's number."""
    return (values + grid) - grid


@triton.jit
def smallest_entry(kernel, logits):
    """The smallest entry (BATCH,) of pairs that are not forbidden."""
    return tl.min(tl.min(tl.where(logits > -float("inf"), kernel, 1), 0), 1)


@triton.jit
def in_logs(smallest, most, TINY: tl.constexpr):
    """Which matrices are done again, by their smallest entry of E and largest scaling."""
    limit = tl.where(smallest < TINY, MOST_SCALING, MOST_WITHOUT_LOSS)
    # Overflow ends in NaN or infinity, which are not below any number.
    return (most <= limit) == 0
