"""Begin, correct and resume a solve by conjugate gradients, in one launch each.

The formulas are those of `engine.conjugate_gradients`, which computes in PyTorch, so a change must
be made in both (`tests/kernels/test_linear.py` compares them). A program owns one right-hand side
with its direction, as in `cg_step`. All three stages begin new iterations of the directions that
are then `pending`, from the residual that is kept. They store its first direction as halves; with a
preconditioner they store 0, and `cg_turn` makes the first direction.
`engine.conjugate_gradients_kernels` calls `cg_start` and holds what it updates.

Shapes: vectors (m, s), those of a solve with columns of stride m; masses (m,); numbers (s,).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.linear.cg_step import Image, Numbers, Vectors, load_image, pack_direction

BLOCK = 4096

# Inputs of new iterations: a first right-hand side, the image of the solution, or nothing.
BEGIN, CORRECT, RESUME = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Kept(NamedTuple):
    """The state of s directions before iterations start again.

    Attributes:
        right: right-hand sides in the system's range, (m, s) float64.
        values: the best solutions, (m, s) float64.
        left: their residuals, (m, s) float64.
        size: of the right-hand sides, (s,) float64.
        now: of the residuals, (s,) float64.
        target: the size of a residual that is small enough, (s,) float64.
        iterations: of all corrections, (s,) int64.
        pending: whether a correction is wanted, (s,) bool.
        missed: whether the target is not met and iterations are left, (s,) bool.
    """

    right: Tensor
    values: Tensor
    left: Tensor
    size: Tensor
    now: Tensor
    target: Tensor
    iterations: Tensor
    pending: Tensor
    missed: Tensor


@on_its_device
@triton.jit
def cg_start_kernel(
    given_ptr,  # (m, s) float64, of any strides: right-hand sides, read to BEGIN
    found_ptr,  # (rows, PARTS, s) float32 or float64, of any strides: an image, read to CORRECT
    found_scales_ptr,  # (s,) float64, as what follows up to the masses
    weights_ptr,  # (m,) float64
    diagonal_ptr,  # (m,) float64
    found_position_ptr,  # (m,) int64
    masses_ptr,  # (m,) float64, of the system
    total_ptr,  # () float64, their sum
    near_masses_ptr,  # (m,) float64, of the system that iterations are of
    position_ptr,  # (m,) int64
    right_ptr,  # (m, s) float64
    kept_ptr,  # (m, s) float64
    kept_left_ptr,  # (m, s) float64
    right_size_ptr,  # (s,) float64
    now_ptr,  # (s,) float64
    target_ptr,  # (s,) float64
    taken_ptr,  # (s,) int64
    pending_ptr,  # (s,) bool
    missed_ptr,  # (s,) bool
    values_ptr,  # (m, s) float64
    left_ptr,  # (m, s) float64
    direction_ptr,  # (m, s) float64
    square_ptr,  # (s,) float64
    energy_ptr,  # (s,) float64
    unknown_ptr,  # (s,) float64
    iterations_ptr,  # (s,) int64
    active_ptr,  # (s,) bool
    goal_ptr,  # (s,) float64
    most_ptr,  # (s,) int64
    packed_ptr,  # (rows, 2, s) float16
    scales_ptr,  # (s,) float64
    m,
    s,
    given_row_stride,
    given_column_stride,
    row_stride,
    part_stride,
    column_stride,
    whole,
    split,
    slots,
    tolerance,
    aim,
    max_iterations,
    at_once,
    PARTS: tl.constexpr,
    STAGE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    PRECONDITIONED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per direction."""
    i = tl.program_id(0).to(tl.int64)
    given_ptr += i * given_column_stride
    found_ptr += i * column_stride
    right_ptr += i * m
    kept_ptr += i * m
    kept_left_ptr += i * m
    values_ptr += i * m
    left_ptr += i * m
    direction_ptr += i * m
    # All threads have read numbers before the first of them writes: sums make them wait in between.
    if STAGE == CORRECT:
        tl.store(active_ptr + i, 0)
        if tl.load(pending_ptr + i) == 0:
            return
    if STAGE == BEGIN:
        taken = tl.zeros((), tl.int64)
    else:
        target, before = tl.load(target_ptr + i), tl.load(now_ptr + i)
        taken = tl.load(taken_ptr + i)
        if STAGE == CORRECT:
            iterations, most = tl.load(iterations_ptr + i), tl.load(most_ptr + i)
            taken += iterations

    if STAGE == CORRECT:
        found_scale = tl.load(found_scales_ptr + i)
    if STAGE != RESUME:
        # In `direction`: the right-hand side, or the residual, in the system's range.
        sums = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, m, BLOCK):
            o = first + tl.arange(0, BLOCK)
            mask = o < m
            if STAGE == CORRECT:
                values = tl.load(kept_ptr + o, mask=mask, other=0.0)
                values += tl.load(values_ptr + o, mask=mask, other=0.0)
                image = load_image(
                    values, found_ptr, found_scale, weights_ptr, diagonal_ptr, found_position_ptr,
                    o, row_stride, part_stride, whole, split, slots, mask, PARTS,
                )  # fmt: skip
                given = tl.load(right_ptr + o, mask=mask, other=0.0) - image
            else:
                p_given = given_ptr + o.to(tl.int64) * given_row_stride
                given = tl.load(p_given, mask=mask, other=0.0)
            given = tl.where(tl.load(masses_ptr + o, mask=mask, other=0.0) > 0, given, 0.0)
            tl.store(direction_ptr + o, given, mask=mask)
            sums += given
        share = tl.sum(sums, 0) / tl.load(total_ptr)
        sizes = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, m, BLOCK):
            o = first + tl.arange(0, BLOCK)
            mask = o < m
            masses = tl.load(masses_ptr + o, mask=mask, other=0.0)
            given = tl.load(direction_ptr + o, mask=mask, other=0.0)
            if CONSTANTS:
                given -= masses * share
                tl.store(direction_ptr + o, given, mask=mask)
            sizes += given * given / tl.where(masses > 0, masses, 1.0)
        found = tl.sqrt(tl.sum(sizes, 0))

    if STAGE == BEGIN:
        for first in range(0, m, BLOCK):
            o = first + tl.arange(0, BLOCK)
            mask = o < m
            given = tl.load(direction_ptr + o, mask=mask, other=0.0)
            tl.store(right_ptr + o, given, mask=mask)
            tl.store(kept_left_ptr + o, given, mask=mask)
            tl.store(kept_ptr + o, tl.zeros((BLOCK,), tl.float64), mask=mask)
            # Right-hand sides without iterations are corrected by 0.
            tl.store(values_ptr + o, tl.zeros((BLOCK,), tl.float64), mask=mask)
        tl.store(right_size_ptr + i, found)
        tl.store(now_ptr + i, found)
        target = tolerance * found
        tl.store(target_ptr + i, target)
        missed = (found > target) & (taken < max_iterations)
        pending = missed
    elif STAGE == CORRECT:
        missed = (tl.where(found < before, found, before) > target) & (taken < max_iterations)
        pending = (found <= before / 2) & missed & (iterations < most)
        if found < before:
            tl.store(now_ptr + i, found)
            for first in range(0, m, BLOCK):
                o = first + tl.arange(0, BLOCK)
                mask = o < m
                kept = tl.load(kept_ptr + o, mask=mask, other=0.0)
                kept += tl.load(values_ptr + o, mask=mask, other=0.0)
                tl.store(kept_ptr + o, kept, mask=mask)
                given = tl.load(direction_ptr + o, mask=mask, other=0.0)
                tl.store(kept_left_ptr + o, given, mask=mask)
    else:
        missed = (before > target) & (taken < max_iterations)
        pending = missed
    # Loads have arrived, and all threads see the stores of all.
    tl.debug_barrier()
    tl.store(taken_ptr + i, taken)
    tl.store(pending_ptr + i, pending)
    tl.store(missed_ptr + i, missed)
    tl.store(iterations_ptr + i, tl.zeros((), tl.int64))
    if pending == 0:
        tl.store(active_ptr + i, 0)
        return

    sizes = tl.zeros((BLOCK,), tl.float64)
    largest = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, m, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < m
        masses = tl.load(near_masses_ptr + o, mask=mask, other=0.0)
        left = tl.load(kept_left_ptr + o, mask=mask, other=0.0)
        direction = tl.where(masses > 0, left / tl.where(masses > 0, masses, 1.0), 0.0)
        sizes += left * direction
        if PRECONDITIONED:
            direction = tl.zeros((BLOCK,), tl.float64)
        largest = tl.maximum(largest, tl.abs(direction))
        tl.store(left_ptr + o, left, mask=mask)
        tl.store(values_ptr + o, tl.zeros((BLOCK,), tl.float64), mask=mask)
        tl.store(direction_ptr + o, direction, mask=mask)
    size, goal = tl.sum(sizes, 0), aim * target
    most = tl.minimum(max_iterations - taken, at_once)
    tl.store(square_ptr + i, size)
    tl.store(energy_ptr + i, size)
    tl.store(unknown_ptr + i, tl.zeros((), tl.float64))
    tl.store(goal_ptr + i, goal)
    tl.store(most_ptr + i, most)
    active = size > goal * goal
    tl.store(active_ptr + i, active)
    if active & (not PRECONDITIONED):
        pack_direction(
            direction_ptr, position_ptr, packed_ptr + i, scales_ptr + i,
            tl.max(largest, 0), m, s, BLOCK,
        )  # fmt: skip


