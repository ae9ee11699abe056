"""Products of a plan in Triton with the points of its sides, and with what is packed as they are.

An operator holds its points as sums hi + lo of two float16. Passes through blocks multiply them as
they are, so that no product with points makes another copy of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from otdd_flash.kernels.passes.block_product import BlockProduct, Found, Rows, Weights
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import PackedPoints, pack, power_of_two_scale


class Sums(Protocol):
    """The sums of a plan."""

    @property
    def rows(self) -> Tensor:
        """P 1 (N,), float64."""
        ...

    @property
    def columns(self) -> Tensor:
        """P^T 1 (M,), float64."""
        ...


class PointProducts:
    """Products with P of what is packed as the columns, and with P^T of what is as the rows.

    Args:
        sides: packed points of the rows and of the columns.
        scores: how they make scores, of three parts, and the same with sides exchanged.
        potentials: f (N,) and g (M,), float32, in units of the cost.
        epsilon: in units of the cost.
        masses: a (N,) and b (M,) float64.
        sums: of the plan; asked for when they are needed.
        dim: coordinates of a point.

    Attributes:
        points: those of both sides.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        scores: tuple[Scores, Scores],
        potentials: tuple[Tensor, Tensor],
        epsilon: float,
        masses: tuple[Tensor, Tensor],
        sums: Sums,
        dim: int,
    ) -> None:
        self.points = sides[0].points, sides[1].points
        self._sides, self._scores, self._potentials = sides, scores, potentials
        self._epsilon, self._masses, self._sums, self._dim = epsilon, masses, sums, dim
        self._products: dict[bool, BlockProduct] = {}

    def some(self, side: int, rows: Rows) -> Tensor:
        """Return some points (k, d) of a side, less their centre, float32."""
        return self.points[side].some(rows, self._dim)

    def packed(self, values: Tensor, mean: Tensor, largest: float, side: int) -> PackedPoints:
        """Values (N, d) less their mean (d,), packed as the points of a side.

        Args:
            values: one row for each of the points.
            mean: subtracted.
            largest: of what is left, in absolute value.
            side: 0 for rows, 1 for columns.
        """
        layout = self.points[side].layout
        return pack(values, layout, mean.double().contiguous(), power_of_two_scale(largest))

    def times(
        self,
        values: PackedPoints,
        weights: Weights | None = None,
        numbers: Tensor | None = None,
        *,
        transposed: bool = False,
    ) -> Iterator[Found]:
        """P V and P q, or (P o W) V, for some rows after the other; as `BlockProduct`.

        If `transposed`, the same of P^T, with A of the weights packed as the columns, and B as the
        rows.
        """
        return self._product(transposed)(values, self._dim, weights, numbers)

    def _product(self, transposed: bool) -> BlockProduct:
        if transposed not in self._products:
            own, other = (1, 0) if transposed else (0, 1)
            self._products[transposed] = BlockProduct(
                self._sides[own],
                self._sides[other],
                self._scores[own],
                (self._potentials[own], self._potentials[other]),
                self._epsilon,
                self._masses[own],
                self._sums.columns if transposed else self._sums.rows,
            )
        return self._products[transposed]
