"""What `solver.segmented_differences` does for a problem, as part of a kernel.

Lanes and both axes of small squares are slots of remembered differences. What is remembered are the
slot that comes next, R^-1, Y^T Y and D: `memory_width` numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


def memory_width(memory: int) -> int:
    """Numbers that are remembered of a problem, with so many slots."""
    return 1 + 2 * memory * memory + memory


@triton.jit
def learn_and_direct(
    p_products,  # (8,) <1, s>, <1, y>, <1, r>, <s, s>, <s, y>, <y, y>, <s, r>, <y, r>
    p_remembered,  # (4 MEMORY,) of steps, then falls, with y; then both with r
    started,  # whether there are newest differences
    rounding,  # what a single softmin may be off by
    p_memory,  # (1 + 2 MEMORY MEMORY + MEMORY,)
    p_new_memory,  # the same, overwritten
    MEMORY: tl.constexpr,
):
    """Whether the newest differences are learnt, scale, and weights of steps and of falls.

    Scale and weights are not finite where nothing is remembered.
    """
    mean_step, mean_fall = tl.load(p_products), tl.load(p_products + 1)
    mean_residual = tl.load(p_products + 2)
    step_step = tl.load(p_products + 3) - mean_step * mean_step
    step_fall = tl.load(p_products + 4) - mean_step * mean_fall
    fall_fall = tl.load(p_products + 5) - mean_fall * mean_fall
    step_residual = tl.load(p_products + 6) - mean_step * mean_residual
    fall_residual = tl.load(p_products + 7) - mean_fall * mean_residual
    noise = rounding * tl.sqrt(tl.maximum(step_step, 0.0))
    sound = started & (step_fall > noise) & (step_fall < float("inf"))

    o = tl.arange(0, MEMORY)
    slot = tl.load(p_memory)
    # There is no slot of a negative number.
    newest = o == tl.where(sound, slot, -1.0).to(tl.int32)
    row, column = newest[:, None], newest[None, :]
    steps = tl.where(newest, step_fall, tl.load(p_remembered + o))
    falls = tl.where(newest, fall_fall, tl.load(p_remembered + MEMORY + o))
    o_inverse = 1 + MEMORY * o[:, None] + o[None, :]
    o_squares = MEMORY * MEMORY + o_inverse
    o_curvatures = 1 + 2 * MEMORY * MEMORY + o
    inverse = tl.where(row | column, 0.0, tl.load(p_memory + o_inverse))
    last = tl.where(newest, 1.0, -tl.sum(inverse * steps[None, :], 1)) / step_fall
    inverse = tl.where(column, last[:, None], inverse)
    squares = tl.where(row, falls[None, :], tl.load(p_memory + o_squares))
    squares = tl.where(column, falls[:, None], squares)
    curvatures = tl.where(newest, steps, tl.load(p_memory + o_curvatures))
    following = tl.where(slot == MEMORY - 1, 0.0, slot + 1)
    tl.store(p_new_memory, tl.where(sound, following, slot))
    tl.store(p_new_memory + o_inverse, inverse)
    tl.store(p_new_memory + o_squares, squares)
    tl.store(p_new_memory + o_curvatures, curvatures)

    steps = tl.where(newest, step_residual, tl.load(p_remembered + 2 * MEMORY + o))
    falls = tl.where(newest, fall_residual, tl.load(p_remembered + 3 * MEMORY + o))
    diagonal = tl.where(o[:, None] == o[None, :], squares, 0.0)
    scale = tl.sum(curvatures, 0) / tl.sum(tl.sum(diagonal, 1), 0)
    inner = tl.sum(inverse * steps[None, :], 1)
    outer = scale * (tl.sum(squares * inner[None, :], 1) - falls) + curvatures * inner
    return sound, scale, tl.sum(inverse * outer[:, None], 0), -scale * inner
