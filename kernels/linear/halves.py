"""Columns of float64 numbers as sums hi + lo of two float16, for tensor cores.

    packed = 2^e (values weights) in packed order,      hi = half(packed),  lo = half(packed - hi)

The power of two of a column brings its largest size to at most 2^14, so that none overflows.
Padding is 0. `from_halves` brings results of products with hi and lo, or with their sum, back to
float64 in the points' own order. `operators.triton_plans` and `passes.block_products` call
`to_halves` before a product of a plan and `from_halves` after it;
`engine.conjugate_gradients_kernels` calls `to_halves` to take the image of values that are no
directions. The kernels of `cg_step` and `cg_start` read products and write halves themselves, by
the device functions here, so a change of the format changes them too
(`tests/kernels/test_linear.py`).

Shapes: values (N, s), packed (n, 2, s), or more columns.

`onward` leads from one product of a plan to the next, from columns of halves to columns of halves,

    packed = 2^e (weights found / scale),      hi = half(packed),  lo = half(packed - hi)

in packed order, without a stop at float64 numbers in the points' own order.
`operators.triton_plans` calls it in P^T diag(w) P v, between the product with P and that with P^T.

Shapes: found (stored, parts, width), packed (n, 2, width), weights (n,), scales (s,). The first s
of the `width` columns are values, the others 0. `found` is an `Unmerged`: a product may leave a row
as several partial sums, which are added up here. The first `whole` rows have one each, the `split`
rows after them `slots` each, and `stored` is the number of all.

`row_sums` makes the sums of a plan's rows of a product with 1, out_i = a_i sum_i, and tells whether
the unscaled sum_i are in `ROW_RANGE` (`passes.score_terms`), outside of which a plan in float16 may
overflow or lose bits. `operators.triton_plans` calls it. Shapes: sums (stored, parts, 1) as
products leave them, a (N,) masses and out (N,) float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.passes.score_terms import ROW_RANGE
from otdd_flash.kernels.points.packed_points import Layout

LARGEST = tl.constexpr(2.0**14)
# The smallest number whose logarithm is taken, a float32.
TINY = tl.constexpr(2.0**-126)
# Numbers of a tile.
BLOCK = 4096
# From so many columns on a program takes several that are adjacent in memory. Eight float32 are a
# sector, the least that memory moves. With fewer columns there would be too few programs.
MANY_COLUMNS, ADJACENT = 256, 8


@triton.jit
def scale_below(largest):
    """The power of two that brings the largest size of a column into (2^13, 2^14], float64."""
    exponent = tl.ceil(tl.log2(tl.maximum(largest, TINY)))
    return tl.exp2(-exponent) * LARGEST


@triton.jit
def store_halves(p_out, values, width, mask):
    """Store scaled float64 values as sums hi + lo, of which lo stands `width` numbers after hi."""
    high = values.to(tl.float32).to(tl.float16)
    low = (values - high.to(tl.float64)).to(tl.float32).to(tl.float16)
    tl.store(p_out, high, mask=mask)
    tl.store(p_out + width, low, mask=mask)


class Unmerged(NamedTuple):
    """Products with columns of halves, as tensor cores leave them: rows may be partial sums.

    Attributes:
        values: (stored, parts, s) float32, or float64; parts are those with hi and with lo, to be
            added up, or one where their sum was multiplied. Of rows with several partial sums the
            first ones stand among the rows, the others after all rows.
        whole: the number of rows with one sum, which are the first.
        split: the number of rows after them, which have `slots` partial sums each.
        slots: 1 where no row has several.
    """

    values: Tensor
    whole: int
    split: int
    slots: int

    @classmethod
    def of(cls, values: Tensor) -> Unmerged:
        """Wrap values (n, parts, s) whose rows have one sum each."""
        return cls(values, len(values), 0, 1)

    @property
    def places(self) -> tuple[int, ...]:
        """Strides of rows, parts and columns, then `whole`, `split` and `slots`, for kernels."""
        return *self.values.stride(), self.whole, self.split, self.slots

    def merged(self) -> Tensor:
        """Add up the partial sums of every row, (n, parts, s)."""
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
    """Add up the parts and the partial sums of a row, float64."""
    found = load_parts(found_ptr + o_row * row_stride, part_stride, mask, PARTS)
    for k in range(1, slots):
        p_found = found_ptr + (o_row + k * split) * row_stride
        found += load_parts(p_found, part_stride, mask & (o_row >= whole), PARTS)
    return found


@triton.jit
def load_parts(p_found, part_stride, mask, PARTS: tl.constexpr):
    """Add up the products with hi and with lo, if they are apart, float64."""
    found = tl.load(p_found, mask=mask, other=0.0).to(tl.float64)
    if PARTS == 2:
        found += tl.load(p_found + part_stride, mask=mask, other=0.0).to(tl.float64)
    return found


@triton.jit
def load_weighted(
    p_values,  # (COLUMNS,) pointers to the first row
    weights_ptr,
    origin_ptr,
    filled_ptr,
    o_row,
    is_given,  # (1, COLUMNS)
    n,
    row_stride,
    WEIGHTS: tl.constexpr,
):
    """Load packed rows of some columns, times their weights, float64; 0 for padding."""
    filled = tl.load(filled_ptr + o_row, mask=o_row < n, other=0) != 0
    origin = tl.load(origin_ptr + o_row, mask=filled, other=0)
    p_row = p_values[None, :] + origin[:, None] * row_stride
    values = tl.load(p_row, mask=filled[:, None] & is_given, other=0.0).to(tl.float64)
    if WEIGHTS:
        values *= tl.load(weights_ptr + origin, mask=filled, other=0.0)[:, None]
    return values


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
    COLUMNS: tl.constexpr,
):
    """One program per COLUMNS columns, of which those from `given` on are 0."""
    o_column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_given, p_values = (o_column < given)[None, :], values_ptr + o_column * column_stride
    largest = tl.zeros((BLOCK, COLUMNS), tl.float64)
    for first in range(0, n, BLOCK):
        o_row = first + tl.arange(0, BLOCK)
        values = load_weighted(
            p_values, weights_ptr, origin_ptr, filled_ptr, o_row, is_given, n, row_stride, WEIGHTS
        )  # (BLOCK, COLUMNS)
        largest = tl.maximum(largest, tl.abs(values))
    scales = scale_below(tl.max(largest, 0))  # (COLUMNS,)
    tl.store(scales_ptr + o_column, scales, mask=o_column < given)
    for first in range(0, n, BLOCK):
        o_row = first + tl.arange(0, BLOCK)
        values = load_weighted(
            p_values, weights_ptr, origin_ptr, filled_ptr, o_row, is_given, n, row_stride, WEIGHTS
        )  # (BLOCK, COLUMNS)
        p_out = out_ptr + o_row.to(tl.int64)[:, None] * 2 * s + o_column[None, :]
        mask = (o_row < n)[:, None] & (o_column < s)[None, :]
        store_halves(p_out, values * scales[None, :], s, mask)


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
    """Pack values (N, s) times weights (N,) as (n, 2, width) float16, with scales (s,) float64.

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
    columns = ADJACENT if count >= MANY_COLUMNS and values.stride(1) == 1 else 1
    to_halves_kernel[(triton.cdiv(width, columns),)](
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
        BLOCK=BLOCK // columns,
        COLUMNS=columns,
        num_warps=16,
    )
    return packed, scales


