"""Points in fixed point, as digits of int8 whose products tensor cores add exactly.

    v = (x - centre) scale ~ X_0 + X_1 / B + X_2 / B^2 + ...

All digits lie in [-B / 2, B / 2 - 1], X_0 in [-128, 127]; the base B is 256, or 128 where sums over
very long vectors would leave int32. A product of int8 matrices is an exact int32 on every card,
whatever the order of its additions. So the score <v, w> of two points is known to a bound that is
derived, not measured:

    S = sum_{s + t < digits} B^-(s + t) <X_s, Y_t>

Two things are missing from S. Pairs of digits with s + t >= digits are left out; by Cauchy and
Schwarz

    |<X_s, Y_t>| <= (||X_s||^2 + ||Y_t||^2) / 2,

so each point's share of it is measured, `omitted`. And levels s + t are added from the finest: a
level k >= 2 is rounded to a multiple of B^-(k - 1) before it joins the next one, `carry_error`,
unless four digits of few coordinates keep levels 2 and 3 as a number of their own
(`keeps_fractions`). Levels 1 and 0 are added exactly. One digit is exact for points whose v are
integers.

The remainder of v after its digits is `lost`, for the caller to account for.
`passes.plan_marginals` calls `pack_digits`, and `operators.fixed_point` calls `digit_losses`,
`longest` and `carry_error`. The errors go into solver bounds, so a change must keep them upper
bounds on every card (`tests/kernels/test_plan_marginals.py`).

`digit_losses` are the rounding errors of points x_i that are cut into D digits X_is:

    lost_i    >= ||v_i - sum_s X_is B^-s||^2
    omitted_i  = sum over pairs s + t >= D of B^-(s + t) ||X_it||^2 / 2

so that the products that the score of i and j leaves out are at most omitted_i + omitted_j.
`operators.fixed_point` makes bounds on costs from both, and from what carrying digits loses.

Shapes: points (N, d), packed digits (D, rows, width) int8, losses (2, N) float64. `digit_losses`
stores no digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.points.packed_points import Layout, load_scaled

# Coordinates up to which four digits of base 256 add up in int32: 2 ||X_0|| ||Y_3|| + 2 128^2 d.
MOST_COORDINATES = 57_344
# Coordinates up to which levels 2 and 3 of four digits are one int32: (3 B + 4) 128^2 d < 2^31.
FEW_COORDINATES = 128
# Rows start at multiples of 64 bytes, the depth of most tiles: none is in two lines of a cache.
ALIGNMENT = 64


@triton.jit
def next_digit(rest, FIRST: tl.constexpr, BASE: tl.constexpr):
    """The digit in front of the point, of numbers that are scaled to have it there."""
    # All digits after one are between -B / 2 / (B - 1) and (B / 2 - 1) / (B - 1) of its unit.
    ABOVE: tl.constexpr = BASE / 2 / (BASE - 1)
    LOWEST: tl.constexpr = -128.0 if FIRST else -BASE / 2
    HIGHEST: tl.constexpr = 127.0 if FIRST else BASE / 2 - 1
    return tl.minimum(tl.maximum(tl.floor(rest + ABOVE), LOWEST), HIGHEST)


@on_its_device
@triton.jit
def pack_digits_kernel(
    points_ptr,  # (N, d), any real type and strides
    centre_ptr,  # (d,) float64
    origin_ptr,  # (rows,) int64
    filled_ptr,  # (rows,) int8
    out_ptr,  # (DIGITS rows, DIM) int8
    rows,
    d,
    row_stride,
    column_stride,
    scale: tl.float64,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per BLOCK_M packed rows."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    origin = tl.load(origin_ptr + o_row) * row_stride
    filled = tl.load(filled_ptr + o_row) != 0
    for k in range(0, DIM, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        rest = load_scaled(
            points_ptr, centre_ptr, origin, filled, o_k, d, column_stride, scale
        )  # (BLOCK_M, BLOCK_K)
        p_out = out_ptr + o_row[:, None] * DIM + o_k[None, :]
        for digit in tl.static_range(DIGITS):
            # Exact from here on: a difference of neighbours, and products by powers of two.
            if digit > 0:
                rest *= BASE
            whole = next_digit(rest, digit == 0, BASE)
            rest -= whole
            tl.store(p_out, whole.to(tl.int8), mask=o_k[None, :] < DIM)
            p_out += rows.to(tl.int64) * DIM


def base_of(dim: int) -> int:
    """The base B of the digits of points of `dim` coordinates."""
    return 256 if dim <= MOST_COORDINATES else 128


def longest(dim: int) -> float:
    """The largest |v| of points of `dim` coordinates: |B S| stays below 2^31."""
    return 2895.0 if base_of(dim) == 256 else 4095.0


def padded_dim(dim: int) -> int:
    """Coordinates of a packed row for points of `dim` coordinates."""
    return -(-dim // ALIGNMENT) * ALIGNMENT


def pack_digits(
    points: Tensor,
    layout: Layout,
    centre: Tensor,
    scale: float,
    digits: int,
    first: int,
    rows: int,
) -> Tensor:
    """Packed rows [first, first + rows) of a cloud in digits, (digits, rows, DIM) int8.

    DIM is d padded by zeros to a multiple of 64; rows of padding are 0.

    Args:
        points: (N, d) of any real type and strides.
        layout: where each point stands among the packed rows.
        centre: (d,) float64, subtracted.
        scale: times the differences, brings them into [-127, 127].
        digits: 1, 3 or 4.
        first: a multiple of 128.
        rows: a multiple of 128.
    """
    dim, device = padded_dim(points.shape[1]), points.device
    values = torch.empty((digits, rows, dim), dtype=torch.int8, device=device)
    block_m, block_k = (8, 128) if points.is_cuda else (128, triton.next_power_of_2(dim))
    pack_digits_kernel[(rows // block_m,)](
        points,
        centre,
        layout.origin[first : first + rows],
        layout.filled[first : first + rows].view(torch.int8),
        values,
        rows,
        points.shape[1],
        *points.stride(),
        scale,
        DIGITS=digits,
        BASE=base_of(points.shape[1]),
        DIM=dim,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return values


def keeps_fractions(digits: int, dim: int) -> bool:
    """Whether levels 2 and 3 are kept whole for points of `dim` coordinates."""
    return digits == 4 and dim <= FEW_COORDINATES


def carry_error(digits: int, dim: int) -> float:
    """Bound on the loss of a score by carries, in units of v^2, for points of `dim` coordinates.

    Carries out of levels D - 1, ..., 2 are rounded by at most 1/2 of B^-(D - 2), ..., B^-1.
    """
    if keeps_fractions(digits, dim):
        return 0.0
    return sum(0.5 * float(base_of(dim)) ** -(level - 1) for level in range(2, digits))


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
