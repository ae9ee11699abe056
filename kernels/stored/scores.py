"""Scores of labelled points from their products, kept in both directions.

    S_ij = -C_ij = lambda_x (2 x_i . y_j - ||x_i||^2 - ||y_j||^2) - lambda_y W[l_i, l_j]

is made in float64 and rounded once. A score is written where rows are those of x and where they are
those of y, so that passes over either read whole rows, and the same number. `operators.kernel_pool`
calls `stored_scores`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device

# Rows and columns of a tile.
BLOCK = 32


@on_its_device
@triton.jit
def stored_scores_kernel(
    products_ptr,  # (B, rows, columns) float64, x_i . y_j
    row_squares_ptr,  # (B, .) float64, from the first row on
    column_squares_ptr,  # (B, .) float64
    row_labels_ptr,  # (B, .) int64
    column_labels_ptr,  # (B, .) int64
    class_costs_ptr,  # (B, classes, classes) float64
    lambda_x_ptr,  # (1,) float64
    scores_ptr,  # float32, of the first row and column; overwritten
    transposed_ptr,  # float32, of the first column and row; overwritten
    rows,
    columns,
    points,  # of a problem, the stride of squares, of labels and of scores
    classes,
    SYMMETRIC: tl.constexpr,  # the first row is the first column
    BLOCK: tl.constexpr,
):
    """One program per tile of a problem; in a symmetric one, those from the diagonal on."""
    i_row, i_column = tl.program_id(0), tl.program_id(1)
    i_problem = tl.program_id(2).to(tl.int64)
    if SYMMETRIC and i_column < i_row:
        return
    o_row, o_column = i_row * BLOCK + tl.arange(0, BLOCK), i_column * BLOCK + tl.arange(0, BLOCK)
    m_row, m_column = o_row < rows, o_column < columns
    m_tile = m_row[:, None] & m_column[None, :]
    if SYMMETRIC:
        # Each number once: two products of the same points may differ in their last bits.
        m_tile = m_tile & (o_row[:, None] <= o_column[None, :])
    o_point = i_problem * points
    p_products = products_ptr + (i_problem * rows + o_row[:, None]) * columns + o_column[None, :]
    products = tl.load(p_products, mask=m_tile, other=0.0)
    x = tl.load(row_squares_ptr + o_point + o_row, mask=m_row, other=0.0)
    y = tl.load(column_squares_ptr + o_point + o_column, mask=m_column, other=0.0)
    k = tl.load(row_labels_ptr + o_point + o_row, mask=m_row, other=0)
    l = tl.load(column_labels_ptr + o_point + o_column, mask=m_column, other=0)  # noqa: E741
    p_costs = class_costs_ptr + i_problem * classes * classes
    costs = tl.load(p_costs + k[:, None] * classes + l[None, :], mask=m_tile, other=0.0)
    scores = tl.load(lambda_x_ptr) * (2 * products - (x[:, None] + y[None, :])) - costs
    scores = scores.to(tl.float32)
    o_scores = i_problem * points * points
    p_scores = scores_ptr + o_scores + o_row[:, None].to(tl.int64) * points + o_column[None, :]
    tl.store(p_scores, scores, mask=m_tile)
    p_back = transposed_ptr + o_scores + o_column[None, :].to(tl.int64) * points + o_row[:, None]
    tl.store(p_back, scores, mask=m_tile)


def stored_scores(
    products: Tensor,
    squares: tuple[Tensor, Tensor],
    labels: tuple[Tensor, Tensor],
    class_costs: Tensor,
    lambda_x: Tensor,
    scores: tuple[Tensor, Tensor],
    *,
    symmetric: bool,
) -> None:
    """Write the scores of B problems between some of their points.

    Args:
        products: (B, r, c) float64, contiguous.
        squares: ||x_i||^2 (B, r) and ||y_j||^2 (B, c), float64, rows of larger tensors.
        labels: (B, r) and (B, c) int64, likewise.
        class_costs: (B, V, V) float64, lambda_y W.
        lambda_x: (1,) float64.
        scores: (B, r, c) and (B, c, r) float32, blocks of (B, points, points); overwritten.
        symmetric: whether the first rows are the first columns, and products and scores both are
            from the diagonal of a symmetric matrix on.
    """
    count, rows, columns = products.shape
    grid = (triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK), count)
    stored_scores_kernel[grid](
        products,
        *squares,
        *labels,
        class_costs,
        lambda_x,
        *scores,
        rows,
        columns,
        scores[0].stride(1),
        class_costs.shape[1],
        SYMMETRIC=symmetric,
        BLOCK=BLOCK,
    )
