"""What passes read and what they leave to be merged.

`operators.triton_operator` makes `Side` and `Scores`, and `operators.triton_plans` changes `parts`;
all passes of this folder but `plan_marginals` take them. `half_step` leaves a `Partial`, which
`merge_ranges` reads.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from otdd_flash.kernels.points.packed_points import PackedPoints


class Side(NamedTuple):
    """One side of a cost, as half-steps read it.

    Attributes:
        points: packed.
        squares: (n,) float32, lambda_x ||x_i||^2 of the points as this precision rounds them.
        log2_masses: (n,) float32, very negative for points without mass and for padding.
    """

    points: PackedPoints
    squares: Tensor
    log2_masses: Tensor


class Scores(NamedTuple):
    """How the products and class distances of two sides become scores, in units of the cost.

    Attributes:
        scale: of a product of packed coordinates, 2 lambda_x over the square of their scale.
        costs: (V_x, V_y) float32, lambda_y W.
        parts: 1 product of hi parts, or 3 products of hi and lo parts.
    """

    scale: float
    costs: Tensor
    parts: int


class Partial(NamedTuple):
    """Sums over ranges of columns.

    Attributes:
        highest: (slots, n) float32, the highest logit of a row in a range, or its shift.
        sums: (slots, n) float32, of the exponentials so shifted.
        slots: (n / BLOCK_ROWS,) int32, ranges of each block of rows.
    """

    highest: Tensor
    sums: Tensor
    slots: Tensor
