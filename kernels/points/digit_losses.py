"""The rounding errors of points that are cut into digits.

`digits.pack_digits` approximates a point x_i by D vectors of whole numbers in base B,

    v_i = (x_i - centre) scale ~ X_i0 + X_i1 / B + X_i2 / B^2 + ...,

and a score <v_i, v_j> by the products <X_is, X_jt> with s + t < D. Here

    lost_i    >= ||v_i - sum_s X_is B^-s||^2
    omitted_i  = sum over pairs s + t >= D of B^-(s + t) ||X_it||^2 / 2

so that the products that the score of i and j leaves out are at most omitted_i + omitted_j.
`operators.fixed_point` makes bounds on costs from both, and from what carrying digits loses.

Shapes: points (N, d), losses (2, N) float64. No digits are stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.points.digits import base_of, next_digit
from otdd_flash.kernels.points.packed_points import load_scaled


@on_its_device
@triton.jit
def digit_losses_kernel(
    points_ptr,  # (N, d), any real type and strides
    centre_ptr,  # (d,) float64
    out_ptr,  # (2, N) float64
    count,
    d,
    row_stride,
    column_stride,
    scale: tl.float64,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per BLOCK_M points."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_point = o_row < count
    lost = tl.zeros((BLOCK_M,), tl.float64)
    omitted = tl.zeros((BLOCK_M,), tl.float64)
    for k in range(0, d, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        rest = load_scaled(
            points_ptr, centre_ptr, o_row * row_stride, is_point, o_k, d, column_stride, scale
        )  # (BLOCK_M, BLOCK_K)
        unit = 1.0
        for digit in tl.static_range(DIGITS):
            # Exact from here on: a difference of neighbours, and products by powers of two.
            if digit > 0:
                rest *= BASE
                unit /= BASE
            whole = next_digit(rest, digit == 0, BASE)
            if digit > 0:
                # A score leaves out its products with the digits from DIGITS - digit on.
                share = 0.0
                for other in tl.static_range(DIGITS):
                    if other >= DIGITS - digit:
                        share += 0.5 / BASE ** (digit + other)
                omitted += share * tl.sum(whole * whole, 1)  # (BLOCK_M,)
            rest -= whole
        rest *= unit
        lost += tl.sum(rest * rest, 1)  # (BLOCK_M,)
    # Raised by more than the additions of the sums may have rounded off.
    tl.store(out_ptr + o_row, lost * (1 + 1e-12), mask=is_point)
    tl.store(out_ptr + count + o_row, omitted * (1 + 1e-12), mask=is_point)


def digit_losses(points: Tensor, centre: Tensor, scale: float, digits: int) -> Tensor:
    """Compute `lost` and `omitted` of each point, (2, N) float64, in units of v^2.

    The v that `lost` is about differs from the exact one by 2^-52 |v| at most.

    Args:
        points: (N, d) of any real type and strides.
        centre: (d,) float64, subtracted.
        scale: times the differences, brings them into [-127, 127].
        digits: 1, 3 or 4.
    """
    count, d = points.shape
    out = torch.empty((2, count), dtype=torch.float64, device=points.device)
    block_m, block_k = (8, 128) if points.is_cuda else (128, triton.next_power_of_2(d))
    digit_losses_kernel[(triton.cdiv(count, block_m),)](
        points,
        centre,
        out,
        count,
        d,
        *points.stride(),
        scale,
        DIGITS=digits,
        BASE=base_of(d),
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out
