"""What a step of `solver.quasi_newton` decides: keep the point, remember the step, where to next.

From the sums of `quasi_newton_sums` one program takes all decisions of `quasi_newton.advance`, adds
a row and a column to the inner products of the remembered differences, and gives the next move

    sum_k c_k v_k + rho r + c        v_k: steps s_k and falls y_k,  r: the residual

by its coefficients, which `quasi_newton_loops` finds.

Shapes: partial sums (programs, SUMS + 2 MEMORY), numbers (8,), products (2, MEMORY, MEMORY + 1),
decision (2 MEMORY + OTHERS,), all float64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.quasi_newton_loops import entry, two_loops
from otdd_flash.kernels.quasi_newton_sums import (
    DUAL,
    FALL,
    FALL_FALL,
    FALL_RESIDUAL,
    GAP,
    RESIDUAL,
    SIZE,
    STEP,
    STEP_FALL,
    STEP_RESIDUAL,
    STEP_STEP,
    SUMS,
)
from otdd_flash.kernels.trust import judge

# What follows the coefficients of the remembered differences.
RESIDUAL_FACTOR = tl.constexpr(0)
CONSTANT = tl.constexpr(1)
KEPT = tl.constexpr(2)
SOUND = tl.constexpr(3)
STEP_MEAN = tl.constexpr(4)
FALL_MEAN = tl.constexpr(5)
OTHERS = 6

# Partial sums that are added up at once.
BLOCK_PROGRAMS = 32

# A difference of two sums this far below them is their rounding.
CANCELLED = tl.constexpr(2.0**-40)


@triton.jit
def total_sums(partial_ptr, columns, m_column, programs, width, BLOCK: tl.constexpr):
    """Add up some columns of the partial sums, always in the same order."""
    sums = tl.zeros((BLOCK, columns.shape[0]), tl.float64)
    for first in range(0, programs, BLOCK):
        o_program = first + tl.arange(0, BLOCK)
        mask = (o_program[:, None] < programs) & m_column[None, :]
        p_partial = partial_ptr + o_program[:, None] * width + columns[None, :]
        sums += tl.load(p_partial, mask=mask, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def update_numbers(
    dual,
    gain,
    gap,
    size,
    slack,
    numbers_ptr,  # (8,) float64
    new_numbers_ptr,  # (8,) float64
    GROWTH: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """Whether the point is kept, the plain updates to come, and <b, r> at the point that is."""
    last_dual, last_gain = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    last_gap, last_size = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3)
    kept, lowest, stale, plain, penalty = judge(
        dual, gap, slack, last_dual, last_gain,
        tl.load(numbers_ptr + 4), tl.load(numbers_ptr + 5), tl.load(numbers_ptr + 6),
        tl.load(numbers_ptr + 7), GROWTH, PATIENCE,
    )  # fmt: skip
    gain = tl.where(kept, gain, last_gain)
    tl.store(new_numbers_ptr, tl.where(kept, dual, last_dual))
    tl.store(new_numbers_ptr + 1, gain)
    tl.store(new_numbers_ptr + 2, tl.where(kept, gap, last_gap))
    tl.store(new_numbers_ptr + 3, tl.where(kept, size, last_size))
    tl.store(new_numbers_ptr + 4, lowest)
    tl.store(new_numbers_ptr + 5, stale)
    tl.store(new_numbers_ptr + 6, plain)
    tl.store(new_numbers_ptr + 7, penalty)
    return kept, plain, gain


@triton.jit(do_not_specialize=["programs"])
def quasi_newton_decision_kernel(
    partial_ptr,  # (programs, SUMS + 2 MEMORY) float64
    numbers_ptr,  # (8,) float64
    products_ptr,  # (2, MEMORY, MEMORY + 1) float64
    new_numbers_ptr,  # (8,) float64
    new_products_ptr,  # (2, MEMORY, MEMORY + 1) float64
    decision_ptr,  # (2 MEMORY + OTHERS,) float64
    programs,
    unit,
    damping,
    MEMORY: tl.constexpr,
    SUMS: tl.constexpr,
    DUAL_ROUNDING: tl.constexpr,
    GROWTH: tl.constexpr,
    PATIENCE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program; lanes are remembered differences, the oldest first."""
    o = tl.arange(0, LANES)
    sums = total_sums(partial_ptr, o, o < SUMS, programs, SUMS + 2 * MEMORY, BLOCK)
    seen_gain = entry(sums, RESIDUAL)
    step_mean, fall_mean = entry(sums, STEP), entry(sums, FALL)
    step_step = entry(sums, STEP_STEP) - step_mean * step_mean
    step_fall = entry(sums, STEP_FALL) - step_mean * fall_mean
    fall_fall = entry(sums, FALL_FALL) - fall_mean * fall_mean
    step_residual = entry(sums, STEP_RESIDUAL) - step_mean * seen_gain
    fall_residual = entry(sums, FALL_RESIDUAL) - fall_mean * seen_gain
    dual, gap, size = entry(sums, DUAL), entry(sums, GAP), entry(sums, SIZE)

    rounding = unit * size
    sound = (step_fall > rounding * tl.sqrt(tl.maximum(step_step, 0.0))) & (
        step_fall > CANCELLED * tl.abs(step_mean * fall_mean)
    )
    # An infinite one is not above its means, and NaN above nothing.
    sound = sound & (tl.abs(tl.load(numbers_ptr)) < float("inf"))
    kept, waits, gain = update_numbers(
        dual, seen_gain, gap, size, DUAL_ROUNDING * rounding,
        numbers_ptr, new_numbers_ptr, GROWTH, PATIENCE,
    )  # fmt: skip

    # Inner products with the newest fall, and with the residual at the point that is kept. Where
    # the step is remembered, all older ones move up by one place.
    WIDTH: tl.constexpr = MEMORY + 1
    moved = sound.to(tl.int32)
    o_old = o + moved
    m_old, m_lane = o_old < MEMORY, o < MEMORY
    newest = (o_old == MEMORY) & m_lane
    partial_ptr += SUMS
    new_steps = total_sums(partial_ptr, o_old, m_old, programs, SUMS + 2 * MEMORY, BLOCK)
    partial_ptr += MEMORY
    new_falls = total_sums(partial_ptr, o_old, m_old, programs, SUMS + 2 * MEMORY, BLOCK)
    p_residual = products_ptr + o_old * WIDTH + MEMORY
    last_steps = tl.load(p_residual, mask=m_old, other=0.0)
    last_falls = tl.load(p_residual + MEMORY * WIDTH, mask=m_old, other=0.0)
    steps_fall = tl.where(newest, step_fall, last_steps - new_steps)
    falls_fall = tl.where(newest, fall_fall, last_falls - new_falls)
    new_steps = tl.where(newest, step_residual, new_steps)
    new_falls = tl.where(newest, fall_residual, new_falls)
    last_steps = tl.where(newest, step_residual + step_fall, last_steps)
    last_falls = tl.where(newest, fall_residual + fall_fall, last_falls)
    on_steps = tl.where(kept, new_steps, last_steps)
    on_falls = tl.where(kept, new_falls, last_falls)
    p_residual = new_products_ptr + o * WIDTH + MEMORY
    tl.store(p_residual, on_steps, mask=m_lane)
    tl.store(p_residual + MEMORY * WIDTH, on_falls, mask=m_lane)
    alpha, beta, scale = two_loops(
        products_ptr, new_products_ptr, moved, newest,
        steps_fall, falls_fall, on_steps, on_falls, damping, MEMORY,
    )  # fmt: skip

    constant = -scale * gain
    largest = tl.sum(tl.abs(alpha) + tl.abs(beta), 0) + tl.abs(constant)
    usable = (waits == 0) & (largest * (1 + tl.abs(scale)) < float("inf"))
    tl.store(decision_ptr + o, tl.where(usable, beta, 0.0), mask=m_lane)
    tl.store(decision_ptr + MEMORY + o, tl.where(usable, -scale * alpha, 0.0), mask=m_lane)
    p_others = decision_ptr + 2 * MEMORY
    tl.store(p_others + RESIDUAL_FACTOR, tl.where(usable, scale, damping))
    tl.store(p_others + CONSTANT, tl.where(usable, constant, 0.0))
    tl.store(p_others + KEPT, kept.to(tl.float64))
    tl.store(p_others + SOUND, sound.to(tl.float64))
    tl.store(p_others + STEP_MEAN, step_mean)
    tl.store(p_others + FALL_MEAN, fall_mean)


