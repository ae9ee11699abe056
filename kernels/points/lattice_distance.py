"""How far points are from the whole multiples of a step, in units of it.

    d_i = sum_k (s x_ik - round(s x_ik))^2,    NaN if a coordinate is on no multiple.

Shapes: points (N, d) of any real type and strides, d (N,) float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.tiling import BLOCK_ROWS


@on_its_device
@triton.jit
def lattice_distance_kernel(
    points_ptr,  # (N, d)
    out_ptr,  # (N,) float64
    count,
    d,
    row_stride,
    column_stride,
    scale,
    rounding,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per BLOCK_M points."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    p_rows = points_ptr + o_row[:, None] * row_stride
    squares = tl.zeros((BLOCK_M,), tl.float64)
    for k in range(0, d, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        mask = (o_row[:, None] < count) & (o_k[None, :] < d)
        p_points = p_rows + o_k[None, :].to(tl.int64) * column_stride
        multiples = tl.load(p_points, mask=mask, other=0.0).to(tl.float64) * scale
        beside = tl.abs(multiples - tl.floor(multiples + 0.5))
        beside = tl.where(beside <= rounding * tl.abs(multiples), beside, float("nan"))
        squares += tl.sum(beside * beside, 1)
    tl.store(out_ptr + o_row, squares, mask=o_row < count)


def lattice_distance(points: Tensor, scale: float, rounding: float) -> Tensor:
    """Squared distances (N,) float64 of points (N, d) from multiples of 1 / scale, times scale^2.

    Args:
        points: of any real type and strides.
        scale: a float32.
        rounding: how far a coordinate may be from a multiple, relatively; a float32.
    """
    count, d = points.shape
    out = torch.empty(count, dtype=torch.float64, device=points.device)
    block_m, block_k = (8, 128) if points.is_cuda else (BLOCK_ROWS, triton.next_power_of_2(d))
    lattice_distance_kernel[(triton.cdiv(count, block_m),)](
        points,
        out,
        count,
        d,
        *points.stride(),
        scale,
        rounding,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out
