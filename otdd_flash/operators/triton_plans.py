"""Plans in Triton, prepared for one product after another.

What they multiply goes as sums hi + lo of two float16, sums are float32. Iterations whose result is
corrected afterwards take plans rounded to float16, whose row and column sums are those of the
numbers that are multiplied. Sums are in the order of the points; layouts say where these stand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.kernels.linear.halves import from_halves, to_halves
from otdd_flash.kernels.points.packed_points import Layout
from otdd_flash.operators.plan import Factors, Products, StreamedPlan

# The product of a matrix in packed order and values (m, copies, k) float16, (n, k) float32, and its
# sums (n,).
PackedProduct = Callable[[Tensor], tuple[Tensor, Tensor]]

# What multiplies, two float16, has 22 bits, and sums have 24.
PRECISION = 2.0**-20


class _RoundedPlan:
    """A plan in float16."""

    precision, in_triton = PRECISION, True

    def __init__(self, layouts: tuple[Layout, Layout]) -> None:
        self._layouts = layouts

    @cached_property
    def rows(self) -> Tensor:
        """P 1 (N,), float64."""
        return self.times(_ones(self._layouts[1])[:, None])[:, 0]

    @cached_property
    def columns(self) -> Tensor:
        """P^T 1 (M,), float64."""
        return self.transposed_times(_ones(self._layouts[0])[:, None])[:, 0]

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
        self._ones = _ones(layouts[1])

    def times(self, values: Tensor) -> Tensor:
        """P V (N, k) for V (M, k), float64."""
        rows, columns = self._layouts
        packed, scales = to_halves(values, columns)
        found = _matrix_product(self._entries, packed.flatten(1)).view(-1, *packed.shape[1:])
        return from_halves(found, scales, rows, self._weights)

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (M, k) for U (N, k), float64."""
        rows, columns = self._layouts
        packed, scales = to_halves(values, rows, self._weights)
        found = _matrix_product(self._entries.T, packed.flatten(1)).view(-1, *packed.shape[1:])
        return from_halves(found, scales, columns, self._ones)


class FusedPlan(_RoundedPlan):
    """P_ij = a_i Q_ij = b_j Q'_ji, evaluated anew and rounded to float16 in every product.

    Args:
        products: of Q (n, m) and of Q' (m, n), of one part.
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
        return self._multiply(values, 0)

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (M, k) for U (N, k), float64."""
        return self._multiply(values, 1)

    def _multiply(self, values: Tensor, side: int) -> Tensor:
        packed, scales = to_halves(values, self._layouts[1 - side])
        found, _ = self._products[side](packed.flatten(1)[:, None])
        found = found.reshape(len(found), 2, -1)
        return from_halves(found, scales, self._layouts[side], self._masses[side])


class ExactFusedPlan:
    """P_ij = a_i Q_ij = b_j Q'_ji, evaluated anew in every product as hi + lo of two float16.

    Products tell the sums too. What this form does not take, weighted entries, very many columns
    and rows whose sums are far from their masses, is left to the operator's own.

    Args:
        products: of Q (n, m) and of Q' (m, n), of three parts.
        masses: a (N,) and b (M,) float64, in the order of the points.
        layouts: of the rows and of the columns.
        in_range: whether such sums of Q, or of Q', are what this form takes.
        most_columns: of what is multiplied at once.
        streamed: the same plan, by the operator.
    """

    dtype, precision, in_triton = torch.float64, PRECISION, True

    def __init__(
        self,
        products: tuple[PackedProduct, PackedProduct],
        masses: tuple[Tensor, Tensor],
        layouts: tuple[Layout, Layout],
        in_range: Callable[[Tensor, int], bool],
        most_columns: int,
        streamed: StreamedPlan,
    ) -> None:
        self._products, self._masses, self._layouts = products, masses, layouts
        self._in_range, self._most, self._streamed = in_range, most_columns, streamed
        # Of rows and of columns, once something was multiplied; None where they are out of range.
        self._sums: dict[int, Tensor | None] = {}

    @property
    def rows(self) -> Tensor:
        """P 1 (N,)."""
        return self._sums_of(0)

    @property
    def columns(self) -> Tensor:
        """P^T 1 (M,)."""
        return self._sums_of(1)

    @property
    def quick(self) -> Products:
        """One that is rounded to float16, if sums allow."""
        found = self._streamed.quick
        return self if found is self._streamed else found

    def times(self, values: Tensor, factors: Factors | None = None) -> Tensor:
        """P V (N, k) for V (M, k), or (P o A B^T) V, float64."""
        found = None if factors is not None else self._multiply(values, 0)
        return self._streamed.times(values, factors).double() if found is None else found

    def transposed_times(self, values: Tensor, factors: Factors | None = None) -> Tensor:
        """P^T U (M, k) for U (N, k), or (P o A B^T)^T U, float64."""
        found = None if factors is not None else self._multiply(values, 1)
        if found is None:
            return self._streamed.transposed_times(values, factors).double()
        return found

    def _sums_of(self, side: int) -> Tensor:
        if side not in self._sums:
            self._multiply(_ones(self._layouts[1 - side])[:, None], side)
        found = self._sums[side]
        if found is None:
            return self._streamed.columns if side else self._streamed.rows
        return found

    def _multiply(self, values: Tensor, side: int) -> Tensor | None:
        known = side in self._sums
        if values.shape[1] > self._most or (known and self._sums[side] is None):
            return None
        layout, masses = self._layouts[side], self._masses[side]
        packed, scales = to_halves(values, self._layouts[1 - side])
        found, sums = self._products[side](packed)
        if not known:
            fits = self._in_range(sums, side)
            self._sums[side] = masses * sums[layout.position].double() if fits else None
            if not fits:
                return None
        return from_halves(found[:, None], scales, layout, masses)


def _matrix_product(entries: Tensor, values: Tensor) -> Tensor:
    """Float16 in and float32 out."""
    if entries.is_cuda:
        return torch.mm(entries, values, out_dtype=torch.float32)
    return entries.float() @ values.float()


def _ones(layout: Layout) -> Tensor:
    return torch.ones_like(layout.position, dtype=torch.float64)
