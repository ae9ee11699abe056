"""Masses of a cloud in blocks of rows, as kernels want them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from otdd_flash.fingerprint import remembered
from otdd_flash.kernels.points.packed_points import Layout
from otdd_flash.operators.tiled import LOG2_ZERO


@dataclass(frozen=True, eq=False)
class PackedMasses:
    """The masses of some points in a layout (n,), 0 for padding.

    Attributes:
        layout: where each point stands.
        values: float64.
    """

    layout: Layout
    values: Tensor

    @cached_property
    def log2(self) -> Tensor:
        """Logarithms of the masses to base 2, (n,) float32, finite."""
        return self.values.log2().clamp_min_(LOG2_ZERO).float()

    @cached_property
    def single(self) -> Tensor:
        """The masses in float32."""
        return self.values.float()


def packed_masses(masses: Tensor, layout: Layout) -> PackedMasses:
    """Masses (N,) in a layout; once for all costs of a cloud whose points stand in the same."""
    # No other layout has its number while what is remembered holds it.
    name = "in blocks", id(layout)
    return remembered(masses, name, lambda: PackedMasses(layout, layout.spread(masses, 0.0)))
