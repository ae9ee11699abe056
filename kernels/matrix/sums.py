"""Row and column sums of a plan over their own masses, in float64, by one read of its cost matrix.

    r_i = sum_j b_j e_ij,    c_j = sum_i a_i e_ij,    e_ij = exp((f_i + g_j - C_ij) / epsilon)

The cost matrix C is in memory. The plan has row sums a_i r_i and column sums b_j c_j: callers
multiply. Every entry is computed once and counts in both sums. Potentials of points without mass
may be anything. An exponent below `least` is raised to it, and a forbidden pair, of cost +inf, adds
nothing.

Exponents are of base 2: potentials and cost are multiplied by log2(e) / epsilon, then added and
subtracted, in float64. That is four roundings of numbers as large as these, besides twice that of
the factor. `solver.evidence` bounds them in the solver bounds, so a change must not add to them.

`operators.matrix_kernel` and `operators.kernel_pool` call `matrix_sums` for the marginals of
certificates.

Memory: 8 bytes per row and strip of columns, and per column and group of rows.

`exact_power_of_two` is 2^t in float64 by a polynomial, in half as many operations as the library's,

    2^t = 2^k 2^r,    k = round(t),    |r| <= 1/2

with 2^r as a polynomial of degree 11 that interpolates it at Chebyshev's points. The polynomial is
off by 2^-55 of itself, and by 2^-52 with the roundings of Horner's rule: its last step rounds the
result, and roundings of earlier steps are multiplied by r, at most 1/2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import LOG2_E, on_its_device
from otdd_flash.kernels.matrix.facts import Place, load_place
from otdd_flash.kernels.matrix.half_step import PROGRAMS, parts_of

# Rows and columns of a tile.
TILE = 2, 2048
WARPS = 4

# Stands for the potential of a point without mass: no cost makes up for it.
ABSENT = tl.constexpr(-1e300)


@on_its_device
@triton.jit
def matrix_sums_kernel(
    place_ptr,  # (4,) int64, of C (n, m)
    row_potential_ptr,  # (n,) float64
    column_potential_ptr,  # (m,) float64
    row_masses_ptr,  # (n,) float64
    column_masses_ptr,  # (m,) float64
    epsilon_ptr,  # () float64
    rows_ptr,  # (strips, row_stride) float64
    columns_ptr,  # (groups, column_stride) float64
    row_stride,
    column_stride,
    rows_per_group,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per strip of LANES columns and group of contiguous rows."""
    costs_ptr, stride, n, m = load_place(place_ptr, TYPE, ALIGNED)
    o_column = tl.program_id(0) * LANES + tl.arange(0, LANES)
    m_column = o_column < m
    scale = tl.full((), LOG2_E, tl.float64) / tl.load(epsilon_ptr)
    b = tl.load(column_masses_ptr + o_column, mask=m_column, other=0.0)
    g = tl.load(column_potential_ptr + o_column, mask=m_column, other=0.0)
    g = tl.where(b > 0, g * scale, ABSENT)
    start = tl.program_id(1) * rows_per_group
    stop = tl.minimum(start + rows_per_group, n)
    sums = tl.zeros((LANES,), tl.float64)
    for row in range(start, stop, ROWS):
        o_row = row + tl.arange(0, ROWS)
        m_row = o_row < stop
        a = tl.load(row_masses_ptr + o_row, mask=m_row, other=0.0)
        f = tl.load(row_potential_ptr + o_row, mask=m_row, other=0.0)
        f = tl.where(a > 0, f * scale, ABSENT)
        p_tile = (costs_ptr + o_row.to(tl.int64) * stride)[:, None] + o_column[None, :]
        costs = tl.load(p_tile, mask=m_row[:, None] & m_column[None, :], other=float("inf"))
        allowed = costs.to(tl.float32) < float("inf")
        exponents = (f[:, None] + g[None, :]) - costs.to(tl.float64) * scale
        entries = exact_power_of_two(tl.maximum(exponents, LEAST * LOG2_E))
        entries = tl.where(allowed, entries, 0.0)
        sums += tl.sum(a[:, None] * entries, 0)
        o_out = tl.program_id(0).to(tl.int64) * row_stride + o_row
        tl.store(rows_ptr + o_out, tl.sum(b[None, :] * entries, 1), mask=m_row)
    o_out = tl.program_id(1).to(tl.int64) * column_stride + o_column
    tl.store(columns_ptr + o_out, sums, mask=m_column)


def matrix_sums(
    place: Place,
    potentials: tuple[Tensor, Tensor],
    masses: tuple[Tensor, Tensor],
    epsilon: Tensor,
    least: float,
) -> tuple[Tensor, Tensor]:
    """Compute the plan's row sums r (n,) and column sums c (m,) over their own masses, float64.

    Args:
        place: of C (n, m).
        potentials: f (n,) and g (m,), float64; not read where there is no mass. Or longer ones, as
            all that follows; sums of points that are not there are unspecified.
        masses: a (n,) and b (m,), float64.
        epsilon: () float64, in units of the cost.
        least: exponents below it count as it.
    """
    n, m = (len(side) for side in masses)
    height, most = TILE
    lanes = min(most, triton.next_power_of_2(m))
    strips = triton.cdiv(m, lanes)
    groups, size = parts_of(n, height, triton.cdiv(PROGRAMS, strips))
    rows = torch.empty((strips, n), dtype=torch.float64, device=place.numbers.device)
    columns = torch.empty((groups, m), dtype=torch.float64, device=place.numbers.device)
    matrix_sums_kernel[(strips, groups)](
        place.numbers, *potentials, *masses, epsilon, rows, columns, n, m, size,
        **place.constants, LEAST=least, ROWS=height, LANES=lanes, num_warps=WARPS,
    )  # fmt: skip
    return rows.sum(0), columns.sum(0)


# Next to it float64 holds whole numbers only: adding it rounds t to k, which is in the lowest bits.
WHOLE = tl.constexpr(1.5 * 2.0**52)


@triton.jit
def exact_power_of_two(exponents):
    """2^t of float64 for t from -1,022 on, and inf from 1,023.5 on."""
    exponents = tl.minimum(exponents, 1024.0)
    shifted = exponents + WHOLE
    rest = exponents - (shifted - WHOLE)
    power = rest * 4.4558179083360645e-10 + 7.074194297288521e-09
    power = power * rest + 1.0178057087733941e-07
    power = power * rest + 1.3215432535912375e-06
    power = power * rest + 1.5252733841556773e-05
    power = power * rest + 0.00015403530463724353
    power = power * rest + 0.001333355814640647
    power = power * rest + 0.009618129107587256
    power = power * rest + 0.055504108664821625
    power = power * rest + 0.24022650695910158
    power = power * rest + 0.6931471805599453
    power = power * rest + 1.0
    # k in the lowest bits becomes the exponent of a float64.
    whole = (shifted.to(tl.int64, bitcast=True) + 1023) << 52
    return power * whole.to(tl.float64, bitcast=True)
