"""Terms that make scores of products of points: class distances, and those of rows and columns.

`ClassTerms` says what class distances take from a tile of scores, and where the tile finds it:

    logits_ij = scale S_ij + bias_j - lambda_y W[k_i, l_j] log2(e) / epsilon

No table of all columns is made for it. The numbers looked up depend on how points are packed:

    in_bias   all rows have one class              nothing: the bias of columns holds it
    blocks    blocks of both sides have one class  a number for every 128 columns of a tile
    columns   blocks of rows have one class        a number for every column of a tile
    scores    a block of rows has several          a number for every score

`half_step`, `symmetric_step` and `plan_terms` make it; the kernels of `half_step`,
`symmetric_step`, `plan_blocks` and `fused_product` call `row_offsets` and `add_bias`.
`resident_half_step` has the same lookups of its own.

`column_bias` is the term of a column in the scores of all rows, in base-2 logarithms:

    bias_j = log2(b_j) + (g_j - lambda_x ||y_j||^2 [- lambda_y W_j]) log2(e) / epsilon

`half_step` and `symmetric_step` call it.

Shapes: g (M,) in the points' own order; everything else, and bias (m,), in packed order. The term
[- lambda_y W_j] is there if all rows have one class.

`plan_terms` makes the terms of rows and columns in the scores of a plan where it is computed:

    row_term_i = (f_i - lambda_x ||x_i||^2) log2(e) / epsilon + LOG2_SCALE
    bias_j = log2(b_j) + (g_j - lambda_x ||y_j||^2 [- lambda_y W_j]) log2(e) / epsilon

`operators.triton_plans`, `block_products` and `fused_product` call it.

Shapes: f (N,), g (M,) and masses (N,) in the points' own order; squares, row terms (n,) and bias
(m,) in packed order. Rows of padding get `NOTHING` as their row term, and so do points without mass
if masses are given: their entries are 0.

Plans are scaled by 2^LOG2_SCALE, and their rows must sum to numbers in ROW_RANGE, to fit into
float16. The callers of `plan_terms` divide by the scale; `operators.triton_plans`, `block_products`
and `linear.halves` check the range.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import LOG2_E, load_scales, on_its_device
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import Layout
from otdd_flash.kernels.tiling import BLOCK_COLUMNS, BLOCK_ROWS

# Rows and columns of one class come in blocks of so many.
BLOCK = tl.constexpr(BLOCK_ROWS)


class ClassTerms(NamedTuple):
    """The class distances of two layouts, as tiles look them up.

    Attributes:
        kind: `in_bias`, `blocks`, `columns` or `scores`.
        rows: int32, the class of each block of rows (n / BLOCK_ROWS,), or of each row (n,) for
            `scores`.
        columns: int32, the class of each block of columns (m / BLOCK_ROWS,) for `blocks`, or of
            each column (m,) for `columns` and `scores`; not read for `in_bias`.
        costs: (V_x, V_y) float32, lambda_y W.
    """

    kind: str
    rows: Tensor
    columns: Tensor
    costs: Tensor

    @classmethod
    def of(cls, rows: Layout, columns: Layout, costs: Tensor) -> ClassTerms:
        """The terms of class distances `costs` (V_x, V_y)."""
        if not rows.pure:
            return cls("scores", rows.labels, columns.labels, costs)
        if len(costs) == 1:
            return cls("in_bias", rows.block_class, columns.block_class, costs)
        if columns.pure:
            return cls("blocks", rows.block_class, columns.block_class, costs)
        return cls("columns", rows.block_class, columns.labels, costs)


@triton.jit
def row_offsets(
    row_classes_ptr,  # (n / BLOCK,) int32, or (n,) if CLASSES is "scores"
    i_block,
    o_row,  # (BLOCK_M,), rows of the block
    costs_width,
    CLASSES: tl.constexpr,
):
    """Offsets in the table of the distances of a block's class, or of each row's."""
    if CLASSES == "scores":
        # Indices into the table, below 2^31, take half of the registers of pointers.
        offsets = tl.load(row_classes_ptr + o_row) * costs_width
    else:
        offsets = tl.load(row_classes_ptr + i_block).to(tl.int64) * costs_width
    return offsets


@triton.jit
def add_bias(
    scores,  # (BLOCK_M, BLOCK_N) float32, in base-2 logarithms
    bias,  # (BLOCK_N,) float32
    column,  # the first of the tile
    o_costs,  # of `row_offsets`
    column_classes_ptr,  # (m / BLOCK,) int32 if CLASSES is "blocks", or (m,)
    costs_ptr,  # (V_x, costs_width) float32, in units of the cost
    costs_scale,  # log2(e) / epsilon
    BLOCK_N: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """The logits of a tile: scores and bias less class distances."""
    if CLASSES == "blocks":
        p_class = column_classes_ptr + column // BLOCK
        costs = tl.load(costs_ptr + o_costs + tl.load(p_class))
        if BLOCK_N > BLOCK:
            tl.static_assert(BLOCK_N == 2 * BLOCK)
            right = tl.load(costs_ptr + o_costs + tl.load(p_class + 1))
            costs = tl.where(tl.arange(0, BLOCK_N) < BLOCK, costs, right)  # (BLOCK_N,)
        bias -= costs * costs_scale
    if CLASSES == "columns":
        classes = tl.load(column_classes_ptr + column + tl.arange(0, BLOCK_N))
        bias -= tl.load(costs_ptr + o_costs + classes) * costs_scale
    logits = scores + bias[None, :]
    if CLASSES == "scores":
        classes = tl.load(column_classes_ptr + column + tl.arange(0, BLOCK_N))
        logits -= costs_scale * tl.load(costs_ptr + (o_costs[:, None] + classes[None, :]))
    return logits


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


# Q is scaled by 2^10: rows whose sums lie in this range neither overflow nor lose bits.
LOG2_SCALE = 10
ROW_RANGE = 2.0**-5, 2.0**5
# The exponent of a row that is not there.
NOTHING = -1e30


class PlanTerms(NamedTuple):
    """The terms of scores that a plan's programs read besides coordinates.

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
