"""One step of conjugate gradients for several right-hand sides, in one launch.

`engine.conjugate_gradients_kernels` calls `cg_step` and `cg_turn`; `cg_start` uses their device
functions. An `Image` comes from `operators.triton_plans`, or by `Image.of` from a product in
PyTorch. The formulas of a step are those of `engine.conjugate_gradients`, which computes in
PyTorch, so a change must be made in both (`tests/kernels/test_linear.py` compares them). Here a
program owns one of the right-hand sides, with its search direction: its vectors stay in the cache,
and its sums are added in the same order whatever other directions there are. It takes the image of
the direction as the last product of a plan leaves it,

    image = diagonal direction + weights found / scale,

and stores the next direction as halves, as the first product of a plan reads it. With a
preconditioner it stores the residual only, and `cg_turn` makes the next direction.

Shapes: vectors (m, s), columns of stride m; masses, weights and diagonal (m,); numbers (s,); found
and packed in the order of their own rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.linear.halves import Unmerged, load_found, scale_below, store_halves

BLOCK = 4096


class Vectors(NamedTuple):
    """The vectors of s directions, (m, s) float64 each, columns of stride m.

    Attributes:
        values: the solution so far.
        left: the recursive residual.
        direction: the vector whose image is wanted next.
    """

    values: Tensor
    left: Tensor
    direction: Tensor


class Numbers(NamedTuple):
    """The numbers of s directions, (s,) each.

    Attributes:
        square: of the size of the recursive residual, scaled by masses, float64.
        energy: <residual, preconditioned residual>, float64.
        unknown: bound on the drift of the recursive residual, by rounding, float64.
        iterations: int64.
        active: whether it goes on, bool.
        goal: at which size of the residual it stops, float64.
        most: after how many iterations it does, int64.
    """

    square: Tensor
    energy: Tensor
    unknown: Tensor
    iterations: Tensor
    active: Tensor
    goal: Tensor
    most: Tensor


class Image(NamedTuple):
    """The image of directions or of other values, diagonal value + weights found / scale.

    Attributes:
        found: products (rows, parts, s), or of more columns.
        scales: (s,) float64.
        weights: (m,) float64.
        diagonal: (m,) float64.
        position: (m,) int64, the row of a point.
    """

    found: Unmerged
    scales: Tensor
    weights: Tensor
    diagonal: Tensor
    position: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Image:
        """Wrap an image (m, s) float64 that is computed already."""
        (m, count), new = values.shape, values.new_ones
        position = torch.arange(m, device=values.device)
        found = Unmerged.of(values[:, None])
        return cls(found, new(count), new(m), values.new_zeros(m), position)


@triton.jit
def load_image(
    values,  # (BLOCK,) float64, whose image it is
    found_ptr,
    found_scale,
    weights_ptr,  # (m,) float64
    diagonal_ptr,  # (m,) float64
    position_ptr,  # (m,) int64
    o,
    row_stride,
    part_stride,
    whole,
    split,
    slots,
    mask,
    PARTS: tl.constexpr,
):
    """Load a block of an image, float64."""
    o_row = tl.load(position_ptr + o, mask=mask, other=0)
    found = load_found(found_ptr, o_row, row_stride, part_stride, whole, split, slots, mask, PARTS)
    image = tl.load(diagonal_ptr + o, mask=mask, other=0.0) * values
    return image + tl.load(weights_ptr + o, mask=mask, other=0.0) * (found / found_scale)


@triton.jit
def pack_direction(
    direction_ptr,  # (m,) float64
    position_ptr,  # (m,) int64
    packed_ptr,  # (rows, 2, s) float16, from column i on
    scale_ptr,  # float64
    largest,
    m,
    s,
    BLOCK: tl.constexpr,
):
    """Store a direction as halves, and their scale."""
    scale = scale_below(largest)
    tl.store(scale_ptr, scale)
    for first in range(0, m, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < m
        o_row = tl.load(position_ptr + o, mask=mask, other=0)
        direction = tl.load(direction_ptr + o, mask=mask, other=0.0)
        store_halves(packed_ptr + o_row * 2 * s, direction * scale, s, mask)


@triton.jit
def next_direction(
    left_ptr,  # (m,) float64
    scaled_ptr,  # (m,) float64: masses, or the preconditioned residual if PRECONDITIONED
    direction_ptr,  # (m,) float64
    beta,
    m,
    PRECONDITIONED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write preconditioned residual + beta direction, the next one; return its largest entry."""
    largest = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, m, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < m
        scaled = tl.load(scaled_ptr + o, mask=mask, other=0.0)
        if not PRECONDITIONED:
            left = tl.load(left_ptr + o, mask=mask, other=0.0)
            scaled = left / tl.where(scaled > 0, scaled, 1.0)
        direction = tl.load(direction_ptr + o, mask=mask, other=0.0)
        direction = scaled + beta * direction
        tl.store(direction_ptr + o, direction, mask=mask)
        largest = tl.maximum(largest, tl.abs(direction))
    return tl.max(largest, 0)


