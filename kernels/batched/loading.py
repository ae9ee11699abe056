"""What the kernels of small matrices share: how a program loads and stores its matrices.

A program holds BATCH problems, padded to N rows and M columns. Tiles are (N, BATCH, M), loaded as
(N, BATCH * M): consecutive threads hold consecutive columns and then matrices, so that most of a
column is in one thread, and sums along it take few exchanges.

`small_balance` and `small_balance_backward` prepare their launches by `launch`; their kernels begin
with `sides`, `load_logits` and `load_both_masses`. `small_adjoint` loads and stores its tiles by
the functions here, too. `tiny_balance` and its backward pass have loads of their own, and take
`padded` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from otdd_flash.kernels.batched.problems import Problems, computed_in

LOG2_E = tl.constexpr(math.log2(math.e))


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

    Less the largest of its row, no entry is rounded by more than the range of the matrix.
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
    """What a program holds.

    Attributes:
        matrices: of it.
        warps: of it.
        registers: of a thread at the most where matrices alone are asked for; what is done again in
            the log domain, which is rare, would take more, and spills them instead.
    """

    matrices: int
    warps: int
    registers: int | None = None


# Of matrices larger than any that a kernel's packings name.
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
        problems: what is balanced.
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
        # What is None is not read.
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
