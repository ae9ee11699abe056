"""From one product of a plan to the next, in packed order: columns of halves to columns of halves.

    packed = 2^e (weights found / scale),      hi = half(packed),  lo = half(packed - hi)

as `halves` has it, without a stop at float64 numbers in the points' own order.
`operators.triton_plans` calls it in P^T diag(w) P v, between the product with P and that with P^T.

Shapes: found (stored, parts, width), packed (n, 2, width), weights (n,), scales (s,). The first s
of the `width` columns are values, the others 0. `found` is an `Unmerged` of `halves`: a product may
leave a row as several partial sums, which are added up here. The first `whole` rows have one each,
the `split` rows after them `slots` each, and `stored` is the number of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.linear.halves import Unmerged, load_found, scale_below, store_halves

BLOCK = 4096


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
            0 in what is returned.
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