@on_its_device
@triton.jit
def cg_step_kernel(
    found_ptr,  # (rows, PARTS, s) float32 or float64, of any strides
    found_scales_ptr,  # (s,) float64
    weights_ptr,  # (m,) float64
    diagonal_ptr,  # (m,) float64
    position_ptr,  # (m,) int64
    masses_ptr,  # (m,) float64
    total_ptr,  # () float64, their sum
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
    row_stride,
    part_stride,
    column_stride,
    whole,
    split,
    slots,
    precision,
    PARTS: tl.constexpr,
    CONSTANTS: tl.constexpr,
    PRECONDITIONED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per direction."""
    i = tl.program_id(0).to(tl.int64)
    if tl.load(active_ptr + i) == 0:
        return
    found_ptr += i * column_stride
    values_ptr += i * m
    left_ptr += i * m
    direction_ptr += i * m
    # All threads have read these before the first of them writes: sums make them wait in between.
    square, unknown = tl.load(square_ptr + i), tl.load(unknown_ptr + i)
    energy = tl.load(energy_ptr + i)
    iterations, most = tl.load(iterations_ptr + i) + 1, tl.load(most_ptr + i)
    goal, found_scale = tl.load(goal_ptr + i), tl.load(found_scales_ptr + i)

    curvatures = tl.zeros((BLOCK,), tl.float64)
    lengths = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, m, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < m
        direction = tl.load(direction_ptr + o, mask=mask, other=0.0)
        image = load_image(
            direction, found_ptr, found_scale, weights_ptr, diagonal_ptr, position_ptr, o,
            row_stride, part_stride, whole, split, slots, mask, PARTS,
        )  # fmt: skip
        curvatures += direction * image
        lengths += direction * direction * tl.load(masses_ptr + o, mask=mask, other=0.0)
    curved = tl.sum(curvatures, 0)
    step = energy / tl.where(curved > 0, curved, 1.0)
    unknown += precision * step * tl.sqrt(tl.sum(lengths, 0))
    tl.store(unknown_ptr + i, unknown)
    if (curved <= 0) | (unknown > tl.sqrt(square)):
        tl.store(active_ptr + i, 0)
        return

    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, m, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < m
        direction = tl.load(direction_ptr + o, mask=mask, other=0.0)
        image = load_image(
            direction, found_ptr, found_scale, weights_ptr, diagonal_ptr, position_ptr, o,
            row_stride, part_stride, whole, split, slots, mask, PARTS,
        )  # fmt: skip
        masses = tl.load(masses_ptr + o, mask=mask, other=0.0)
        values = tl.load(values_ptr + o, mask=mask, other=0.0)
        left = tl.load(left_ptr + o, mask=mask, other=0.0) - step * image
        left = tl.where(masses > 0, left, 0.0)
        tl.store(values_ptr + o, values + step * direction, mask=mask)
        tl.store(left_ptr + o, left, mask=mask)
        # Their sum, or already their size.
        sums += left if CONSTANTS else left * left / tl.where(masses > 0, masses, 1.0)
    after = tl.sum(sums, 0)

    if CONSTANTS:
        share = after / tl.load(total_ptr)
        sizes = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, m, BLOCK):
            o = first + tl.arange(0, BLOCK)
            mask = o < m
            masses = tl.load(masses_ptr + o, mask=mask, other=0.0)
            left = tl.load(left_ptr + o, mask=mask, other=0.0) - masses * share
            tl.store(left_ptr + o, left, mask=mask)
            sizes += left * left / tl.where(masses > 0, masses, 1.0)
        after = tl.sum(sizes, 0)

    going_on = (after > goal * goal) & (iterations < most)
    tl.store(iterations_ptr + i, iterations)
    tl.store(square_ptr + i, after)
    tl.store(active_ptr + i, going_on)
    if not PRECONDITIONED:
        tl.store(energy_ptr + i, after)
        if going_on:
            largest = next_direction(
                left_ptr, masses_ptr, direction_ptr, after / energy, m, False, BLOCK
            )
            pack_direction(
                direction_ptr, position_ptr, packed_ptr + i, scales_ptr + i, largest, m, s, BLOCK
            )


@on_its_device
@triton.jit
def cg_turn_kernel(
    scaled_ptr,  # (m, s) float64
    position_ptr,  # (m,) int64
    left_ptr,  # (m, s) float64
    direction_ptr,  # (m, s) float64
    energy_ptr,  # (s,) float64
    active_ptr,  # (s,) bool
    packed_ptr,  # (rows, 2, s) float16
    scales_ptr,  # (s,) float64
    m,
    s,
    BLOCK: tl.constexpr,
):
    """One program per direction."""
    i = tl.program_id(0).to(tl.int64)
    if tl.load(active_ptr + i) == 0:
        return
    scaled_ptr += i * m
    left_ptr += i * m
    direction_ptr += i * m
    # All threads have read it before the first of them writes: the sum makes them wait in between.
    before = tl.load(energy_ptr + i)
    energies = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, m, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < m
        left = tl.load(left_ptr + o, mask=mask, other=0.0)
        energies += left * tl.load(scaled_ptr + o, mask=mask, other=0.0)
    energy = tl.sum(energies, 0)
    tl.store(energy_ptr + i, energy)
    largest = next_direction(left_ptr, scaled_ptr, direction_ptr, energy / before, m, True, BLOCK)
    pack_direction(
        direction_ptr, position_ptr, packed_ptr + i, scales_ptr + i, largest, m, s, BLOCK
    )


def cg_step(
    image: Image,
    masses: tuple[Tensor, Tensor],
    vectors: Vectors,
    numbers: Numbers,
    packed: tuple[Tensor, Tensor],
    precision: float,
    *,
    constants: bool,
    preconditioned: bool,
) -> None:
    """Update vectors and numbers by the image of the directions, and pack the next ones.

    Args:
        image: as the system's last product leaves it.
        masses: (m,) float64, and their sum ().
        vectors: of the directions.
        numbers: of the directions.
        packed: directions (rows, 2, s) float16, 0 for padding, and their scales (s,).
        precision: of the image.
        constants: whether the matrix takes constants to 0.
        preconditioned: whether the next directions are left to `cg_turn`.
    """
    m, count = vectors.direction.shape
    cg_step_kernel[(count,)](
        image.found.values,
        *image[1:],
        *masses,
        *vectors,
        *numbers,
        *packed,
        m,
        count,
        *image.found.places,
        precision,
        PARTS=image.found.values.shape[1],
        CONSTANTS=constants,
        PRECONDITIONED=preconditioned,
        BLOCK=BLOCK,
        num_warps=16,
    )


def cg_turn(
    scaled: Tensor,
    position: Tensor,
    vectors: Vectors,
    numbers: Numbers,
    packed: tuple[Tensor, Tensor],
) -> None:
    """Compute the next directions, or the first ones where directions are 0, packed.

    Args:
        scaled: preconditioned residuals (m, s) float64, columns of stride m.
        position: (m,) int64, rows of points in `packed`.
        vectors: of the directions.
        numbers: of the directions; energies are those before.
        packed: directions (rows, 2, s) float16, 0 for padding, and their scales (s,).
    """
    m, count = vectors.direction.shape
    cg_turn_kernel[(count,)](
        scaled,
        position,
        vectors.left,
        vectors.direction,
        numbers.energy,
        numbers.active,
        *packed,
        m,
        count,
        BLOCK=BLOCK,
        num_warps=16,
    )
