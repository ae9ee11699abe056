"""Costs of labelled points in float64, tile by tile: what is kept, and what certificates read.

    -C_ij = bias[l_i, j] - lambda_x ||x_i||^2 + 2 lambda_x <x_i, y_j>
    bias[c, j] = -lambda_x ||y_j||^2 - lambda_y W[c, l_j]

Points are centred. A tile is the bias gathered by class and a product of matrices on top of it. On
a processor it stays in the cache until it has been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.points import LabelledCost

# Points of a tile along rows and along columns, and tiles whose rows are prepared at once. Long
# vectors come in fewer points, so that there are about so many coordinates of either side.
TILE_CPU, TILE_GPU, TILES = 256, 4096, 8
COORDINATES_CPU, COORDINATES_GPU, LEAST_POINTS = 1 << 19, 1 << 24, 128

Pair = tuple[Tensor, Tensor]


class Products(Protocol):
    """How products of two clouds' points are computed.

    Attributes:
        squares: ||x_i||^2 (n,) and ||y_j||^2 (m,) about the centre of these products, float64.
        errors: (n,) and (m,) float64: the cost of i and j is off by at most errors[0]_i +
            errors[1]_j, rounding in float64 included.
    """

    squares: Pair
    errors: Pair

    def left(self, rows: slice) -> Tensor:
        """The x_i of some rows, (N, d)."""
        ...

    def right(self, columns: slice) -> Tensor:
        """The y_j of some columns, (M, d)."""
        ...

    def add(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Add 2 lambda_x <x_i, y_j> to `out` (N, M), float64."""
        ...


class CentredProducts:
    """Products in float64 of points less their common centre."""

    def __init__(self, cost: LabelledCost) -> None:
        self._cost = cost
        self.squares = cost.squares
        x, y = cost.magnitudes
        self.errors = cost.cost_error_share * x, cost.cost_error_share * y

    def left(self, rows: slice) -> Tensor:
        """The x_i of some rows, (N, d) float64."""
        return _centred(self._cost.points[0][rows], self._cost.centre)

    def right(self, columns: slice) -> Tensor:
        """The y_j of some columns, (M, d) float64."""
        return _centred(self._cost.points[1][columns], self._cost.centre)

    def add(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        out.addmm_(left, right.T, alpha=2 * self._cost.lambda_x)


class CostTile(NamedTuple):
    """-C[rows, columns], float64, in a buffer that the next tile overwrites."""

    rows: slice
    columns: slice
    negative: Tensor


def cost_tiles(
    cost: LabelledCost, products: Products, rows: slice, *, upper: bool = False
) -> Iterator[CostTile]:
    """Yield tiles of -C[rows], from left to right.

    With `upper` the cost is that of a cloud with itself, and no tile is left of the diagonal.
    """
    labels_x, labels_y = cost.labels
    squares_x, squares_y = (cost.lambda_x * squares for squares in products.squares)
    tile = _tile(cost)
    buffer = torch.empty(tile * tile, dtype=torch.float64, device=cost.a.device)
    for high in _slices(rows.start, rows.stop, TILES * tile):
        left = products.left(high)
        for columns in _slices(high.start if upper else 0, cost.shape[1], tile):
            if upper and columns.stop <= high.stop:
                right = left[columns.start - high.start : columns.stop - high.start]
            else:
                right = products.right(columns)
            bias = -squares_y[columns] - cost.class_costs[:, labels_y[columns]]
            stop = min(high.stop, columns.stop) if upper else high.stop
            for part in _slices(high.start, stop, tile):
                points = left[part.start - high.start : part.stop - high.start]
                negative = buffer[: len(points) * len(right)].view(len(points), len(right))
                torch.index_select(bias, 0, labels_x[part], out=negative)
                negative.sub_(squares_x[part, None])
                products.add(points, right, negative)
                yield CostTile(part, columns, negative)


def _tile(cost: LabelledCost) -> int:
    """How many points a tile has along rows and along columns."""
    points = cost.points[0]
    most, elements = (TILE_GPU, COORDINATES_GPU) if points.is_cuda else (TILE_CPU, COORDINATES_CPU)
    return max(LEAST_POINTS, min(most, elements // points.shape[1]))


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _centred(points: Tensor, centre: Tensor) -> Tensor:
    """Less the centre, float64; a copy also of points that are in float64."""
    return points.to(torch.float64, copy=True).sub_(centre)
