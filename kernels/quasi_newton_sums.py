"""All sums that a step of `solver.quasi_newton` decides by, in one read of what it has.

With the point that was kept last (g, u = T(f)), the one that is looked at (f', g', u'), residuals
r = u - g and r' = u' - g', the step s = g' - g, the fall y = r - r' and masses a, b:

    <a, f'> + <b, g'>,   <a, |f'|> + <b, |g'|>,   sum_j b_j |exp((g'_j - u'_j) / epsilon) - 1|,
    <b, v> for v in r', s, y;    <b, v w> for vw in ss, sy, yy, sr', yr';    <b, v_k r'>

for each remembered difference v_k. It is not known yet whether the point is kept and the step
remembered; all inner products that may be wanted follow from these. Without means they are
<v w> - <v><w>. Plans at a look have mass 1, so means of r are gains, smaller than its deviations.

A self term first gives the plan of its candidate mass 1, by adding k to u and taking it from g:

    k = epsilon / 2 log sum_i a_i exp((g_i - u_i) / epsilon).

Shapes: f (n,), g, u (m,), memory (2 MEMORY, m) float64, partial sums (programs, SUMS + 2 MEMORY)
float64, one row per block of points: no atomics, the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_POINTS = 256
# Points that the only program of a logarithm of the mass takes at once.
BLOCK_MASS = 4096

# Columns of the partial sums; those with the memory follow.
DUAL = tl.constexpr(0)
SIZE = tl.constexpr(1)
GAP = tl.constexpr(2)
RESIDUAL = tl.constexpr(3)
STEP = tl.constexpr(4)
FALL = tl.constexpr(5)
STEP_STEP = tl.constexpr(6)
STEP_FALL = tl.constexpr(7)
FALL_FALL = tl.constexpr(8)
STEP_RESIDUAL = tl.constexpr(9)
FALL_RESIDUAL = tl.constexpr(10)
SUMS = 11


@triton.jit(do_not_specialize=["n"])
def log_mass_kernel(
    g_ptr,  # (n,)
    updated_ptr,  # (n,)
    masses_ptr,  # (n,) float64
    out_ptr,  # (1,) float64
    epsilon_ptr,  # () float64
    n,
    BLOCK: tl.constexpr,
):
    """One program: log sum_i a_i exp((g_i - u_i) / epsilon)."""
    epsilon = tl.load(epsilon_ptr)
    highest = tl.full((BLOCK,), -float("inf"), tl.float64)
    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, n, BLOCK):
        o_point = first + tl.arange(0, BLOCK)
        masses = tl.load(masses_ptr + o_point, mask=o_point < n, other=0.0)
        m_mass = masses > 0
        g = tl.load(g_ptr + o_point, mask=m_mass, other=0.0).to(tl.float64)
        updated = tl.load(updated_ptr + o_point, mask=m_mass, other=0.0).to(tl.float64)
        exponent = (g - updated) / epsilon
        # Where no mass is, nothing changes; NaN is not greater, but it is added.
        raised = tl.where(m_mass & (exponent > highest), exponent, highest)
        kept = tl.where(highest == raised, 1.0, tl.exp(highest - raised))
        added = tl.where(m_mass, masses * tl.exp(exponent - raised), 0.0)
        sums = sums * kept + added
        highest = raised
    top = tl.max(highest, 0)
    total = tl.sum(tl.where(sums == 0, 0.0, sums * tl.exp(highest - top)), 0)
    tl.store(out_ptr, top + tl.log(total))


@triton.jit
def load_shift(log_mass_ptr, epsilon, SELF: tl.constexpr):
    """The logarithm of the mass and the shift that it asks for; 0 in a cross term."""
    log_mass = tl.zeros((), tl.float64)
    if SELF:
        log_mass = tl.load(log_mass_ptr)
    return log_mass, log_mass * (epsilon / 2)


@triton.jit
def add_shift(potential, shift):
    """In the type of the potential, as float64."""
    return (potential + shift.to(potential.dtype)).to(tl.float64)


@triton.jit(do_not_specialize=["n", "m"])
def quasi_newton_sums_kernel(
    f_ptr,  # (n,) of the point that is looked at
    g_ptr,  # (m,)
    updated_ptr,  # (m,)
    last_g_ptr,  # (m,) of the point that was kept last
    last_updated_ptr,  # (m,)
    memory_ptr,  # (2 MEMORY, m) float64
    a_ptr,  # (n,) float64
    b_ptr,  # (m,) float64
    log_mass_ptr,  # (1,) float64, read if SELF
    partial_ptr,  # (programs, SUMS + 2 MEMORY) float64
    epsilon_ptr,  # () float64
    n,
    m,
    MEMORY: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    SELF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK rows and columns; points without mass count as 0."""
    i_block = tl.program_id(0)
    epsilon = tl.load(epsilon_ptr)
    log_mass, shift = load_shift(log_mass_ptr, epsilon, SELF)
    o_point = i_block * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + o_point, mask=o_point < n, other=0.0)
    b = tl.load(b_ptr + o_point, mask=o_point < m, other=0.0)
    m_a, m_b = a > 0, b > 0
    f = add_shift(tl.load(f_ptr + o_point, mask=m_a, other=0.0), -shift)
    seen_g = tl.load(g_ptr + o_point, mask=m_b, other=0.0)
    seen_updated = tl.load(updated_ptr + o_point, mask=m_b, other=0.0)
    last_g = tl.load(last_g_ptr + o_point, mask=m_b, other=0.0).to(tl.float64)
    last_updated = tl.load(last_updated_ptr + o_point, mask=m_b, other=0.0).to(tl.float64)

    g, updated = add_shift(seen_g, -shift), add_shift(seen_updated, shift)
    residual = updated - g
    step = g - last_g
    fall = (last_updated - last_g) - residual
    # From what the shift has not rounded yet.
    exponent = (seen_g.to(tl.float64) - seen_updated.to(tl.float64)) / epsilon - log_mass
    gap = b * tl.abs(tl.exp(tl.where(m_b, exponent, 0.0)) - 1)
    p_partial = partial_ptr + i_block * (SUMS + 2 * MEMORY)
    tl.store(p_partial + DUAL, tl.sum(a * f, 0) + tl.sum(b * g, 0))
    tl.store(p_partial + SIZE, tl.sum(a * tl.abs(f), 0) + tl.sum(b * tl.abs(g), 0))
    tl.store(p_partial + GAP, tl.sum(gap, 0))
    tl.store(p_partial + RESIDUAL, tl.sum(b * residual, 0))
    tl.store(p_partial + STEP, tl.sum(b * step, 0))
    tl.store(p_partial + FALL, tl.sum(b * fall, 0))
    tl.store(p_partial + STEP_STEP, tl.sum(b * step * step, 0))
    tl.store(p_partial + STEP_FALL, tl.sum(b * step * fall, 0))
    tl.store(p_partial + FALL_FALL, tl.sum(b * fall * fall, 0))
    tl.store(p_partial + STEP_RESIDUAL, tl.sum(b * step * residual, 0))
    tl.store(p_partial + FALL_RESIDUAL, tl.sum(b * fall * residual, 0))

    o_row = tl.arange(0, ROWS)
    p_memory = memory_ptr + o_row[:, None].to(tl.int64) * m + o_point[None, :]
    remembered = tl.load(p_memory, mask=(o_row[:, None] < 2 * MEMORY) & m_b[None, :], other=0.0)
    sums = tl.sum(remembered * (b * residual)[None, :], 1)  # (ROWS,)
    tl.store(p_partial + SUMS + o_row, sums, mask=o_row < 2 * MEMORY)


