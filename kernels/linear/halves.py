"""Columns of float64 numbers as sums hi + lo of two float16, for tensor cores.

    packed = 2^e (values weights) in packed order,      hi = half(packed),  lo = half(packed - hi)

The power of two of a column brings its largest number below 2^14, so that none overflows. Padding
is 0. Results of products with hi and lo, or with their sum, go the same way back.

Shapes: values (N, s), packed (n, 2, s), or more columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.points.packed_points import Layout

LARGEST = tl.constexpr(2.0**14)
# The smallest number whose logarithm is taken, a float32.
TINY = tl.constexpr(2.0**-126)
BLOCK = 4096


@triton.jit
def scale_below(largest):
    """The power of two that brings the largest size of a column below 2^14, float64."""
    exponent = tl.ceil(tl.log2(tl.maximum(largest, TINY)))
    return tl.exp2(-exponent) * LARGEST


@triton.jit
def store_halves(p_out, values, s, mask):
    """Scaled float64 values as hi, and as lo where another s numbers further on."""
    high = values.to(tl.float32).to(tl.float16)
    low = (values - high.to(tl.float64)).to(tl.float32).to(tl.float16)
    tl.store(p_out, high, mask=mask)
    tl.store(p_out + s, low, mask=mask)


class Unmerged(NamedTuple):
    """What tensor cores found of columns of halves, rows of it in several slots to be added up.

    Attributes:
        values: (stored, parts, s) float32, of both halves or of their sum; or float64. Slots beyond
            the first follow the rows.
        whole: rows, the first ones, that have one slot.
        split: rows after them, which have `slots` each.
        slots: 1 where nothing is to be added up.
    """

    values: Tensor
    whole: int
    split: int
    slots: int

    @classmethod
    def of(cls, values: Tensor) -> Unmerged:
        """Rows of one slot, (n, parts, s)."""
        return cls(values, len(values), 0, 1)

    @property
    def places(self) -> tuple[int, ...]:
        """Strides of rows, parts and columns, and which rows have slots, as kernels take them."""
        return *self.values.stride(), self.whole, self.split, self.slots

    def merged(self) -> Tensor:
        """All of them added up, (n, parts, s)."""
        if self.slots == 1:
            return self.values
        once, rest = self.values[: self.whole], self.values[self.whole :]
        return torch.cat((once, rest.view(self.slots, self.split, *rest.shape[1:]).sum(0)))


@triton.jit
def load_found(
    found_ptr,
    o_row,  # int64
    row_stride,
    part_stride,
    whole,
    split,
    slots,
    mask,
    PARTS: tl.constexpr,
):
    """What the products of a row are together, float64."""
    found = load_parts(found_ptr + o_row * row_stride, part_stride, mask, PARTS)
    for k in range(1, slots):
        p_found = found_ptr + (o_row + k * split) * row_stride
        found += load_parts(p_found, part_stride, mask & (o_row >= whole), PARTS)
    return found


@triton.jit
def load_parts(p_found, part_stride, mask, PARTS: tl.constexpr):
    """What products of both halves, or of their sum, are together, float64."""
    found = tl.load(p_found, mask=mask, other=0.0).to(tl.float64)
    if PARTS == 2:
        found += tl.load(p_found + part_stride, mask=mask, other=0.0).to(tl.float64)
    return found


@on_its_device
@triton.jit
def to_halves_kernel(
    values_ptr,  # (N, s) float32 or float64, of any strides
    weights_ptr,  # (N,) float64, read if WEIGHTS
    origin_ptr,  # (n,) int64
    filled_ptr,  # (n,) bool
    out_ptr,  # (n, 2, s) float16
    scales_ptr,  # (given,) float64
    n,
    s,
    given,
    row_stride,
    column_stride,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per column, of which those from `given` on are 0."""
    i = tl.program_id(0).to(tl.int64)
    values_ptr += i * column_stride
    largest = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        filled = (tl.load(filled_ptr + o, mask=o < n, other=0) != 0) & (i < given)
        origin = tl.load(origin_ptr + o, mask=filled, other=0)
        values = tl.load(values_ptr + origin * row_stride, mask=filled, other=0.0).to(tl.float64)
        if WEIGHTS:
            values *= tl.load(weights_ptr + origin, mask=filled, other=0.0)
        largest = tl.maximum(largest, tl.abs(values))
    scale = scale_below(tl.max(largest, 0))
    tl.store(scales_ptr + i, scale, mask=i < given)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        filled = (tl.load(filled_ptr + o, mask=o < n, other=0) != 0) & (i < given)
        origin = tl.load(origin_ptr + o, mask=filled, other=0)
        values = tl.load(values_ptr + origin * row_stride, mask=filled, other=0.0).to(tl.float64)
        if WEIGHTS:
            values *= tl.load(weights_ptr + origin, mask=filled, other=0.0)
        store_halves(out_ptr + o.to(tl.int64) * 2 * s + i, values * scale, s, o < n)


@on_its_device
@triton.jit
def from_halves_kernel(
    found_ptr,  # (stored, PARTS, s) float32, of any strides
    scales_ptr,  # (s,) float64
    weights_ptr,  # (N,) float64
    position_ptr,  # (N,) int64
    out_ptr,  # (N, s) float64, columns of stride N
    count,
    row_stride,
    part_stride,
    column_stride,
    whole,
    split,
    slots,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK points of a column."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.program_id(1).to(tl.int64)
    mask = o < count
    o_row = tl.load(position_ptr + o, mask=mask, other=0)
    found_ptr += i * column_stride
    found = load_found(found_ptr, o_row, row_stride, part_stride, whole, split, slots, mask, PARTS)
    weights = tl.load(weights_ptr + o, mask=mask, other=0.0)
    tl.store(out_ptr + i * count + o, weights * (found / tl.load(scales_ptr + i)), mask=mask)


def to_halves(
    values: Tensor, layout: Layout, weights: Tensor | None = None, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Values (N, s) times weights (N,) as (n, 2, width) float16, and their scales (s,) float64.

    Args:
        values: float32 or float64, of any strides.
        layout: of the n packed rows.
        weights: float64.
        multiple: of which the width is one, with columns of zeros.
    """
    count = values.shape[1]
    width = triton.cdiv(count, multiple) * multiple
    packed = torch.empty((layout.size, 2, width), dtype=torch.float16, device=values.device)
    scales = torch.empty(count, dtype=torch.float64, device=values.device)
    to_halves_kernel[(width,)](
        values,
        values if weights is None else weights,
        layout.origin,
        layout.filled,
        packed,
        scales,
        layout.size,
        width,
        count,
        *values.stride(),
        WEIGHTS=weights is not None,
        BLOCK=BLOCK,
        num_warps=16,
    )
    return packed, scales


def from_halves(found: Unmerged, scales: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    """Weights (N,) times what products of such columns stand for, (N, s) float64.

    Args:
        found: products of hi and of lo parts, or of both; columns beyond s are not read.
        scales: (s,) float64.
        layout: of the n packed rows.
        weights: (N,) float64.
    """
    parts, count = found.values.shape[1], len(scales)
    points, block = len(layout.position), 1024
    out = torch.empty((count, points), dtype=torch.float64, device=scales.device)
    from_halves_kernel[(triton.cdiv(points, block), count)](
        found.values,
        scales,
        weights,
        layout.position,
        out,
        points,
        *found.places,
        PARTS=parts,
        BLOCK=block,
    )
    return out.T
