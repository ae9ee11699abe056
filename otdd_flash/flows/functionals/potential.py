"""What all potential energies share: an average over particles, each for itself."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Potential(ABC):
    """F(x) = sum_i a_i V(x_i, l_i), the potential energy of a cloud in the field V.

    Its velocity -(1 / a_i) dF / dx_i = -grad V(x_i, l_i) does not depend on the other particles.

    V is computed in float64, whatever the type of the points: in float32 a centre, an offset or a
    plane would be rounded to 6e-8 of its distance from 0, which next to it is not small. Gradients
    come in the type of the points, rounded once.
    """

    @abstractmethod
    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        """V (n,) of the points (n, d), float64, of classes `labels` (n,)."""

    def __call__(self, points: Tensor, labels: Tensor | None, masses: Tensor) -> Tensor:
        """The average energy, 0-dim float64."""
        return masses @ self.energies(points.double(), labels)
