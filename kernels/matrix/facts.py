"""A cost matrix in memory as kernels find it, and facts of its rows by one read of it.

A `Place` is the address of a matrix, the stride between its rows and its sizes, in device memory.
Arguments by value are fixed when a CUDA graph records a launch; numbers that its kernel loads are
not. So one recording serves every matrix of a type and an alignment with no more rows and columns,
and kernels must read address and sizes from it (`load_place`). `operators.matrix_kernel` and
`operators.kernel_pool` make a `Place`; all kernels of this folder but those of `half_step` read it.

Facts are, of the finite entries of a row: the lowest and the highest in columns with mass, the
largest |C_ij| in all columns, and sum_j C_ij q_j for masses q, in float64. And whether any entry is
NaN or -inf, which is no cost, or +inf, a forbidden pair. `operators.matrix_kernel` and
`operators.kernel_pool` call `matrix_row_facts`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device

# Bytes of which address and rows of an aligned matrix are multiples: those of a load by a thread.
ALIGNMENT = 16

TYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


class Place(NamedTuple):
    """A matrix (n, m) whose rows are contiguous; the caller must keep the matrix alive.

    Attributes:
        numbers: (4,) int64, its address, how many entries a row starts after the last, n and m.
        dtype: float16, bfloat16 or float32.
        aligned: of `is_aligned`.
    """

    numbers: Tensor
    dtype: torch.dtype
    aligned: bool

    @classmethod
    def of(cls, matrix: Tensor) -> Place:
        numbers = torch.tensor(numbers_of(matrix), dtype=torch.int64).to(matrix.device)
        return cls(numbers, matrix.dtype, is_aligned(matrix))

    @property
    def constants(self) -> dict[str, Any]:
        """Constants that kernels are compiled for; ALIGNED in entries, 1 if not aligned."""
        aligned = ALIGNMENT // self.dtype.itemsize if self.aligned else 1
        return {"TYPE": TYPES[self.dtype], "ALIGNED": aligned}


def numbers_of(matrix: Tensor) -> tuple[int, int, int, int]:
    """The numbers of a place."""
    return matrix.data_ptr(), matrix.stride(0), matrix.shape[0], matrix.shape[1]


def is_aligned(matrix: Tensor) -> bool:
    """Whether the address of a matrix and the bytes of its rows are multiples of `ALIGNMENT`."""
    address, *sizes = matrix.data_ptr(), matrix.stride(0), matrix.shape[1]
    return address % ALIGNMENT == 0 and all(
        size * matrix.itemsize % ALIGNMENT == 0 for size in sizes
    )


@triton.jit
def load_place(place_ptr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to the matrix, its stride, and n and m."""
    costs_ptr = tl.load(place_ptr).to(tl.pointer_type(TYPE))
    stride = tl.load(place_ptr + 1)
    n, m = tl.load(place_ptr + 2).to(tl.int32), tl.load(place_ptr + 3).to(tl.int32)
    if ALIGNED > 1:
        costs_ptr = tl.multiple_of(costs_ptr, 16)
        stride, m = tl.multiple_of(stride, ALIGNED), tl.multiple_of(m, ALIGNED)
    return costs_ptr, stride, n, m


# Rows and columns of a tile.
TILE = 4, 512
WARPS = 4


class RowFacts(NamedTuple):
    """Facts of the rows of a matrix, (n,) each.

    Attributes:
        lowest: float32, inf in rows without a finite entry at a point with mass.
        highest: float32, -inf in rows without a finite entry at a point with mass.
        extreme: float32.
        products: float64.
        flags: int32; 1 for an entry that is no cost, 2 for a forbidden pair, 3 for both.
    """

    lowest: Tensor
    highest: Tensor
    extreme: Tensor
    products: Tensor
    flags: Tensor


@on_its_device
@triton.jit
def matrix_facts_kernel(
    place_ptr,  # (4,) int64, of C (n, m)
    masses_ptr,  # (m,) float64
    lowest_ptr,  # (n,) float32
    highest_ptr,  # (n,) float32
    extreme_ptr,  # (n,) float32
    products_ptr,  # (n,) float64
    flags_ptr,  # (n,) int32
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per ROWS rows."""
    costs_ptr, stride, n, m = load_place(place_ptr, TYPE, ALIGNED)
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < n
    p_row = costs_ptr + o_row * stride
    lowest = tl.full((ROWS, LANES), float("inf"), tl.float32)
    highest = tl.full((ROWS, LANES), -float("inf"), tl.float32)
    extreme = tl.zeros((ROWS, LANES), tl.float32)
    products = tl.zeros((ROWS, LANES), tl.float64)
    flags = tl.zeros((ROWS, LANES), tl.int32)
    for column in range(0, m, LANES):
        o_column = column + tl.arange(0, LANES)
        m_column = o_column < m
        masses = tl.load(masses_ptr + o_column, mask=m_column, other=0.0)
        m_tile = m_row[:, None] & m_column[None, :]
        costs = tl.load(p_row[:, None] + o_column[None, :], mask=m_tile, other=0.0).to(tl.float32)
        # A comparison with NaN is false.
        wrong = tl.where(costs > -float("inf"), 0, 1)
        flags = flags | wrong | tl.where(costs == float("inf"), 2, 0)
        finite = (costs > -float("inf")) & (costs < float("inf"))
        counted = finite & (masses > 0)[None, :]
        lowest = tl.minimum(lowest, tl.where(counted, costs, float("inf")))
        highest = tl.maximum(highest, tl.where(counted, costs, -float("inf")))
        extreme = tl.maximum(extreme, tl.where(finite, tl.abs(costs), 0.0))
        products += tl.where(finite, costs, 0.0).to(tl.float64) * masses[None, :]
    # One maximum for each bit: that of both as a number would lose the 1 of a row with a 2.
    wrong, closed = tl.max(flags & 1, 1), tl.max(flags & 2, 1)
    tl.store(lowest_ptr + o_row, tl.min(lowest, 1), mask=m_row)
    tl.store(highest_ptr + o_row, tl.max(highest, 1), mask=m_row)
    tl.store(extreme_ptr + o_row, tl.max(extreme, 1), mask=m_row)
    tl.store(products_ptr + o_row, tl.sum(products, 1), mask=m_row)
    tl.store(flags_ptr + o_row, wrong | closed, mask=m_row)


def matrix_row_facts(place: Place, n: int, masses: Tensor) -> RowFacts:
    """The facts of all rows.

    Args:
        place: of C (n, m).
        n: how many rows there are, or more; facts of rows that are not there are unspecified.
        masses: (m,) float64, q, not negative; points of mass 0 are left out of the range.
    """
    rows, lanes = TILE
    types = torch.float32, torch.float32, torch.float32, torch.float64, torch.int32
    facts = RowFacts._make(torch.empty(n, dtype=dtype, device=masses.device) for dtype in types)
    matrix_facts_kernel[(triton.cdiv(n, rows),)](
        place.numbers, masses, *facts, **place.constants, ROWS=rows, LANES=lanes, num_warps=WARPS
    )
    return facts
