"""Plans in float16, for iterations whose result is corrected afterwards.

What they multiply goes as sums hi + lo of two float16, sums are float32. Row and column sums are
those of the numbers that are multiplied, in their order of points; layouts say where these stand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.kernels.linear.halves import from_halves, to_halves
from otdd_flash.kernels.points.packed_points import Layout

# The product of a matrix in packed order and values (m, k) float16, (n, k) float32, and its sums.
PackedProduct = Callable[[Tensor], tuple[Tensor, Tensor]]


class _RoundedPlan:
    """What multiplies, two float16, has 22 bits, and sums have 24."""

    precision, in_triton = 2.0**-20, True

    def __init__(self, layouts: tuple[Layout, Layout]) -> None:
        self._layouts = layouts

    @cached_property
    def rows(self) -> Tensor:
        """P 1 (N,), float64."""
        return self.times(_ones(self._layouts[1]))[:, 0]

    @cached_property
    def columns(self) -> Tensor:
        """P^T 1 (M,), float64."""
        return self.transposed_times(_ones(self._layouts[0]))[:, 0]

    def times(self, values: Tensor) -> Tensor:
        """P V (N, k) for V (M, k), float64."""
        raise NotImplementedError

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (M, k) for U (N, k), float64."""
        raise NotImplementedError


class HeldPlan(_RoundedPlan):
    """P_ij = a_i unit Q_ij, of which float16 numbers Q (n, m) are held; a product reads them once.

    Args:
        entries: Q, 0 in rows of padding and of points without mass, and in columns of padding.
        unit: as said.
        masses: a (N,) float64, in the order of the points.
        layouts: of the rows and of the columns.
    """

    def __init__(
        self, entries: Tensor, unit: float, masses: Tensor, layouts: tuple[Layout, Layout]
    ) -> None:
        super().__init__(layouts)
        self._entries, self._weights = entries, unit * masses
        self._ones = torch.ones_like(layouts[1].position, dtype=torch.float64)

    def times(self, values: Tensor) -> Tensor:
        """P V (N, k) for V (M, k), float64."""
        rows, columns = self._layouts
        packed, scales = to_halves(values, columns)
        found = _matrix_product(self._entries, packed)
        return from_halves(found, scales, rows, self._weights)

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (M, k) for U (N, k), float64."""
        rows, columns = self._layouts
        packed, scales = to_halves(values, rows, self._weights)
        found = _matrix_product(self._entries.T, packed)
        return from_halves(found, scales, columns, self._ones)


class FusedPlan(_RoundedPlan):
    """P_ij = a_i Q_ij = b_j Q'_ji, evaluated anew and rounded in every product.

    Args:
        products: of Q (n, m) and of Q' (m, n).
        masses: a (N,) and b (M,) float64, in the order of the points.
        layouts: of the rows and of the columns.
    """

    def __init__(
        self,
        products: tuple[PackedProduct, PackedProduct],
        masses: tuple[Tensor, Tensor],
        layouts: tuple[Layout, Layout],
    ) -> None:
        super().__init__(layouts)
        self._products, self._masses = products, masses

    def times(self, values: Tensor) -> Tensor:
        """P V (N, k) for V (M, k), float64."""
        rows, columns = self._layouts
        packed, scales = to_halves(values, columns)
        return from_halves(self._products[0](packed)[0], scales, rows, self._masses[0])

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (M, k) for U (N, k), float64."""
        rows, columns = self._layouts
        packed, scales = to_halves(values, rows)
        return from_halves(self._products[1](packed)[0], scales, columns, self._masses[1])


def _matrix_product(entries: Tensor, values: Tensor) -> Tensor:
    """Float16 in and float32 out."""
    if entries.is_cuda:
        return torch.mm(entries, values, out_dtype=torch.float32)
    return entries.float() @ values.float()


def _ones(layout: Layout) -> Tensor:
    return torch.ones((len(layout.position), 1), dtype=torch.float64, device=layout.filled.device)