def decision_size(memory: int) -> int:
    """Numbers that a decision takes."""
    return 2 * memory + OTHERS


def quasi_newton_decision(
    partial: Tensor,
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    decision: Tensor,
    *,
    unit: float,
    damping: float,
    limits: tuple[float, float, float],
) -> None:
    """Write the numbers and products after a step, and what it does to the potentials.

    Args:
        partial: from `quasi_newton_sums`.
        before: numbers (8,) and products (2, MEMORY, MEMORY + 1), float64.
        after: likewise, overwritten.
        decision: (`decision_size`,) float64, overwritten.
        unit: unit roundoff of the potentials.
        damping: the plain update is g + damping r.
        limits: DUAL_ROUNDING of `solver.quasi_newton`, GROWTH and PATIENCE of `solver.trust`.
    """
    memory = before[1].shape[1]
    quasi_newton_decision_kernel[(1,)](
        partial,
        *before,
        *after,
        decision,
        partial.shape[0],
        unit,
        damping,
        MEMORY=memory,
        SUMS=SUMS,
        DUAL_ROUNDING=limits[0],
        GROWTH=limits[1],
        PATIENCE=limits[2],
        LANES=triton.next_power_of_2(max(memory, SUMS)),
        BLOCK=BLOCK_PROGRAMS,
        num_warps=1,
    )
