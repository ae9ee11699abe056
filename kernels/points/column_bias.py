"""What a column adds to the scores of all rows, in base-2 logarithms.

    bias_j = log2(b_j) + (g_j - lambda_x ||y_j||^2 [- lambda_y W_j]) log2(e) / epsilon

`passes.half_step`, `passes.pair_sums` and `passes.symmetric_step` call `column_bias`; the kernel of
`passes.plan_terms` calls `store_bias`.

Shapes: g (M,) in the points' own order; everything else, and bias (m,), in packed order. Distances
between classes are part of it where all rows have one class; `class_terms` says what tiles do
otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import load_scales, on_its_device
from otdd_flash.kernels.points.packed_points import Layout
from otdd_flash.kernels.tiling import BLOCK_COLUMNS


@triton.jit
def store_bias(
    potential_ptr,
    origin_ptr,
    log2_masses_ptr,
    squares_ptr,
    labels_ptr,
    costs_ptr,
    bias_ptr,
    o_column,
    scale,  # log2(e) / epsilon
    CLASSES: tl.constexpr,
):
    """The bias of some columns; pointers as the kernel has them."""
    term = tl.load(potential_ptr + tl.load(origin_ptr + o_column)) - tl.load(squares_ptr + o_column)
    if CLASSES:
        term -= tl.load(costs_ptr + tl.load(labels_ptr + o_column))
    bias = tl.load(log2_masses_ptr + o_column) + term * scale
    tl.store(bias_ptr + o_column, bias)


@on_its_device
@triton.jit
def column_bias_kernel(
    potential_ptr,  # (M,) float32
    origin_ptr,  # (m,) int64
    log2_masses_ptr,  # (m,) float32
    squares_ptr,  # (m,) float32, in units of the cost
    labels_ptr,  # (m,) int32, read if CLASSES
    costs_ptr,  # (V_y,) float32, read if CLASSES
    bias_ptr,  # (m,) float32
    epsilon_ptr,  # () float64
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK columns."""
    o_column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, scale = load_scales(epsilon_ptr, 1.0)
    store_bias(
        potential_ptr, origin_ptr, log2_masses_ptr, squares_ptr, labels_ptr, costs_ptr,
        bias_ptr, o_column, scale, CLASSES,
    )  # fmt: skip


def column_bias(
    potential: Tensor,
    layout: Layout,
    log2_masses: Tensor,
    squares: Tensor,
    costs: Tensor,
    epsilon: Tensor,
) -> Tensor:
    """The bias (m,) of all columns, with class distances if all rows have one class.

    Args:
        potential: (M,) float32, of the columns, in units of the cost.
        layout: of the columns.
        log2_masses: (m,) float32, very negative for columns that do not count.
        squares: (m,) float32, lambda_x ||y_j||^2.
        costs: (V_x, V_y) float32, lambda_y W between classes of rows and of columns.
        epsilon: () float64, in units of the cost.
    """
    m = layout.size
    bias = torch.empty(m, dtype=torch.float32, device=potential.device)
    column_bias_kernel[(m // BLOCK_COLUMNS,)](
        potential,
        layout.origin,
        log2_masses,
        squares,
        layout.labels,
        costs,
        bias,
        epsilon,
        CLASSES=len(costs) == 1,
        BLOCK=BLOCK_COLUMNS,
    )
    return bias
