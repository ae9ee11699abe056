"""One step of conjugate gradients for several right-hand sides, in one launch.

What a step does is said where it is done in PyTorch, `solver.conjugate_gradients`; here a program
owns a direction: its vectors lie in the cache, and its sums are added in the same order whatever
other directions there are.

Shapes: vectors (m, s), those that change with columns of stride m; masses (m,); numbers (s,).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device

BLOCK = 4096


@on_its_device
@triton.jit
def cg_step_kernel(
    image_ptr,  # (m, s) float64, of any strides
    masses_ptr,  # (m,) float64
    total_ptr,  # () float64, their sum
    values_ptr,  # (m, s) float64
    left_ptr,  # (m, s) float64
    direction_ptr,  # (m, s) float64
    size_ptr,  # (s,) float64
    unknown_ptr,  # (s,) float64
    iterations_ptr,  # (s,) int64
    active_ptr,  # (s,) bool
    goal_ptr,  # (s,) float64
    most_ptr,  # (s,) int64
    m,
    image_row_stride,
    image_column_stride,
    precision,
    CONSTANTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per direction."""
    i = tl.program_id(0).to(tl.int64)
    if tl.load(active_ptr + i) == 0:
        return
    image_ptr += i * image_column_stride
    values_ptr += i * m
    left_ptr += i * m
    direction_ptr += i * m
    size = tl.load(size_ptr + i)

    energies = tl.zeros((BLOCK,), tl.float64)
    lengths = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, m, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < m
        direction = tl.load(direction_ptr + o, mask=mask, other=0.0)
        image = tl.load(image_ptr + o.to(tl.int64) * image_row_stride, mask=mask, other=0.0)
        energies += direction * image
        lengths += direction * direction * tl.load(masses_ptr + o, mask=mask, other=0.0)
    energy = tl.sum(energies, 0)
    step = size / tl.where(energy > 0, energy, 1.0)
    unknown = tl.load(unknown_ptr + i) + precision * step * tl.sqrt(tl.sum(lengths, 0))
    tl.store(unknown_ptr + i, unknown)
    if (energy <= 0) | (unknown > tl.sqrt(size)):
        tl.store(active_ptr + i, 0)
        return

    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, m, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < m
        direction = tl.load(direction_ptr + o, mask=mask, other=0.0)
        image = tl.load(image_ptr + o.to(tl.int64) * image_row_stride, mask=mask, other=0.0)
        values = tl.load(values_ptr + o, mask=mask, other=0.0)
        left = tl.load(left_ptr + o, mask=mask, other=0.0) - step * image
        left = tl.where(tl.load(masses_ptr + o, mask=mask, other=0.0) > 0, left, 0.0)
        tl.store(values_ptr + o, values + step * direction, mask=mask)
        tl.store(left_ptr + o, left, mask=mask)
        sums += left
    share = tl.sum(sums, 0) / tl.load(total_ptr) if CONSTANTS else 0.0

    sizes = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, m, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < m
        masses = tl.load(masses_ptr + o, mask=mask, other=0.0)
        left = tl.load(left_ptr + o, mask=mask, other=0.0) - masses * share
        tl.store(left_ptr + o, left, mask=mask)
        sizes += left * left / tl.where(masses > 0, masses, 1.0)
    after = tl.sum(sizes, 0)

    for first in range(0, m, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < m
        masses = tl.load(masses_ptr + o, mask=mask, other=0.0)
        scaled = tl.load(left_ptr + o, mask=mask, other=0.0) / tl.where(masses > 0, masses, 1.0)
        direction = tl.load(direction_ptr + o, mask=mask, other=0.0)
        tl.store(direction_ptr + o, scaled + after / size * direction, mask=mask)
    iterations = tl.load(iterations_ptr + i) + 1
    goal = tl.load(goal_ptr + i)
    tl.store(iterations_ptr + i, iterations)
    tl.store(size_ptr + i, after)
    going_on = (after > goal * goal) & (iterations < tl.load(most_ptr + i))
    tl.store(active_ptr + i, going_on)


def cg_step(
    image: Tensor,
    masses: Tensor,
    total: Tensor,
    vectors: tuple[Tensor, Tensor, Tensor],
    numbers: tuple[Tensor, Tensor, Tensor, Tensor],
    limits: tuple[Tensor, Tensor],
    precision: float,
    *,
    constants: bool,
) -> None:
    """Update vectors and numbers by the image (m, s) of the directions; arguments as above.

    Args:
        image: (m, s) float64, of any strides.
        masses: (m,) float64.
        total: their sum, ().
        vectors: values, left and direction.
        numbers: size, unknown, iterations and active.
        limits: goal and most.
        precision: of the image.
        constants: whether the matrix takes constants to 0.
    """
    m, count = image.shape
    cg_step_kernel[(count,)](
        image,
        masses,
        total,
        *vectors,
        *numbers,
        *limits,
        m,
        *image.stride(),
        precision,
        CONSTANTS=constants,
        BLOCK=BLOCK,
        num_warps=16,
    )