def log_mass(g: Tensor, updated: Tensor, masses: Tensor, epsilon: Tensor, out: Tensor) -> None:
    """Write log sum_i a_i exp((g_i - u_i) / epsilon) to `out` (1,), float64.

    Args:
        g: (n,) potential, in units of the cost.
        updated: (n,) its softmin.
        masses: (n,) float64.
        epsilon: () float64, in units of the cost.
        out: (1,) float64, overwritten.
    """
    block = min(BLOCK_MASS, triton.next_power_of_2(len(g)))
    log_mass_kernel[(1,)](g, updated, masses, out, epsilon, len(g), BLOCK=block, num_warps=8)


def partial_shape(n: int, m: int, memory: int) -> tuple[int, int]:
    """Shape of the partial sums, whose rows are as many as the programs that write them."""
    return triton.cdiv(max(n, m), BLOCK_POINTS), SUMS + 2 * memory


def quasi_newton_sums(
    seen: tuple[Tensor, Tensor, Tensor],
    last: tuple[Tensor, Tensor],
    memory: Tensor,
    masses: tuple[Tensor, Tensor],
    epsilon: Tensor,
    partial: Tensor,
    log_mass: Tensor | None,
) -> None:
    """Write the partial sums.

    Args:
        seen: f' (n,), g' and u' (m,), in units of the cost; g', g' and u' before their shift if
            `log_mass` is given.
        last: g and u (m,).
        memory: (2, MEMORY, m) float64.
        masses: a (n,) and b (m,), float64.
        epsilon: () float64, in units of the cost.
        partial: of `partial_shape`, float64, overwritten.
        log_mass: (1,) float64, of a self term.
    """
    n, m, remembered = len(seen[0]), len(seen[1]), memory.shape[1]
    quasi_newton_sums_kernel[(partial.shape[0],)](
        *seen,
        *last,
        memory,
        *masses,
        partial if log_mass is None else log_mass,
        partial,
        epsilon,
        n,
        m,
        MEMORY=remembered,
        SUMS=SUMS,
        ROWS=triton.next_power_of_2(2 * remembered),
        SELF=log_mass is not None,
        BLOCK=BLOCK_POINTS,
        num_warps=8,
    )
