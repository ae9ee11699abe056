"""What a step of `solver.quasi_newton` decided, carried out in one read and one write.

    candidate = g + sum_k c_k v_k + rho r + c        (where no mass is: g + damping r)

with (f, g, u) the point that is kept, the one looked at or the last, r = u - g its residual, and
v_k the remembered differences: those of before, or those but the oldest, and the newest,

    s = g' - g - <b, g' - g>,    y = r - r' - <b, r - r'>,    0 where no mass is.

Shapes: f (n,), g, u, candidate (m,), memory (2, MEMORY, m) float64, and the decision of
`quasi_newton_decision`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.quasi_newton_decision import (
    CONSTANT,
    FALL_MEAN,
    KEPT,
    RESIDUAL_FACTOR,
    SOUND,
    STEP_MEAN,
)
from otdd_flash.kernels.quasi_newton_sums import add_shift, load_shift

BLOCK_POINTS = 256


@triton.jit(do_not_specialize=["n", "m"])
def quasi_newton_update_kernel(
    f_ptr,  # (n,) of the point that is looked at
    g_ptr,  # (m,)
    updated_ptr,  # (m,)
    last_f_ptr,  # (n,) of the point that was kept last
    last_g_ptr,  # (m,)
    last_updated_ptr,  # (m,)
    memory_ptr,  # (2 MEMORY, m) float64
    b_ptr,  # (m,) float64
    log_mass_ptr,  # (1,) float64, read if SELF
    decision_ptr,  # (2 MEMORY + OTHERS,) float64
    new_f_ptr,  # (n,)
    new_g_ptr,  # (m,)
    new_updated_ptr,  # (m,)
    new_candidate_ptr,  # (m,)
    new_memory_ptr,  # (2 MEMORY, m) float64
    epsilon_ptr,  # () float64
    n,
    m,
    damping,
    MEMORY: tl.constexpr,
    SELF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK rows and columns."""
    p_others = decision_ptr + 2 * MEMORY
    kept, sound = tl.load(p_others + KEPT) != 0, tl.load(p_others + SOUND) != 0
    _, shift = load_shift(log_mass_ptr, tl.load(epsilon_ptr), SELF)
    o_point = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row, m_column = o_point < n, o_point < m
    f = add_shift(tl.load(f_ptr + o_point, mask=m_row, other=0.0), -shift)
    last_f = tl.load(last_f_ptr + o_point, mask=m_row, other=0.0).to(tl.float64)
    tl.store(new_f_ptr + o_point, tl.where(kept, f, last_f), mask=m_row)

    g = add_shift(tl.load(g_ptr + o_point, mask=m_column, other=0.0), -shift)
    updated = add_shift(tl.load(updated_ptr + o_point, mask=m_column, other=0.0), shift)
    last_g = tl.load(last_g_ptr + o_point, mask=m_column, other=0.0).to(tl.float64)
    last_updated = tl.load(last_updated_ptr + o_point, mask=m_column, other=0.0).to(tl.float64)
    m_mass = tl.load(b_ptr + o_point, mask=m_column, other=0.0) > 0
    step = g - last_g
    fall = (last_updated - last_g) - (updated - g)
    step = tl.where(m_mass, step - tl.load(p_others + STEP_MEAN), 0.0)
    fall = tl.where(m_mass, fall - tl.load(p_others + FALL_MEAN), 0.0)

    g, updated = tl.where(kept, g, last_g), tl.where(kept, updated, last_updated)
    tl.store(new_g_ptr + o_point, g, mask=m_column)
    tl.store(new_updated_ptr + o_point, updated, mask=m_column)
    residual = updated - g
    move = tl.load(p_others + RESIDUAL_FACTOR) * residual + tl.load(p_others + CONSTANT)
    m = m.to(tl.int64)
    moved = sound.to(tl.int64)
    for k in tl.static_range(MEMORY):
        # The place of the oldest, or that of the newest, which is read in vain.
        old = k + moved if k < MEMORY - 1 else k
        p_old = memory_ptr + old * m + o_point
        old_step = tl.load(p_old, mask=m_column, other=0.0)
        old_fall = tl.load(p_old + MEMORY * m, mask=m_column, other=0.0)
        if k == MEMORY - 1:
            old_step = tl.where(sound, step, old_step)
            old_fall = tl.where(sound, fall, old_fall)
        p_new = new_memory_ptr + k * m + o_point
        tl.store(p_new, old_step, mask=m_column)
        tl.store(p_new + MEMORY * m, old_fall, mask=m_column)
        move += tl.load(decision_ptr + k) * old_step
        move += tl.load(decision_ptr + MEMORY + k) * old_fall
    move = tl.where(m_mass, move, damping * residual)
    tl.store(new_candidate_ptr + o_point, g + move, mask=m_column)


def quasi_newton_update(
    seen: tuple[Tensor, Tensor, Tensor],
    last: tuple[Tensor, Tensor, Tensor],
    memory: Tensor,
    masses: Tensor,
    epsilon: Tensor,
    log_mass: Tensor | None,
    decision: Tensor,
    damping: float,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Write the point that is kept, the next candidate and the memory.

    Args:
        seen: f' (n,), g' and u' (m,), as in `quasi_newton_sums`.
        last: f (n,), g and u (m,).
        memory: (2, MEMORY, m) float64.
        masses: b (m,), float64.
        epsilon: () float64, in units of the cost.
        log_mass: (1,) float64, of a self term.
        decision: from `quasi_newton_decision`.
        damping: the plain update is g + damping r.
        out: f (n,), g, u and the candidate (m,), and the memory, overwritten.
    """
    n, m = len(seen[0]), len(seen[1])
    quasi_newton_update_kernel[(triton.cdiv(max(n, m), BLOCK_POINTS),)](
        *seen,
        *last,
        memory,
        masses,
        decision if log_mass is None else log_mass,
        decision,
        *out,
        epsilon,
        n,
        m,
        damping,
        MEMORY=memory.shape[1],
        SELF=log_mass is not None,
        BLOCK=BLOCK_POINTS,
    )
