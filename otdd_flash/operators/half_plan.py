"""A plan held in float16, for iterations whose result is corrected afterwards."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.kernels.points.packed_points import Layout

# Numbers are scaled so that the largest of a column is below it: no float16 of them overflows.
LOG2_LARGEST = 14


class HalfPlan:
    """P_ij = a_i unit Q_ij, of which float16 numbers Q (n, m) are held, in packed order.

    A product reads Q once, with what it multiplies as sums hi + lo of two float16, in float32
    sums. Row and column sums are those of the numbers that are held.

    Args:
        entries: Q, 0 in rows of padding and of points without mass, and in columns of padding.
        unit: as said.
        masses: a (N,) float64, in the order of the points.
        layouts: of the rows and of the columns.
    """

    def __init__(
        self, entries: Tensor, unit: float, masses: Tensor, layouts: tuple[Layout, Layout]
    ) -> None:
        self._entries, self._layouts = entries, layouts
        self._scale = (unit * masses)[:, None]

    @cached_property
    def rows(self) -> Tensor:
        """P 1 (N,), float64."""
        return self.times(torch.ones_like(self._layouts[1].position[:, None].double()))[:, 0]

    @cached_property
    def columns(self) -> Tensor:
        """P^T 1 (M,), float64."""
        return self.transposed_times(torch.ones_like(self._scale))[:, 0]

    def times(self, values: Tensor) -> Tensor:
        """P V (N, k) for V (M, k), float64."""
        rows, columns = self._layouts
        return self._scale * _product(self._entries, values, columns)[rows.position]

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (M, k) for U (N, k), float64."""
        rows, columns = self._layouts
        return _product(self._entries.T, self._scale * values, rows)[columns.position]


def _product(entries: Tensor, values: Tensor, layout: Layout) -> Tensor:
    """Q V, or Q^T V, in packed order, for V (m, k) in the order of the points; float64."""
    packed = torch.where(layout.filled[:, None], values[layout.origin], 0)
    exponents = packed.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny).log2().ceil()
    scale = (LOG2_LARGEST - exponents).exp2()
    packed *= scale
    high = packed.half()
    both = torch.cat((high, (packed - high).half()), 1)
    if entries.is_cuda:
        found = torch.mm(entries, both, out_dtype=torch.float32)
    else:
        found = entries.float() @ both.float()
    high, low = found.double().chunk(2, 1)
    return (high + low) / scale
