"""What `solver.segmented_trust` decides for a block of problems, as part of a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def judge(
    dual,  # of the potentials that were looked at
    gain,  # of the plain update from there
    gap,  # their marginal error
    rounding,  # what a single softmin may be off by
    restarted,  # whether trust starts afresh afterwards
    p_trust,  # (6,) dual, gain, lowest, stale, plain, penalty
    p_new_trust,  # (6,), overwritten
    DUAL_ROUNDING: tl.constexpr,
    GROWTH: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """Whether the potentials are kept, iterations since the lowest error, plain updates to come."""
    last_dual, last_gain, lowest = tl.load(p_trust), tl.load(p_trust + 1), tl.load(p_trust + 2)
    stale, plain, penalty = tl.load(p_trust + 3), tl.load(p_trust + 4), tl.load(p_trust + 5)
    surplus = dual - last_dual - last_gain
    better, lower = surplus > DUAL_ROUNDING * rounding, gap < lowest
    steady = (gap <= GROWTH * lowest) & (stale < PATIENCE)
    forced = (plain > 0) | (last_dual == -float("inf"))
    kept = forced | better | ((surplus >= -DUAL_ROUNDING * rounding) & steady)
    forgiven = kept & (plain <= 0) & (better | lower)
    penalty = tl.where(forgiven, tl.maximum(penalty / 2, 1.0), penalty)
    stale = tl.where(kept & lower, 0.0, stale + 1)
    plain = tl.where(kept, tl.maximum(plain - 1, 0.0), penalty)
    penalty = tl.where(kept, penalty, 2 * penalty)
    lowest = tl.where(kept & lower, gap, lowest)
    tl.store(p_new_trust, tl.where(restarted, -float("inf"), tl.where(kept, dual, last_dual)))
    tl.store(p_new_trust + 1, tl.where(restarted, 0.0, tl.where(kept, gain, last_gain)))
    tl.store(p_new_trust + 2, tl.where(restarted, float("inf"), lowest))
    tl.store(p_new_trust + 3, tl.where(restarted, 0.0, stale))
    tl.store(p_new_trust + 4, tl.where(restarted, 0.0, plain))
    tl.store(p_new_trust + 5, tl.where(restarted, 1.0, penalty))
    return kept, stale, plain
