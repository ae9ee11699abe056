"""Potentials of columns after a sweep, from the sums c_j that its programs have found.

    T'(f)_j = u_j - epsilon log c_j,    c_j = sum_i a_i exp((f_i + u_j - C_ij) / epsilon)

`sweep` derives them. Where c_j is below 2^-100, a sweep may have lost a part of it: such a column
is summed once more over all rows, below its own maximum. A column without mass is left at 0, and
`fill_absent` sums it when it is asked for. `sweep` calls `swept_columns`; `operators.matrix_kernel`
and `operators.kernel_pool` call `fill_absent`.

Memory: 12 bytes per column.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.epsilon import LN_2, LOG2_E
from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.matrix.half_step import LOWEST, NOTHING, add_scores, load_factor
from otdd_flash.kernels.matrix.place import Place, load_place
from otdd_flash.kernels.segments.step import Sums

# Sums of columns are held times this, so that they lose nothing before terms of rows do.
RAISED = tl.constexpr(2.0**100)

# Columns of a program, partial sums that it reads at once, and rows of a column that is lost.
STRIP, PARTS, ROWS = 32, 64, 64
WARPS = 4


@triton.jit
def load_bias(potential_ptr, log_masses_ptr, epsilon, offsets, mask):
    """u, float64: potentials and masses as one number, -inf where there is no mass."""
    logs = tl.load(log_masses_ptr + offsets, mask=mask, other=-float("inf"))
    potential = tl.load(potential_ptr + offsets, mask=mask, other=0.0).to(tl.float64)
    return tl.where(logs > -float("inf"), potential + epsilon * logs, logs)


@triton.jit
def sum_strip(
    place_ptr,
    f_ptr,
    row_log_masses_ptr,
    epsilon_ptr,
    o_column,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Maxima and sums (STRIP,) of some columns over all rows, as of a half-step."""
    costs_ptr, stride, n, m = load_place(place_ptr, TYPE, ALIGNED)
    epsilon = tl.load(epsilon_ptr)
    scale, rest = load_factor(epsilon_ptr)
    highest = tl.full((STRIP,), LOWEST, tl.float32)
    sums = tl.zeros((STRIP,), tl.float32)
    for row in range(0, n, ROWS):
        o_row = row + tl.arange(0, ROWS)
        m_row = o_row < n
        bias = load_bias(f_ptr, row_log_masses_ptr, epsilon, o_row, m_row)
        p_tile = (costs_ptr + o_row.to(tl.int64) * stride)[:, None] + o_column[None, :]
        costs = tl.load(p_tile, mask=m_row[:, None] & (o_column < m)[None, :], other=0.0)
        scores = bias.to(tl.float32)[:, None] - costs.to(tl.float32)  # (ROWS, STRIP)
        highest, sums = add_scores(scores, highest, sums, scale, rest, 0)
    return highest, tl.maximum(sums.to(tl.float64), NOTHING)


