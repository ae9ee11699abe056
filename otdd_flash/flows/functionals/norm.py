"""The norm potential: particles are drawn towards one point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from otdd_flash.flows.functionals.arrays import as_tensor
from otdd_flash.flows.functionals.potential import Potential
from otdd_flash.samples import LabeledSamples


@dataclass(frozen=True, eq=False)
class Norm(Potential):
    """V(x) = 1/2 ||x - c||^2.

    Attributes:
        centre: c (d,); None is the origin.
    """

    centre: Tensor | None = None

    @classmethod
    def configured(cls, start: LabeledSamples, centre: Any = None) -> Norm:
        """Of `start`'s dimension d; `centre` as d numbers or a file of them.

        Raises:
            InputError: the centre has another shape or is not finite.
        """
        return cls(None if centre is None else as_tensor("centre", centre, (start.dim,)))

    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        """V (n,)."""
        offsets = points if self.centre is None else points - self.centre.to(points)
        return offsets.square().sum(1) / 2
