"""Device functions that kernels of small matrices share: loads, stores and scalings.

A program holds BATCH problems, padded to N rows and M columns. Tiles are (N, BATCH, M), loaded as
(N, BATCH * M): consecutive threads hold consecutive columns and then matrices, so that most of a
column is in one thread, and sums along it take few exchanges.

`small_balance` and `small_balance_backward` prepare their launches by `launch`, which returns the
first arguments of their kernels in order, so both must change together; their kernels begin with
`sides`, `load_logits` and `load_both_masses`. `small_adjoint` loads and stores its tiles by the
functions here. `tiny_balance` and `tiny_balance_backward` have loads of their own; both use
`padded` and `in_logs`, the former also `on_grid` and `reciprocal`. The order of a sum must depend
on sizes and type alone, so that a matrix gets the same bits among any others (`tests/batched`).

Scalings of rows are (N, BATCH), those of columns (BATCH, M), as they are or by logarithms. With
LOG, kernel and masses are logarithms to base 2, and a scaling is a pair whose sum is its logarithm:
the largest exponent of the sum it inverts, with the opposite sign, and the small rest. Logits and
the first of a pair are multiples of one number, so that their sums are exact: in float32 the sums
of logits of 1e4 would be rounded by 1e-3, in every iteration anew. A grid (BATCH,) is the number by
which values are rounded, as (value + grid) - grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from otdd_flash.kernels.batched.problems import Problems, computed_in
from otdd_flash.kernels.launch import LOG2_E


@triton.jit
def batch_of(BATCH: tl.constexpr):
    """Places (BATCH,) of a program's problems."""
    return tl.program_id(0).to(tl.int64) * BATCH + tl.arange(0, BATCH)