@on_its_device
@triton.jit
def matrix_swept_kernel(
    place_ptr,  # (4,) int64, of C (n, m)
    potential_ptr,  # (m,) float32
    log_masses_ptr,  # (m,) float64
    f_ptr,  # (n,) float32
    row_log_masses_ptr,  # (n,) float64
    epsilon_ptr,  # (1,) float64
    active_ptr,  # (1,) int8
    partial_ptr,  # (parts, LANES) float32
    highest_ptr,  # (m,) float32
    sums_ptr,  # (m,) float64
    parts,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """One program per STRIP columns."""
    o_column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    columns = tl.load(place_ptr + 3).to(tl.int32)
    m_column = o_column < tl.where(tl.load(active_ptr) != 0, columns, 0)
    total = tl.zeros((STRIP,), tl.float64)
    for part in range(0, parts, PARTS):
        o_part = part + tl.arange(0, PARTS)
        p_part = partial_ptr + o_part[:, None] * LANES + o_column[None, :]
        # A sweep stores all lanes, 0 where there is no column.
        m_part = (o_part < parts)[:, None] & (o_column < LANES)[None, :]
        added = tl.load(p_part, mask=m_part, other=0.0)
        total += tl.sum(added.to(tl.float64), 0)
    epsilon = tl.load(epsilon_ptr)
    # Rounded as the sweep has rounded it.
    bias = load_bias(potential_ptr, log_masses_ptr, epsilon, o_column, m_column).to(tl.float32)
    m_mass = bias > -float("inf")
    factor = tl.full((), LOG2_E, tl.float64) / epsilon
    # Without mass the potential is 0.
    logit = tl.where(m_mass, -bias.to(tl.float64) * factor, 0.0)
    highest = logit.to(tl.float32)
    sums = tl.where(m_mass, total / RAISED, 1.0) * tl.exp2(logit - highest.to(tl.float64))
    # The sweep may have lost 2^-26 of any other sum at the most.
    short = m_column & m_mass & (total < 1.0)
    if tl.max(short.to(tl.int32), 0) > 0:
        strip_highest, strip_sums = sum_strip(
            place_ptr, f_ptr, row_log_masses_ptr, epsilon_ptr, o_column,
            TYPE, ALIGNED, ROWS, STRIP,
        )  # fmt: skip
        highest = tl.where(short, strip_highest, highest)
        sums = tl.where(short, strip_sums, sums)
    tl.store(highest_ptr + o_column, highest, mask=m_column)
    tl.store(sums_ptr + o_column, sums, mask=m_column)


@on_its_device
@triton.jit
def matrix_absent_kernel(
    place_ptr,  # (4,) int64, of C (n, m)
    log_masses_ptr,  # (m,) float64
    f_ptr,  # (n,) float32
    row_log_masses_ptr,  # (n,) float64
    epsilon_ptr,  # (1,) float64
    updated_ptr,  # (m,) float32, overwritten where there is no mass
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """One program per STRIP columns."""
    o_column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    m_column = o_column < tl.load(place_ptr + 3).to(tl.int32)
    logs = tl.load(log_masses_ptr + o_column, mask=m_column, other=0.0)
    absent = logs == -float("inf")
    if tl.max(absent.to(tl.int32), 0) > 0:
        highest, sums = sum_strip(
            place_ptr, f_ptr, row_log_masses_ptr, epsilon_ptr, o_column,
            TYPE, ALIGNED, ROWS, STRIP,
        )  # fmt: skip
        softmin = -tl.load(epsilon_ptr) * LN_2 * (highest.to(tl.float64) + tl.log2(sums))
        tl.store(updated_ptr + o_column, softmin.to(tl.float32), mask=absent)


def swept_columns(
    place: Place,
    log_masses: tuple[Tensor, Tensor],
    potential: Tensor,
    f: Tensor,
    epsilon: Tensor,
    active: Tensor,
    partial: Tensor,
) -> Sums:
    """What T'(f) (m,) is made of, in one part.

    Args:
        place: of C (n, m).
        log_masses: (n,) and (m,) float64, log a and log b, or longer ones, as all that follows.
        potential: (m,) float32, g; not read where there is no mass.
        f: (n,) float32, T(g), as the sweep has found it.
        epsilon: (1,) float64, in units of the cost.
        active: (1,) bool, whether the sweep did anything; if not, results are unspecified.
        partial: (parts, lanes) float32, the c_j of the rows of each program, times `RAISED`.
    """
    columns = Sums(
        torch.empty(len(potential), dtype=torch.float32, device=f.device),
        torch.empty(len(potential), dtype=torch.float64, device=f.device),
    )
    parts, lanes = partial.shape
    matrix_swept_kernel[(triton.cdiv(len(potential), STRIP),)](
        place.numbers, potential, log_masses[1], f, log_masses[0], epsilon,
        active.view(torch.int8), partial, *columns, parts, **place.constants,
        LANES=lanes, PARTS=PARTS, ROWS=ROWS, STRIP=STRIP, num_warps=WARPS,
    )  # fmt: skip
    return columns


def fill_absent(
    place: Place,
    log_masses: tuple[Tensor, Tensor],
    f: Tensor,
    epsilon: Tensor,
    updated: Tensor,
) -> None:
    """Give columns without mass their T'(f), which sweeps leave out.

    Args:
        place: of C (n, m).
        log_masses: (n,) and (m,) float64, log a and log b, or longer ones, as all that follows.
        f: (n,) float32.
        epsilon: (1,) float64, in units of the cost.
        updated: (m,) float32, T'(f) elsewhere; overwritten.
    """
    matrix_absent_kernel[(triton.cdiv(len(updated), STRIP),)](
        place.numbers, log_masses[1], f, log_masses[0], epsilon, updated, **place.constants,
        ROWS=ROWS, STRIP=STRIP,
        num_warps=WARPS,
    )  # fmt: skip
