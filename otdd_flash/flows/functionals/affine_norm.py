"""The affine norm potential: particles are drawn towards the solutions of A x = b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from otdd_flash.flows.functionals.arrays import as_tensor
from otdd_flash.flows.functionals.potential import Potential
from otdd_flash.samples import LabeledSamples


@dataclass(frozen=True, eq=False)
class AffineNorm(Potential):
    """V(x) = 1/2 ||A x - b||^2.

    Attributes:
        matrix: A (k, d).
        offset: b (k,); None is 0.
    """

    matrix: Tensor
    offset: Tensor | None = None

    @classmethod
    def configured(cls, start: LabeledSamples, matrix: Any, offset: Any = None) -> AffineNorm:
        """Of `start`'s dimension d; A and b as numbers or files of them.

        Raises:
            InputError: the shapes do not fit, or a value is not finite.
        """
        a = as_tensor("matrix", matrix, (None, start.dim))
        return cls(a, None if offset is None else as_tensor("offset", offset, (len(a),)))

    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        """V (n,)."""
        residuals = points @ self.matrix.to(points).T
        if self.offset is not None:
            residuals = residuals - self.offset.to(points)
        return residuals.square().sum(1) / 2