@triton.jit
def sides(
    sizes_ptr, count, n, m, SIZES: tl.constexpr, FULL: tl.constexpr, BATCH: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Which rows (N, BATCH) and columns (BATCH, M) there are: with FULL all, known in advance.

    Matrices beyond the last have them as well, all of zeros.
    """
    if FULL:
        m_row, m_column = tl.full((N, BATCH), True, tl.int1), tl.full((BATCH, M), True, tl.int1)
    else:
        rows = tl.full((BATCH,), n, tl.int32)
        columns = tl.full((BATCH,), m, tl.int32)
        if SIZES:
            o_batch = batch_of(BATCH)
            m_batch = o_batch < count
            rows = tl.load(sizes_ptr + 2 * o_batch, mask=m_batch, other=1)
            columns = tl.load(sizes_ptr + 2 * o_batch + 1, mask=m_batch, other=1)
        m_row = tl.arange(0, N)[:, None] < rows[None, :]
        m_column = tl.arange(0, M)[None, :] < columns[:, None]
    return m_row, m_column


@triton.jit
def load_both_masses(a_ptr, b_ptr, count, m_row, m_column, a_stride, b_stride, TYPE: tl.constexpr):
    """Load the masses of rows (N, BATCH) and of columns (BATCH, M)."""
    o_batch = batch_of(m_row.shape[1])
    o_row, o_column = (
        tl.arange(0, m_row.shape[0])[:, None],
        tl.arange(0, m_column.shape[1])[None, :],
    )
    a = load_masses(a_ptr, o_batch[None, :], o_row, count, m_row, a_stride, TYPE)
    b = load_masses(b_ptr, o_batch[:, None], o_column, count, m_column, b_stride, TYPE)
    return a, b


@triton.jit
def load_masses(masses_ptr, o_batch, o, count, m_side, stride, TYPE: tl.constexpr):
    """Load the masses of rows `o` (N, 1), or of columns (1, M); those beyond the side are 0.

    Matrices beyond the last get unit mass on their first row and column. Equal totals on both sides
    let them converge at once; otherwise the whole program would go on to the last iteration.
    """
    m_batch = o_batch < count
    loaded = tl.load(masses_ptr + o_batch * stride + o, mask=m_side & m_batch, other=0.0).to(TYPE)
    return tl.where(m_side & (m_batch == 0), (o == 0).to(TYPE), loaded)


@triton.jit
def load_logits(
    matrices_ptr, scale_ptr, count, m_row, m_column, stride, row_stride, column_stride,
    scale_stride, TYPE: tl.constexpr, NEGATED: tl.constexpr, CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """(x - h 1^T) / t times log2(e), -inf beyond the matrix; h (N, BATCH), the row maxima; 1 / t.

    The largest of a row is subtracted, so that roundings are relative to the range of the matrix.
    """
    m_entry = m_row[:, :, None] & m_column[None, :, :]
    o_batch = batch_of(m_entry.shape[1])
    p_entries = places(matrices_ptr, stride, row_stride, column_stride, m_entry.shape, CONTIGUOUS)
    x = load_tile(p_entries, m_entry & (o_batch < count)[None, :, None]).to(TYPE)
    x = tl.where(m_entry, -x if NEGATED else x, -float("inf"))
    highest = tl.where(m_row, tl.max(x, 2), 0)
    scale = tl.load(scale_ptr + o_batch * scale_stride, mask=o_batch < count, other=1.0)
    # Neither negative nor infinite temperatures have a meaning.
    scale = tl.where(scale > 0, scale, float("nan"))
    logits = (x - highest[:, :, None]) * (scale * LOG2_E).to(TYPE)[None, :, None]
    return logits, highest, scale


@triton.jit
def places(
    matrices_ptr, stride, row_stride, column_stride, SHAPE: tl.constexpr, CONTIGUOUS: tl.constexpr
):
    """Pointers (N, BATCH * M) to entries; CONTIGUOUS, of matrices N by M, is known in advance."""
    N: tl.constexpr = SHAPE[0]
    BATCH: tl.constexpr = SHAPE[1]
    M: tl.constexpr = SHAPE[2]
    o_row = tl.arange(0, N).to(tl.int64)[:, None]
    o_wide = tl.arange(0, BATCH * M)[None, :]
    o_matrix = tl.program_id(0).to(tl.int64) * BATCH + o_wide // M
    o_column = o_wide % M
    if CONTIGUOUS:
        p_entries = matrices_ptr + o_matrix * (N * M) + o_row * M + o_column
    else:
        p_entries = matrices_ptr + o_matrix * stride + o_row * row_stride
        p_entries += o_column.to(tl.int64) * column_stride
    return p_entries


@triton.jit
def first_rows(matrices_ptr, stride, column_stride, BATCH: tl.constexpr, M: tl.constexpr):
    """Pointers (1, BATCH * M) to the first rows of matrices."""
    o_wide = tl.arange(0, BATCH * M)[None, :]
    o_matrix = tl.program_id(0).to(tl.int64) * BATCH + o_wide // M
    return matrices_ptr + o_matrix * stride + (o_wide % M).to(tl.int64) * column_stride


@triton.jit
def load_tile(p_entries, m_entry):
    """Entries (N, BATCH, M), 0 where there is none."""
    loaded = tl.load(p_entries, mask=tl.reshape(m_entry, p_entries.shape), other=0.0)
    return tl.reshape(loaded, m_entry.shape)


@triton.jit
def store_tile(p_entries, tile, m_entry):
    """Store entries (N, BATCH, M), nothing where there is none."""
    wide = tl.reshape(tile.to(p_entries.dtype.element_ty), p_entries.shape)
    tl.store(p_entries, wide, mask=tl.reshape(m_entry, p_entries.shape))


@triton.jit
def load_numbers(numbers_ptr, o_batch, o, count, size):
    """Numbers of rows (N, BATCH), or of columns (BATCH, M), of (B, size)."""
    m = (o_batch < count) & (o < size)
    return tl.load(numbers_ptr + o_batch * size + o, mask=m, other=0.0)


@triton.jit
def store_numbers(numbers_ptr, o_batch, o, count, size, numbers):
    """Store numbers of rows (N, BATCH), or of columns (BATCH, M), as (B, size)."""
    m = (o_batch < count) & (o < size)
    tl.store(numbers_ptr + o_batch * size + o, numbers, mask=m)


class Packing(NamedTuple):
    """The tiles that a program holds.

    Attributes:
        matrices: of it.
        warps: of it.
        registers: of a thread at the most, but for potentials; a repeat in the log domain, which is
            rare, would take more, and spills them instead.
    """

    matrices: int
    warps: int
    registers: int | None = None


# The packing of matrices larger than any that a kernel's packings name.
LARGER = Packing(1, 16)


@cache
def padded(n: int, m: int) -> tuple[int, int]:
    """Rows and columns of the tile of a matrix (n, m): powers of two from 2."""
    return max(2, triton.next_power_of_2(n)), max(2, triton.next_power_of_2(m))


def packing_for(
    packings: Mapping[int, Packing], n: int, m: int, dtype: torch.dtype, beyond: Packing
) -> Packing:
    """Choose the packing by the bytes of a padded matrix (n, m) in the type to compute in."""
    rows, columns = padded(n, m)
    size = rows * columns * dtype.itemsize
    return next((found for most, found in packings.items() if size <= most), beyond)


def launch(
    problems: Problems, packings: Mapping[int, Packing]
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Prepare a launch that balances, forward or backward, of at least one matrix.

    Args:
        problems: the matrices to balance.
        packings: of the kernel, by the bytes of a padded matrix up to which each holds.

    Returns:
        The grid; the first arguments of the kernel, up to `b_stride`; and its constants and options
        that do not depend on what else is asked for.
    """
    matrices, scale, a, b, sizes, iterations, tolerance, negated = problems
    (count, n, m), dtype = matrices.shape, computed_in(matrices)
    packing, (rows, columns) = packing_for(packings, n, m, dtype, LARGER), padded(n, m)
    whole = (n, m) == (rows, columns)
    given = (
        matrices,
        scale,
        # A tensor in place of None is not read.
        *(matrices if one is None else one for one in (a, b, sizes)),
        count,
        n,
        m,
        iterations,
        *matrices.stride(),
        scale.stride(0) if scale.ndim else 0,
        *(masses.stride(0) if masses is not None and masses.ndim == 2 else 0 for masses in (a, b)),
    )
    options = {
        "TYPE": tl.float64 if dtype == torch.float64 else tl.float32,
        "TINY": torch.finfo(dtype).tiny,
        "NEGATED": negated,
        "MASSES": a is not None,
        "SIZES": sizes is not None,
        "FULL": sizes is None and whole,
        "CONTIGUOUS": whole and matrices.is_contiguous(),
        "STOP": tolerance is not None,
        "BATCH": packing.matrices,
        "N": rows,
        "M": columns,
        "num_warps": packing.warps,
        "maxnreg": packing.registers,
    }
    return (-(-count // packing.matrices),), given, options


# The largest scalings allowed where an entry of E was lost to 0, and where none was.
MOST_SCALING = tl.constexpr(2.0**30)
MOST_WITHOUT_LOSS = tl.constexpr(2.0**96)
# Where an entry of E is below it, that of R is computed in the log domain.
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
    """Sums along columns (AXIS 2) or rows of the kernel times the other scalings and masses.

    With LOG, of scalings other + rest, the pair of largest exponents and remainders.
    """
    if LOG:
        low = tl.expand_dims(rest if masses is None else rest + masses, 2 - AXIS)
        exponents = kernel + tl.expand_dims(other, 2 - AXIS)
        found = on_grid(tl.max(exponents + low, AXIS), tl.expand_dims(grid, 1 - AXIS // 2))
        found = tl.where(found > -float("inf"), found, 0)
        terms = exponents - tl.expand_dims(found, AXIS) + low
        # A coarse grid leaves much of the largest in the remainder.
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
