"""What rows and columns add to the scores of a plan where it is computed, in base-2 logarithms.

    row_term_i = (f_i - lambda_x ||x_i||^2) log2(e) / epsilon + LOG2_SCALE
    bias_j = log2(b_j) + (g_j - lambda_x ||y_j||^2 [- lambda_y W_j]) log2(e) / epsilon

`operators.triton_plans`, `block_product`, `fused_product` and `plan_application` call `plan_terms`.

Shapes: f (N,), g (M,) and masses (N,) in the points' own order; squares, row terms (n,) and bias
(m,) in packed order. Rows of padding are not there, nor are those of points without mass where
masses are given. Class distances are as `class_terms` says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import LOG2_E, on_its_device
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.class_terms import ClassTerms
from otdd_flash.kernels.points.column_bias import store_bias
from otdd_flash.kernels.tiling import BLOCK_COLUMNS

# Q is scaled by 2^10: rows whose sums lie in this range neither overflow nor lose bits.
LOG2_SCALE = 10
ROW_RANGE = 2.0**-5, 2.0**5
# The exponent of a row that is not there.
NOTHING = -1e30


class PlanTerms(NamedTuple):
    """What a plan's programs read besides coordinates.

    Attributes:
        scale: log2(e) / epsilon.
        row_term: (n,) float32.
        bias: (m,) float32.
        classes: class distances.
    """

    scale: float
    row_term: Tensor
    bias: Tensor
    classes: ClassTerms


@on_its_device
@triton.jit
def plan_terms_kernel(
    row_potential_ptr,  # (N,) float32, in units of the cost
    masses_ptr,  # (N,) float64, read if MASSES
    row_origin_ptr,  # (n,) int64
    filled_ptr,  # (n,) bool
    row_squares_ptr,  # (n,) float32, in units of the cost
    row_term_ptr,  # (n,) float32
    potential_ptr,  # (M,) float32
    origin_ptr,  # (m,) int64
    log2_masses_ptr,  # (m,) float32
    squares_ptr,  # (m,) float32
    labels_ptr,  # (m,) int32, read if CLASSES
    costs_ptr,  # (V_y,) float32, read if CLASSES
    bias_ptr,  # (m,) float32
    row_blocks,
    scale,
    raised,
    nothing,
    MASSES: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK rows, then one per BLOCK columns."""
    i = tl.program_id(0)
    if i >= row_blocks:
        o_column = (i - row_blocks) * BLOCK + tl.arange(0, BLOCK)
        store_bias(
            potential_ptr, origin_ptr, log2_masses_ptr, squares_ptr, labels_ptr, costs_ptr,
            bias_ptr, o_column, scale, CLASSES,
        )  # fmt: skip
    else:
        o = i * BLOCK + tl.arange(0, BLOCK)
        there = tl.load(filled_ptr + o) != 0
        origin = tl.load(row_origin_ptr + o)
        if MASSES:
            there = there & (tl.load(masses_ptr + origin, mask=there, other=0.0) > 0)
        potential = tl.load(row_potential_ptr + origin, mask=there, other=0.0)
        term = (potential - tl.load(row_squares_ptr + o)) * scale + raised
        tl.store(row_term_ptr + o, tl.where(there, term, nothing))


def plan_terms(
    rows: Side,
    columns: Side,
    scores: Scores,
    potentials: tuple[Tensor, Tensor],
    epsilon: float,
    masses: Tensor | None,
) -> PlanTerms:
    """The terms of a plan.

    Args:
        rows: n packed points.
        columns: m packed points.
        scores: how they make scores.
        potentials: f (N,) and g (M,), float32, in units of the cost.
        epsilon: in units of the cost.
        masses: (N,) float64, of which rows of points without are not there; all are for None.
    """
    (f, g), scale = potentials, LOG2_E.value / epsilon
    of_rows, of_columns = rows.points.layout, columns.points.layout
    row_term = torch.empty(of_rows.size, dtype=torch.float32, device=f.device)
    bias = torch.empty(of_columns.size, dtype=torch.float32, device=f.device)
    row_blocks, column_blocks = of_rows.size // BLOCK_COLUMNS, of_columns.size // BLOCK_COLUMNS
    plan_terms_kernel[(row_blocks + column_blocks,)](
        f,
        f if masses is None else masses,
        of_rows.origin,
        of_rows.filled,
        rows.squares,
        row_term,
        g,
        of_columns.origin,
        columns.log2_masses,
        columns.squares,
        of_columns.labels,
        scores.costs,
        bias,
        row_blocks,
        scale,
        float(LOG2_SCALE),
        NOTHING,
        MASSES=masses is not None,
        CLASSES=len(scores.costs) == 1,
        BLOCK=BLOCK_COLUMNS,
    )
    return PlanTerms(scale, row_term, bias, ClassTerms.of(of_rows, of_columns, scores.costs))