def from_halves(found: Unmerged, scales: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    """Compute weights (N,) times products of columns of halves, unpacked, (N, s) float64.

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


@on_its_device
@triton.jit
def onward_kernel(
    found_ptr,  # (stored, PARTS, width) float32, of any strides
    given_scales_ptr,  # (s,) float64
    weights_ptr,  # (n,) float64, 0 for padding
    out_ptr,  # (n, 2, width) float16
    scales_ptr,  # (s,) float64
    n,
    width,
    s,
    row_stride,
    part_stride,
    column_stride,
    whole,
    split,
    slots,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per column; those from s on are 0."""
    i = tl.program_id(0).to(tl.int64)
    found_ptr += i * column_stride
    given_scale = tl.load(given_scales_ptr + i, mask=i < s, other=1.0)
    largest = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK).to(tl.int64)
        mask = (o < n) & (i < s)
        found = load_found(found_ptr, o, row_stride, part_stride, whole, split, slots, mask, PARTS)
        values = found * tl.load(weights_ptr + o, mask=o < n, other=0.0)
        largest = tl.maximum(largest, tl.abs(values))
    # Both scales are powers of two: dividing by one and multiplying by the other rounds nothing.
    scale = scale_below(tl.max(largest, 0) / given_scale)
    tl.store(scales_ptr + i, scale, mask=i < s)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK).to(tl.int64)
        mask = (o < n) & (i < s)
        found = load_found(found_ptr, o, row_stride, part_stride, whole, split, slots, mask, PARTS)
        values = found * tl.load(weights_ptr + o, mask=o < n, other=0.0)
        p_out = out_ptr + o * 2 * width + i
        store_halves(p_out, values / given_scale * scale, width, o < n)


