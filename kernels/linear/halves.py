"""Columns of float64 numbers as sums hi + lo of two float16, for tensor cores.

    packed = 2^e (values weights) in packed order,      hi = half(packed),  lo = half(packed - hi)

The power of two of a column brings its largest number below 2^14, so that none overflows. Padding
is 0. Results of products with hi and lo, or with their sum, go the same way back.

Shapes: values (N, s), packed (n, 2, s), or more columns.
"""

from __future__ import annotations

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


@triton.jit
def load_parts(found_ptr, o_row, row_stride, part_stride, mask, PARTS: tl.constexpr):
    """What products of both halves, or of their sum, are together, float64."""
    p_found = found_ptr + o_row * row_stride
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
    scales_ptr,  # (s,) float64
    n,
    s,
    row_stride,
    column_stride,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per column."""
    i = tl.program_id(0).to(tl.int64)
    values_ptr += i * column_stride
    largest = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        filled = tl.load(filled_ptr + o, mask=o < n, other=0) != 0
        origin = tl.load(origin_ptr + o, mask=filled, other=0)
        values = tl.load(values_ptr + origin * row_stride, mask=filled, other=0.0).to(tl.float64)
        if WEIGHTS:
            values *= tl.load(weights_ptr + origin, mask=filled, other=0.0)
        largest = tl.maximum(largest, tl.abs(values))
    scale = scale_below(tl.max(largest, 0))
    tl.store(scales_ptr + i, scale)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        filled = tl.load(filled_ptr + o, mask=o < n, other=0) != 0
        origin = tl.load(origin_ptr + o, mask=filled, other=0)
        values = tl.load(values_ptr + origin * row_stride, mask=filled, other=0.0).to(tl.float64)
        if WEIGHTS:
            values *= tl.load(weights_ptr + origin, mask=filled, other=0.0)
        store_halves(out_ptr + o.to(tl.int64) * 2 * s + i, values * scale, s, o < n)


@on_its_device
@triton.jit
def from_halves_kernel(
    found_ptr,  # (n, PARTS, s) float32, of any strides but 1 between columns
    scales_ptr,  # (s,) float64
    weights_ptr,  # (N,) float64
    position_ptr,  # (N,) int64
    out_ptr,  # (N, s) float64, columns of stride N
    count,
    row_stride,
    part_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK points of a column."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.program_id(1).to(tl.int64)
    mask = o < count
    o_row = tl.load(position_ptr + o, mask=mask, other=0)
    found = load_parts(found_ptr + i, o_row, row_stride, part_stride, mask, PARTS)
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
    make = torch.empty if width == count else torch.zeros
    packed = make((layout.size, 2, width), dtype=torch.float16, device=values.device)
    scales = torch.empty(count, dtype=torch.float64, device=values.device)
    to_halves_kernel[(count,)](
        values,
        values if weights is None else weights,
        layout.origin,
        layout.filled,
        packed,
        scales,
        layout.size,
        width,
        *values.stride(),
        WEIGHTS=weights is not None,
        BLOCK=BLOCK,
        num_warps=16,
    )
    return packed, scales


def from_halves(found: Tensor, scales: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    """Weights (N,) times what products of such columns stand for, (N, s) float64.

    Args:
        found: (n, 2, s) float32, of hi and of lo parts; or (n, 1, s), of both.
        scales: (s,) float64.
        layout: of the n packed rows.
        weights: (N,) float64.
    """
    (_, parts, count), points, block = found.shape, len(layout.position), 1024
    out = torch.empty((count, points), dtype=torch.float64, device=found.device)
    from_halves_kernel[(triton.cdiv(points, block), count)](
        found,
        scales,
        weights,
        layout.position,
        out,
        points,
        *found.stride()[:2],
        PARTS=parts,
        BLOCK=block,
    )
    return out.T
