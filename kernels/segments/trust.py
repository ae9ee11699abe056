"""What `engine.trust` decides, as part of a kernel: for one problem, or a block of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def judge(
    dual,  # of the potentials that were evaluated
    gap,  # their marginal error
    slack,  # what a difference of duals may be off by
    last_dual,  # of the potentials that were kept last
    last_gain,
    lowest,
    stale,
    plain,
    penalty,
    GROWTH: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """Whether the potentials are kept, and lowest, stale, plain and penalty then."""
    surplus = dual - last_dual - last_gain
    better, lower = surplus > slack, gap < lowest
    steady = (gap <= GROWTH * lowest) & (stale < PATIENCE)
    forced = (plain > 0) | (last_dual == -float("inf"))
    kept = forced | better | ((surplus >= -slack) & steady)
    forgiven = kept & (plain <= 0) & (better | lower)
    penalty = tl.where(forgiven, tl.maximum(penalty / 2, 1.0), penalty)
    stale = tl.where(kept & lower, 0.0, stale + 1)
    plain = tl.where(kept, tl.maximum(plain - 1, 0.0), penalty)
    penalty = tl.where(kept, penalty, 2 * penalty)
    return kept, tl.where(kept & lower, gap, lowest), stale, plain, penalty
