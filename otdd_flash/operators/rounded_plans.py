"""Plans in float16, for iterations whose result is corrected afterwards.

What they multiply goes as sums hi + lo of two float16, sums are float32. Row and column sums are
those of the numbers that are multiplied, in their order of points; layouts say where these stand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.kernels.points.packed_points import Layout

# Numbers are scaled so that the largest of a column is below it: no float16 of them overflows.
LOG2_LARGEST = 14

# The product of a matrix in packed order and values (m, k) float16, (n, k) float32.
PackedProduct = Callable[[Tensor], Tensor]


class _RoundedPlan:
    """What multiplies, two float16, has 22 bits, and sums have 24."""

    precision = 2.0**-20

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
        self._entries, self._scale = entries, (unit * masses)[:, None]

    def times(self, values: Tensor) -> Tensor:
        """P V (N, k) for V (M, k), float64."""
        found = _product(lambda both: _matrix_product(self._entries, both), values, *self._layouts)
        return self._scale * found

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (M, k) for U (N, k), float64."""
        back = self._layouts[::-1]
        entries, scaled = self._entries.T, self._scale * values
        return _product(lambda both: _matrix_product(entries, both), scaled, *back)


class FusedPlan(_RoundedPlan):
    """P_ij = a_i unit Q_ij = b_j unit Q'_ji, evaluated anew and rounded in every product.

    Args:
        products: of Q (n, m) and of Q' (m, n).
        unit: as said.
        masses: a (N,) and b (M,) float64, in the order of the points.
        layouts: of the rows and of the columns.
    """

    def __init__(
        self,
        products: tuple[PackedProduct, PackedProduct],
        unit: float,
        masses: tuple[Tensor, Tensor],
        layouts: tuple[Layout, Layout],
    ) -> None:
        super().__init__(layouts)
        self._products = products
        self._scales = tuple((unit * side)[:, None] for side in masses)

    def times(self, values: Tensor) -> Tensor:
        """P V (N, k) for V (M, k), float64."""
        return self._scales[0] * _product(self._products[0], values, *self._layouts)

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (M, k) for U (N, k), float64."""
        return self._scales[1] * _product(self._products[1], values, *self._layouts[::-1])


def _product(product: PackedProduct, values: Tensor, rows: Layout, columns: Layout) -> Tensor:
    """A product with V (M, k) in the order of the points, (N, k) float64."""
    packed = torch.where(columns.filled[:, None], values[columns.origin], 0)
    exponents = packed.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny).log2().ceil()
    scale = (LOG2_LARGEST - exponents).exp2()
    packed *= scale
    high = packed.half()
    found = product(torch.cat((high, (packed - high).half()), 1)).double()
    high_part, low_part = found.chunk(2, 1)
    return ((high_part + low_part) / scale)[rows.position]


def _matrix_product(entries: Tensor, values: Tensor) -> Tensor:
    """Float16 in and float32 out."""
    if entries.is_cuda:
        return torch.mm(entries, values, out_dtype=torch.float32)
    return entries.float() @ values.float()


def _ones(layout: Layout) -> Tensor:
    return torch.ones((len(layout.position), 1), dtype=torch.float64, device=layout.filled.device)
