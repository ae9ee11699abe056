"""The coordinate collapse potential: particles lose some of their coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.flows.functionals.arrays import as_number
from otdd_flash.flows.functionals.potential import Potential
from otdd_flash.samples import LabeledSamples


@dataclass(frozen=True, eq=False)
class CoordinateCollapse(Potential):
    """V(x) = 1/2 sum_(k in K) (x_k - value)^2.

    Attributes:
        coordinates: K, distinct indices into [0, d).
        value: that the coordinates of K are drawn to.
    """

    coordinates: Tensor
    value: float = 0.0

    @classmethod
    def configured(
        cls, start: LabeledSamples, coordinates: Sequence[int], value: float = 0.0
    ) -> CoordinateCollapse:
        """For `start`'s dimension d.

        Raises:
            InputError: an index is no integer, outside [0, d) or given twice; or there is none.
        """
        return cls(_indices(coordinates, start.dim), as_number("value", value))

    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        """V (n,)."""
        chosen = points.index_select(1, self.coordinates.to(points.device))
        return (chosen - self.value).square().sum(1) / 2


def _indices(given: Sequence[int], dim: int) -> Tensor:
    whole = isinstance(given, list | tuple | range) and all(type(k) is int for k in given)
    if not whole or not given or not all(0 <= k < dim for k in given):
        raise InputError(f"coordinates must be a list of indices in [0, {dim}), got {given!r}")
    if len(set(given)) < len(given):
        raise InputError(f"coordinates must be distinct, got {given!r}")
    return torch.tensor(list(given))
