"""Both Sinkhorn half-steps for a cost matrix in memory by one read of it.

    f = T(g),    f_i = -t_i - epsilon log r_i,        t_i = max_j x_ij,    x_ij = u_j - C_ij
    r_i = sum_j e_ij,    e_ij = exp((x_ij - t_i) / epsilon),    u_j = g_j + epsilon log b_j
    T'(f)_j = u_j - epsilon log c_j,                  c_j = sum_i a_i e_ij / r_i

c_j is the sum of a column of the plan of f and g: with f exact, the exponentials of a row, over
their sum, are that row of the plan. So an entry is exponentiated once and counts in both sums, and
no maximum over a column is needed, as c_j is at most 1.

A program owns contiguous rows. It holds two numbers of every column: u_j, and the part of c_j that
comes from its rows. It reads a few whole rows at once, while the next are on their way to shared
memory, and keeps them in registers until their maxima and sums are known. `swept_columns` adds up
the parts of all programs.

u is computed in float64 and rounded once; x is rounded like a cost. Differences x - t are small
where they count, and so are the roundings of their products with log2(e) / epsilon.

Terms below 2^-126 of their row's largest are lost, which matters only to a column whose c_j is as
small. So a column with c_j below 2^-100 is summed once more over all rows, relative to its own
maximum. Columns without mass have no part in any row: a sweep leaves their potential at 0, and
`fill_absent` computes it once, at the end.

An entry of +inf adds nothing.

Iterating on a copy of C in float16 was measured and does not pay: on an H200 a sweep of it takes
207 us where one of C takes 261 at 16,384 entries a row, gains nothing at 8,192, and the copy takes
some 400 us to make.

`operators.matrix_kernel` and `operators.kernel_pool` call `matrix_sweep`, `row_weights` and
`fill_absent`; the engine makes T'(f) from `Swept.columns`. Whatever shape `sweep_shape` gives must
fit registers and shared memory (`tests/kernels/test_sweep.py`).

Memory: 4 bytes per column, padded to a power of two, and program, 12 per row and 12 per column.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import LN_2, LOG2_E, on_its_device
from otdd_flash.kernels.matrix.facts import Place, load_place
from otdd_flash.kernels.matrix.half_step import LOWEST, NOTHING, add_scores, load_factor
from otdd_flash.kernels.segments.step import Sums

# Columns of a program at the most: twice as many leave no registers for a row.
MOST_COLUMNS = 1 << 14

# Rows of a program that become potentials at once.
BLOCK = 128

# Multiprocessors of an H200, bytes of shared memory that a program may have, and how many of these
# its sums across warps take.
PROCESSORS, SHARED, REDUCTIONS = 132, 232_448, 1024


class Shape(NamedTuple):
    """How a sweep runs.

    Attributes:
        rows: that a program reads at once, a power of two.
        warps: of a program.
        stages: one more than how many times as many rows are in shared memory.
        programs: how many there are at the most.
    """

    rows: int
    warps: int
    stages: int
    programs: int


class Swept(NamedTuple):
    """Both potentials.

    Attributes:
        f: T(g) (n,) float32, in units of the cost.
        columns: the sums of T'(f) (m,), in one part.
    """

    f: Tensor
    columns: Sums


@on_its_device
@triton.jit
def matrix_sweep_kernel(
    place_ptr,  # (4,) int64, of C (n, m)
    potential_ptr,  # (m,) float32
    log_masses_ptr,  # (m,) float64, natural logarithms
    weights_ptr,  # (n,) float32, masses of rows times RAISED
    epsilon_ptr,  # (1,) float64
    active_ptr,  # (1,) int8
    tops_ptr,  # (n,) float32
    totals_ptr,  # (n,) float32
    f_ptr,  # (n,) float32
    partial_ptr,  # (programs, LANES) float32
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per contiguous rows, as many as there are programs."""
    i_program = tl.program_id(0).to(tl.int64)
    active = tl.load(active_ptr) != 0
    costs_ptr, stride, n, m = load_place(place_ptr, TYPE, ALIGNED)
    start = (i_program * n // tl.num_programs(0)).to(tl.int32)
    stop = ((i_program + 1) * n // tl.num_programs(0)).to(tl.int32)
    stop = tl.where(active, stop, start)
    epsilon = tl.load(epsilon_ptr)
    scale, _ = load_factor(epsilon_ptr)
    o_column = tl.arange(0, LANES)
    m_column = o_column < m
    bias = load_bias(potential_ptr, log_masses_ptr, epsilon, o_column, m_column).to(tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    for row in tl.range(start, stop, ROWS, num_stages=STAGES):
        o_row = row + tl.arange(0, ROWS)
        m_row = o_row < stop
        p_tile = (costs_ptr + o_row.to(tl.int64) * stride)[:, None] + o_column[None, :]
        costs = tl.load(p_tile, mask=m_row[:, None] & m_column[None, :], other=0.0)
        weights = tl.load(weights_ptr + o_row, mask=m_row, other=0.0)
        scores = bias[None, :] - costs.to(tl.float32)  # (ROWS, LANES)
        # Finite in a row without a pair, so that differences from it are.
        tops = tl.maximum(tl.max(scores, 1), LOWEST)
        terms = tl.exp2((scores - tops[:, None]) * scale)
        totals = tl.sum(terms, 1)
        # At least 1, but where there is nothing.
        weights = weights / tl.maximum(totals, 0.5)
        sums += tl.sum(terms * weights[:, None], 0)
        tl.store(tops_ptr + o_row, tops, mask=m_row)
        tl.store(totals_ptr + o_row, totals, mask=m_row)
    tl.store(partial_ptr + i_program * LANES + o_column, sums)
    # Wait for the stores of all threads of this program.
    tl.debug_barrier()
    epsilon = tl.load(epsilon_ptr)
    for row in range(start, stop, BLOCK):
        o_row = row + tl.arange(0, BLOCK)
        m_row = o_row < stop
        tops = tl.load(tops_ptr + o_row, mask=m_row, other=0.0).to(tl.float64)
        totals = tl.load(totals_ptr + o_row, mask=m_row, other=1.0).to(tl.float64)
        f = -tops - epsilon * LN_2 * tl.log2(tl.maximum(totals, NOTHING))
        # The potential of a row without a pair is that of a half-step: finite, and above any other.
        f = tl.where(totals > 0, f, -epsilon * LN_2 * LOWEST)
        tl.store(f_ptr + o_row, f.to(tl.float32), mask=m_row)


def matrix_sweep(
    place: Place,
    log_masses: tuple[Tensor, Tensor],
    weights: Tensor,
    potential: Tensor,
    epsilon: Tensor,
    active: Tensor,
    shape: Shape | None = None,
) -> Swept:
    """Both half-steps from g: f = T(g), and the sums of T'(f).

    Args:
        place: of C (n, m); m is at most `MOST_COLUMNS`.
        log_masses: (n,) and (m,) float64, log a and log b, or longer ones, as all that follows.
        weights: (n,) float32, of `row_weights`.
        potential: (m,) float32, g; not read where there is no mass.
        epsilon: (1,) float64, in units of the cost.
        active: (1,) bool, whether to do anything; if not, all results are unspecified.
        shape: how to run; by default `sweep_shape`.
    """
    n, m = (len(side) for side in log_masses)
    device, lanes = potential.device, triton.next_power_of_2(m)
    shape = shape or sweep_shape((n, m), place.dtype, device)
    parts = min(n, shape.programs)
    tops, totals, f = torch.empty((3, n), dtype=torch.float32, device=device).unbind()
    partial = torch.empty((parts, lanes), dtype=torch.float32, device=device)
    matrix_sweep_kernel[(parts,)](
        place.numbers, potential, log_masses[1], weights, epsilon, active.view(torch.int8),
        tops, totals, f, partial, **place.constants,
        ROWS=shape.rows, LANES=lanes, STAGES=shape.stages, BLOCK=BLOCK, num_warps=shape.warps,
    )  # fmt: skip
    columns = swept_columns(place, log_masses, potential, f, epsilon, active, partial)
    return Swept(f, columns)


def row_weights(masses: Tensor) -> Tensor:
    """Masses of rows (n,) as a sweep takes them, float32."""
    raised: Tensor = masses * RAISED.value
    return raised.float()


@lru_cache
def sweep_shape(size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Shape:
    """How a sweep over costs (n, m) runs, as was measured to be the fastest on an H200.

    On a GPU its own multiprocessors and shared memory count.
    """
    n, m = size
    lanes, programs, shared = triton.next_power_of_2(m), PROCESSORS, SHARED
    if device.type == "cuda":
        card: Any = torch.cuda.get_device_properties(device)
        programs, shared = card.multi_processor_count, card.shared_memory_per_block_optin
    of_program = triton.cdiv(n, programs)
    # 8,192 entries at once, or two rows where registers hold two: 32 entries a thread, 16 of types
    # that it converts.
    rows = min(MOST_COLUMNS // lanes, max(2, MOST_COLUMNS // 2 // lanes))
    rows = min(rows, triton.next_power_of_2(of_program))
    warps = max(4, min(16, rows * lanes // (256 * dtype.itemsize)))
    room = (shared - REDUCTIONS) // (rows * lanes * dtype.itemsize)
    # Rows that are all read at once need no shared memory for the next ones.
    stages = max(1, min(3, room + 1, triton.cdiv(of_program, rows)))
    return Shape(rows, warps, stages, programs)


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
    """The sums of T'(f) (m,), in one part.

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