def onward(found: Unmerged, scales: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Pack weighted products as halves (n, 2, width) float16, with scales (s,).

    Args:
        found: products of hi and of lo parts, or of their sum; columns from s on are not read, and
            0 in the result.
        scales: (s,) float64, powers of two, of the halves that were multiplied.
        weights: (n,) float64, 0 for padding.
    """
    n, width = len(weights), found.values.shape[2]
    packed = torch.empty((n, 2, width), dtype=torch.float16, device=scales.device)
    found_scales = torch.empty_like(scales)
    onward_kernel[(width,)](
        found.values,
        scales,
        weights,
        packed,
        found_scales,
        n,
        width,
        len(scales),
        *found.places,
        PARTS=found.values.shape[1],
        BLOCK=BLOCK,
        num_warps=16,
    )
    return packed, found_scales


SUMMED_AT_ONCE = 1024


@on_its_device
@triton.jit
def row_sums_kernel(
    found_ptr,  # (stored, PARTS, 1) float32, of any strides
    masses_ptr,  # (N,) float64
    position_ptr,  # (N,) int64
    out_ptr,  # (N,) float64
    fits_ptr,  # (programs,) bool
    count,
    row_stride,
    part_stride,
    column_stride,
    whole,
    split,
    slots,
    unit,
    lowest,
    highest,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK points."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < count
    o_row = tl.load(position_ptr + o, mask=mask, other=0)
    sums = load_found(found_ptr, o_row, row_stride, part_stride, whole, split, slots, mask, PARTS)
    sums *= unit
    masses = tl.load(masses_ptr + o, mask=mask, other=0.0)
    tl.store(out_ptr + o, masses * sums, mask=mask)
    fits = ((sums >= lowest) & (sums <= highest)) | (masses <= 0)
    tl.store(fits_ptr + tl.program_id(0), tl.min(fits.to(tl.int32), 0) > 0)


def row_sums(
    found: Unmerged, layout: Layout, masses: Tensor, unit: float = 1.0
) -> tuple[Tensor, bool]:
    """The sums (N,) float64, and whether they are in `ROW_RANGE` over masses; waits for that.

    Args:
        found: sums of rows over their masses and the unit.
        layout: of the rows.
        masses: (N,) float64; the sums of points without are 0, whatever they were.
        unit: of the sums.
    """
    count = len(layout.position)
    programs = triton.cdiv(count, SUMMED_AT_ONCE)
    out = torch.empty(count, dtype=torch.float64, device=masses.device)
    fits = torch.empty(programs, dtype=torch.bool, device=masses.device)
    row_sums_kernel[(programs,)](
        found.values,
        masses,
        layout.position,
        out,
        fits,
        count,
        *found.places,
        unit,
        *ROW_RANGE,
        PARTS=found.values.shape[1],
        BLOCK=SUMMED_AT_ONCE,
    )
    return out, all(fits.tolist())
