"""A copy of a cost matrix in float16, from which the minima of its rows are taken away.

    C_ij = unit C'_ij + shift_i,    shift_i = min_j C_ij

with a unit that is a power of two, so that the largest C' is below 2^15. C' is off by 2^-11 of
C_ij - shift_i, and by 2^-40 of the largest of these. +inf stays, and what is too large for float16,
of points without mass, becomes it. Rows are filled up with zeros to whole loads of a thread: they
are columns without mass.

Memory: 2 bytes per entry.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.matrix.place import ALIGNMENT, Place, load_place

# Columns that a program reads at once.
LANES = 2048
WARPS = 8

# The largest number of float16, and the power of two that costs are scaled to.
LARGEST, REACH = 65504.0, 15


@on_its_device
@triton.jit
def matrix_rough_kernel(
    place_ptr,  # (4,) int64, of C (n, m)
    unit_ptr,  # () float32
    copy_ptr,  # (n, stride) float16
    copy_stride,
    shifts_ptr,  # (n,) float32
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LARGEST: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per row."""
    costs_ptr, stride, _, m = load_place(place_ptr, TYPE, ALIGNED)
    row = tl.program_id(0).to(tl.int64)
    p_row, p_copy = costs_ptr + row * stride, copy_ptr + row * copy_stride
    lowest = tl.full((LANES,), float("inf"), tl.float32)
    for column in range(0, m, LANES):
        o_column = column + tl.arange(0, LANES)
        costs = tl.load(p_row + o_column, mask=o_column < m, other=float("inf"))
        lowest = tl.minimum(lowest, costs.to(tl.float32))
    shift = tl.min(lowest, 0)
    shift = tl.where(shift < float("inf"), shift, 0.0)
    tl.store(shifts_ptr + row, shift)
    unit = tl.load(unit_ptr)
    for column in range(0, copy_stride, LANES):
        o_column = column + tl.arange(0, LANES)
        costs = tl.load(p_row + o_column, mask=o_column < m, other=0.0)
        scaled = (costs.to(tl.float32) - shift) / unit
        scaled = tl.where(scaled > LARGEST, float("inf"), scaled)
        scaled = tl.where(o_column < m, scaled, 0.0)
        tl.store(p_copy + o_column, scaled.to(tl.float16), mask=o_column < copy_stride)


def rough_unit(spread: float) -> float:
    """The unit of a copy whose costs are up to `spread` above the minima of their rows."""
    _, exponent = math.frexp(spread)
    return math.ldexp(1.0, exponent - REACH)


def rough_copy(place: Place, size: tuple[int, int], unit: Tensor, shifts: Tensor) -> Tensor:
    """C' (n, m) float16, and columns of zeros after it, so that it is aligned.

    Args:
        place: of C.
        size: n and m.
        unit: () float32, of `rough_unit`.
        shifts: (n,) float32 or longer, overwritten.
    """
    (n, m), entries = size, ALIGNMENT // torch.float16.itemsize
    width = triton.cdiv(m, entries) * entries
    copy = torch.empty((n, width), dtype=torch.float16, device=place.numbers.device)
    matrix_rough_kernel[(n,)](
        place.numbers, unit, copy, width, shifts, **place.constants,
        LARGEST=LARGEST, LANES=LANES, num_warps=WARPS,
    )  # fmt: skip
    return copy
