"""What costs lose where points are replaced by points nearby in products, but not in norms.

    C'_ij = p_i + q_j - 2 lambda_x <x'_i, y'_j> + lambda_y W[l_i, l_j]

Norms p_i = lambda_x ||x_i||^2 are those of the points themselves; x'_i is off by e_i = ||x_i -
x'_i||, which is measured. By Cauchy and Schwarz and s t <= (theta s^2 + t^2 / theta) / 2, products
are off by at most

    2 lambda_x (e_i ||y_j|| + ||x'_i|| e_j) <= A_i + B_j,
    A_i = lambda_x (e_i^2 / theta + theta (||x_i|| + e_i)^2),

B_j likewise, for any theta > 0; with theta = rms e / rms ||x|| the two parts are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.float64_rows import squared_distances
from otdd_flash.operators.labelled_cost import LabelledCost

TINY = torch.finfo(torch.float64).tiny

Pair = tuple[Tensor, Tensor]


def product_errors(cost: LabelledCost, squares: Pair, lost: Pair) -> Pair:
    """A (..., n) and B (..., m), float64, in units of the cost.

    Args:
        cost: of the points themselves.
        squares: ||x_i||^2 (n,) and ||y_j||^2 (m,) about the centre of the products, float64.
        lost: e_i^2 (..., n) and e_j^2 (..., m), float64, of one or of several points nearby.
    """
    ratio = _total(cost, lost) / _total(cost, squares).clamp_min(TINY)
    theta = ratio.sqrt().clamp_min(TINY)[..., None]

    def errors(off: Tensor, norms: Tensor) -> Tensor:
        lengths = off.sqrt().add_(norms.sqrt()).square_()
        return (off / theta).addcmul_(lengths, theta).mul_(cost.lambda_x)

    of_x = errors(lost[0], squares[0])
    return of_x, of_x if cost.symmetric else errors(lost[1], squares[1])


def squares_about(cost: LabelledCost, centre: Tensor) -> Pair:
    """||x_i||^2 (n,) and ||y_j||^2 (m,) about a centre (d,), float64."""
    x, y = cost.points
    of_x = squared_distances(x, centre)
    return of_x, of_x if cost.symmetric else squared_distances(y, centre)


def magnitudes_about(cost: LabelledCost, squares: Pair) -> Pair:
    """Return `LabelledCost.magnitudes` about the point that gives these squared norms."""
    if squares is cost.squares:
        return cost.magnitudes
    x, y = (
        magnitudes + 2 * cost.lambda_x * (about - before)
        for magnitudes, about, before in zip(cost.magnitudes, squares, cost.squares, strict=True)
    )
    return x, y


def _total(cost: LabelledCost, numbers: Pair) -> Tensor:
    """The mean of numbers of rows, and that of columns if they are others, together."""
    of_x = numbers[0] @ cost.a
    return of_x if cost.symmetric else of_x + numbers[1] @ cost.b
