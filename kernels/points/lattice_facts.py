"""Whether all coordinates of points are multiples of a step, and their range.

A coordinate x is off the multiples of 1 / s if |s x - round(s x)| exceeds the rounding of s x. Two
steps are tried at once. `cost.rounding` calls `lattice_facts` to find a lattice that float16 holds
exactly; certificates rely on it, so no point off a lattice may pass
(`tests/kernels/test_lattice.py`).

Shapes: points (N, d) of any real type and strides, facts (blocks, 4) float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.tiling import BLOCK_ROWS


@triton.jit
def any_beside(points, scale, rounding):
    """1 if a coordinate of a tile is off the multiples of 1 / scale, else 0."""
    multiples = points * scale
    off = tl.abs(multiples - tl.floor(multiples + 0.5))
    beside = tl.where(off <= rounding * tl.abs(multiples), 0, 1)
    return tl.max(tl.max(beside, 1), 0)


@on_its_device
@triton.jit
def lattice_facts_kernel(
    points_ptr,  # (N, d)
    out_ptr,  # (blocks, 4) float64
    count,
    d,
    row_stride,
    column_stride,
    scale,
    other_scale,
    rounding,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per BLOCK_M points."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows past the end repeat the last of all, which changes no fact.
    p_rows = points_ptr + tl.minimum(o_row, count - 1)[:, None] * row_stride
    beside = tl.full((), 0, tl.int32)
    other_beside = tl.full((), 0, tl.int32)
    lowest = tl.full((BLOCK_M,), float("inf"), tl.float64)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float64)
    for k in range(0, d, BLOCK_K):
        o_k = tl.minimum(k + tl.arange(0, BLOCK_K), d - 1)
        points = tl.load(p_rows + o_k[None, :].to(tl.int64) * column_stride).to(tl.float64)
        beside = tl.maximum(beside, any_beside(points, scale, rounding))
        other_beside = tl.maximum(other_beside, any_beside(points, other_scale, rounding))
        lowest = tl.minimum(lowest, tl.min(points, 1))
        highest = tl.maximum(highest, tl.max(points, 1))
    p_out = out_ptr + 4 * tl.program_id(0)
    tl.store(p_out, beside.to(tl.float64))
    tl.store(p_out + 1, other_beside.to(tl.float64))
    tl.store(p_out + 2, -tl.min(lowest, 0))
    tl.store(p_out + 3, tl.max(highest, 0))


def lattice_facts(points: Tensor, scales: tuple[float, float], rounding: float) -> Tensor:
    """Compute facts of each block of points, largest over columns: (blocks, 4) float64.

    The first two are 1 if a coordinate is off the multiples of 1 / scale, else 0, for either
    scale; then minus the lowest coordinate, and the highest one.

    Args:
        points: (N, d) of any real type and strides.
        scales: float32 numbers.
        rounding: how far a coordinate may be from a multiple, relatively; a float32.
    """
    count, d = points.shape
    block_m, block_k = (8, 128) if points.is_cuda else (BLOCK_ROWS, triton.next_power_of_2(d))
    blocks = triton.cdiv(count, block_m)
    out = torch.empty((blocks, 4), dtype=torch.float64, device=points.device)
    lattice_facts_kernel[(blocks,)](
        points,
        out,
        count,
        d,
        *points.stride(),
        *scales,
        rounding,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out