def cg_start(
    given: Tensor | Image | None,
    masses: tuple[Tensor, Tensor, Tensor],
    position: Tensor,
    kept: Kept,
    vectors: Vectors,
    numbers: Numbers,
    packed: tuple[Tensor, Tensor],
    limits: tuple[float, float, int, int],
    stage: tl.constexpr,
    *,
    constants: bool,
    preconditioned: bool,
) -> None:
    """Update the kept state, start iterations from its residual, and pack their first directions.

    Args:
        given: right-hand sides (m, s) float64, of any strides, to `BEGIN`; to `CORRECT` the image
            of the solutions that are kept plus those of the iterations; None to `RESUME`.
        masses: (m,) float64 of the system, their sum (), and (m,) of the one that iterates.
        position: (m,) int64, rows of points in `packed`.
        kept: updated.
        vectors: of the iterations.
        numbers: of the iterations.
        packed: directions (rows, 2, s) float16, 0 for padding, and their scales (s,).
        limits: relative tolerance, the part of it to aim at, iterations at the most, and those of
            a correction.
        stage: `BEGIN`, `CORRECT` or `RESUME`.
        constants: whether the matrix takes constants to 0.
        preconditioned: whether the first directions are left to `cg_turn`.
    """
    m, count = vectors.direction.shape
    of_system, total, near = masses
    right = given if isinstance(given, Tensor) else kept.right
    if isinstance(given, Image):
        image, places = (given.found.values, *given[1:]), given.found.places
    else:
        image, places = (right,) * 5, (0,) * 6
    cg_start_kernel[(count,)](
        right,
        *image,
        of_system,
        total,
        near,
        position,
        *kept,
        *vectors,
        *numbers,
        *packed,
        m,
        count,
        *right.stride(),
        *places,
        *limits,
        PARTS=image[0].shape[1] if isinstance(given, Image) else 1,
        STAGE=stage.value,
        CONSTANTS=constants,
        PRECONDITIONED=preconditioned,
        BLOCK=BLOCK,
        num_warps=16,
    )
