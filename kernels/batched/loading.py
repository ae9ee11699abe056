"""What a program holds: matrices and masses of BATCH problems, padded to N rows and M columns.

Tiles are (N, BATCH, M), loaded as (N, BATCH * M): consecutive threads hold consecutive columns and
then matrices, so that most of a column is in one thread, and sums along it take few exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from otdd_flash.kernels.batched.small_adjoint import padded

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def sides(
    o_batch, sizes_ptr, count, n, m, SIZES: tl.constexpr, FULL: tl.constexpr, BATCH: tl.constexpr,
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
            m_batch = o_batch < count
            rows = tl.load(sizes_ptr + 2 * o_batch, mask=m_batch, other=1)
            columns = tl.load(sizes_ptr + 2 * o_batch + 1, mask=m_batch, other=1)
        m_row = tl.arange(0, N)[:, None] < rows[None, :]
        m_column = tl.arange(0, M)[None, :] < columns[:, None]
    return m_row, m_column


@triton.jit
def load_logits(
    matrices_ptr, scale_ptr, o_batch, count, m_row, m_column, stride, row_stride, column_stride,
    scale_stride, TYPE: tl.constexpr, NEGATED: tl.constexpr, CONTIGUOUS: tl.constexpr,
    BATCH: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """(x - h 1^T) / t by log2(e), -inf beyond the matrix, h (N, BATCH) largest of rows, and 1 / t.

    Less the largest of its row, no entry is rounded by more than the range of the matrix.
    """
    m_entry = m_row[:, :, None] & m_column[None, :, :]
    p_entries = places(matrices_ptr, stride, row_stride, column_stride, CONTIGUOUS, BATCH, N, M)
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
    matrices_ptr, stride, row_stride, column_stride, CONTIGUOUS: tl.constexpr,
    BATCH: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Pointers (N, BATCH * M) to entries; CONTIGUOUS, of matrices N by M, is known in advance."""
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
def load_masses(masses_ptr, o_batch, o, count, m_side, stride, TYPE: tl.constexpr):
    """Masses of rows `o` (N, 1), or of columns (1, M), 0 beyond the side, of `o_batch` likewise.

    Matrices beyond the last have all of it in one place: their first iteration is enough.
    """
    m_batch = o_batch < count
    loaded = tl.load(masses_ptr + o_batch * stride + o, mask=m_side & m_batch, other=0.0).to(TYPE)
    return tl.where(m_side & (m_batch == 0), (o == 0).to(TYPE), loaded)


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


def packing_for(packings: Mapping[int, Packing], n: int, m: int, dtype: torch.dtype) -> Packing:
    """Choose the packing by the padded entries of a matrix (n, m), twice as many in float64."""
    rows, columns = padded(n, m)
    entries = rows * columns * (dtype.itemsize // 4)
    return next((found for most, found in packings.items() if entries <= most), Packing(1, 16))
