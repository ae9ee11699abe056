"""What `engine.differences` does for a block of problems, as part of a kernel.

What is remembered of a problem are the slot that comes next, R^-1, Y^T Y and D, in `memory_width`
numbers. Shapes: (BLOCK,) problems, (BLOCK, MEMORY) and (BLOCK, MEMORY, MEMORY) their slots.
"""

from __future__ import annotations

import triton
import triton.language as tl


def memory_width(memory: int) -> int:
    """Numbers that are remembered of a problem, with so many slots."""
    return 1 + 2 * memory * memory + memory


@triton.jit
def learn_and_direct(
    p_products,  # <1, s>, <1, y>, <1, r>, <s, s>, <s, y>, <y, y>, <s, r>, <y, r>
    p_remembered,  # (4 MEMORY,) of steps, then residual differences, with y; then both with r
    started,  # whether there are newest differences
    rounding,  # what a single softmin may be off by
    p_memory,  # (1 + 2 MEMORY MEMORY + MEMORY,)
    p_new_memory,  # the same, overwritten
    MEMORY: tl.constexpr,
):
    """Whether the newest pair is learnt, scale, and weights of steps and residual differences.

    Scale and weights are not finite where nothing is remembered.
    """
    mean_step, mean_difference = tl.load(p_products), tl.load(p_products + 1)
    mean_residual = tl.load(p_products + 2)
    step_step = tl.load(p_products + 3) - mean_step * mean_step
    step_difference = tl.load(p_products + 4) - mean_step * mean_difference
    difference_difference = tl.load(p_products + 5) - mean_difference * mean_difference
    step_residual = tl.load(p_products + 6) - mean_step * mean_residual
    difference_residual = tl.load(p_products + 7) - mean_difference * mean_residual
    noise = rounding * tl.sqrt(tl.maximum(step_step, 0.0))
    sound = started & (step_difference > noise) & (step_difference < float("inf"))

    i_slot = tl.arange(0, MEMORY)
    o, o_square = i_slot[None, :], MEMORY * i_slot[:, None] + i_slot[None, :]
    p_inverse = p_memory[:, None, None] + (1 + o_square)[None, :, :]
    p_curvatures = p_memory[:, None] + (1 + 2 * MEMORY * MEMORY + o)
    p_new_inverse = p_new_memory[:, None, None] + (1 + o_square)[None, :, :]
    p_new_curvatures = p_new_memory[:, None] + (1 + 2 * MEMORY * MEMORY + o)
    p_steps = p_remembered[:, None] + o

    slot = tl.load(p_memory)
    # There is no slot of a negative number.
    newest = o == tl.where(sound, slot, -1.0).to(tl.int32)[:, None]
    row, column = newest[:, :, None], newest[:, None, :]
    steps = tl.where(newest, step_difference[:, None], tl.load(p_steps))
    differences = tl.where(newest, difference_difference[:, None], tl.load(p_steps + MEMORY))
    inverse = tl.where(row | column, 0.0, tl.load(p_inverse))
    last = tl.where(newest, 1.0, -tl.sum(inverse * steps[:, None, :], 2)) / step_difference[:, None]
    inverse = tl.where(column, last[:, :, None], inverse)
    squares = tl.where(row, differences[:, None, :], tl.load(p_inverse + MEMORY * MEMORY))
    squares = tl.where(column, differences[:, :, None], squares)
    curvatures = tl.where(newest, steps, tl.load(p_curvatures))
    following = tl.where(slot == MEMORY - 1, 0.0, slot + 1)
    tl.store(p_new_memory, tl.where(sound, following, slot))
    tl.store(p_new_inverse, inverse)
    tl.store(p_new_inverse + MEMORY * MEMORY, squares)
    tl.store(p_new_curvatures, curvatures)

    steps = tl.where(newest, step_residual[:, None], tl.load(p_steps + 2 * MEMORY))
    differences = tl.where(newest, difference_residual[:, None], tl.load(p_steps + 3 * MEMORY))
    diagonal = tl.where((i_slot[:, None] == i_slot[None, :])[None, :, :], squares, 0.0)
    scale = tl.sum(curvatures, 1) / tl.sum(tl.sum(diagonal, 2), 1)
    inner = tl.sum(inverse * steps[:, None, :], 2)
    outer = tl.sum(squares * inner[:, None, :], 2) - differences
    outer = scale[:, None] * outer + curvatures * inner
    return sound, scale, tl.sum(inverse * outer[:, :, None], 1), -scale[:, None] * inner
