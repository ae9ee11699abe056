"""What a column adds to the scores of each class of rows, in base-2 logarithms.

    bias[c, j] = log2(b_j) + (g_j - lambda_x ||y_j||^2 - lambda_y W[c, l_j]) log2(e) / epsilon

Shapes: g (M,) in the points' own order; everything else, and bias (V, m), in packed order. Rows of
mixed classes take one row of bias without W.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.epsilon import load_scales
from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.points.packed_points import Layout
from otdd_flash.kernels.tiling import BLOCK_COLUMNS


@on_its_device
@triton.jit
def column_bias_kernel(
    potential_ptr,  # (M,) float32
    origin_ptr,  # (m,) int64
    log2_masses_ptr,  # (m,) float32
    squares_ptr,  # (m,) float32, in units of the cost
    labels_ptr,  # (m,) int32, read if CLASSES
    costs_ptr,  # (V, costs_width) float32, read if CLASSES
    bias_ptr,  # (V, m) float32
    epsilon_ptr,  # () float64
    m,
    costs_width,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (row of bias, BLOCK columns)."""
    # One axis for both: the others hold 65,535 programs, which 2^24 columns exceed.
    blocks = m // BLOCK
    i_class = tl.program_id(0) // blocks
    o_column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    _, scale = load_scales(epsilon_ptr, 1.0)
    term = tl.load(potential_ptr + tl.load(origin_ptr + o_column)) - tl.load(squares_ptr + o_column)
    if CLASSES:
        p_costs = costs_ptr + i_class.to(tl.int64) * costs_width
        term -= tl.load(p_costs + tl.load(labels_ptr + o_column))
    bias = tl.load(log2_masses_ptr + o_column) + term * scale
    tl.store(bias_ptr + i_class.to(tl.int64) * m + o_column, bias)


def column_bias(
    potential: Tensor,
    layout: Layout,
    log2_masses: Tensor,
    squares: Tensor,
    costs: Tensor | None,
    epsilon: Tensor,
) -> Tensor:
    """The bias (V, m) of all columns for V classes of rows, or (1, m) without `costs`.

    Args:
        potential: (M,) float32, of the columns, in units of the cost.
        layout: of the columns.
        log2_masses: (m,) float32, very negative for columns that do not count.
        squares: (m,) float32, lambda_x ||y_j||^2.
        costs: (V, V') float32, lambda_y W between classes of rows and of columns.
        epsilon: () float64, in units of the cost.
    """
    m = layout.size
    rows = 1 if costs is None else costs.shape[0]
    bias = torch.empty((rows, m), dtype=torch.float32, device=potential.device)
    column_bias_kernel[(rows * (m // BLOCK_COLUMNS),)](
        potential,
        layout.origin,
        log2_masses,
        squares,
        layout.labels,
        bias if costs is None else costs,
        bias,
        epsilon,
        m,
        0 if costs is None else costs.shape[1],
        CLASSES=costs is not None,
        BLOCK=BLOCK_COLUMNS,
    )
    return bias
