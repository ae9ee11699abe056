"""Points on a lattice, such as grey values, whose inner products float32 computes exactly.

In units of the lattice's step, and less a centre on it, coordinates are integers v. Every partial
sum of a product is an integer too, and by Cauchy and Schwarz

    |sum_k v_ik w_jk| <= ||v_i|| ||w_j||    over any subset of the k.

If the right side is at most 2^24, a float32 product in any order is exact. Integers up to 256 are
exact in bfloat16 as well, which a processor may be allowed to use for products of float32.
`point_scores` uses these products for scores that are stored in float32, as they take less time
than those in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.points import LabelledCost, in_float64
from otdd_flash.cost.rounding import (
    ROUNDING,
    SCALES,
    Pair,
    magnitudes_about,
    product_errors,
    squares_about,
)

LARGEST_PRODUCT, LARGEST_INTEGER = 2.0**24, 256

# Least points of a side: for fewer, rounding them takes as long as it saves.
LEAST_POINTS = 1000

# Rows that are tried first, which rule out a lattice for most points.
FIRST_ROWS = 32


class IntegerProducts:
    """Exact products of points rounded to a lattice; errors are those of the rounding.

    Args:
        cost: between two labelled clouds.
        points: (n, d) and (m, d) float32 integers, near scale (points - centre).
        lost: (n,) and (m,) float64, squared distances of the points from the lattice.
        scale: steps in one unit of the points.
        centre: (d,) float64, on the lattice.
    """

    def __init__(
        self, cost: LabelledCost, points: Pair, lost: Pair, *, scale: float, centre: Tensor
    ) -> None:
        self._points = points
        self.squares = squares_about(cost, centre)
        self._unit = 2 * cost.lambda_x / scale**2
        of_x, of_y = (
            off + cost.cost_error_share * magnitudes
            for off, magnitudes in zip(
                product_errors(cost, self.squares, lost),
                magnitudes_about(cost, self.squares),
                strict=True,
            )
        )
        self.errors = of_x, of_y

    def left(self, rows: slice) -> Tensor:
        """Return the integers (N, d) float32 of some rows."""
        return self._points[0][rows]

    def right(self, columns: slice) -> Tensor:
        """Return the integers (M, d) float32 of some columns."""
        return self._points[1][columns]

    def add(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Add 2 lambda_x <x_i, y_j> by one exact matrix product in float32."""
        out.add_(left @ right.T, alpha=self._unit)


def integer_products(cost: LabelledCost) -> IntegerProducts | None:
    """Return exact products if all points are near one lattice and there are enough; else None."""
    if min(cost.shape) < LEAST_POINTS:
        return None
    sides = cost.held[: 1 if cost.symmetric else 2]
    for scale in SCALES:
        middle = (cost.centre * scale).round()
        if any(_round(points[:FIRST_ROWS], scale, middle) is None for points in sides):
            continue
        found = [_round(points, scale, middle) for points in sides]
        rounded = [side for side in found if side is not None]
        if len(rounded) < len(found):
            continue
        x, y = rounded[0], rounded[-1]
        if x.longest * y.longest <= LARGEST_PRODUCT:
            points, lost = (x.values, y.values), (x.lost, y.lost)
            return IntegerProducts(cost, points, lost, scale=scale, centre=middle / scale)
    return None


class _Rounded(NamedTuple):
    """Integers (N, d) float32, the longest norm of a row, and squared rounding errors (N,)."""

    values: Tensor
    longest: float
    lost: Tensor


def _round(points: Tensor, scale: float, middle: Tensor) -> _Rounded | None:
    """Round points * scale to integers, less `middle` (d,).

    Returns None if rounding changes a point by more than float32 does, or an integer is too large.
    """
    values = torch.empty(points.shape, dtype=torch.float32, device=points.device)
    lost, longest = points.new_empty(len(points), dtype=torch.float64), 0.0
    for rows, coordinates in in_float64(points):
        multiples = coordinates.mul_(scale)
        whole = multiples.round()
        off = torch.linalg.vector_norm(multiples.sub_(whole), dim=1)
        if bool((off > ROUNDING * torch.linalg.vector_norm(whole, dim=1)).any()):
            return None
        low, high = whole.sub_(middle).aminmax()
        if max(-float(low), float(high)) > LARGEST_INTEGER:
            return None
        longest = max(longest, float(torch.linalg.vector_norm(whole, dim=1).max()))
        values[rows], lost[rows] = whole, (off / scale).square_()
    return _Rounded(values, longest, lost)
