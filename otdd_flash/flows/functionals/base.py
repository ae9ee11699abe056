"""A functional of a labelled, weighted cloud, and its weight in the objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.flows.functionals.entropy import Entropy


class Functional(Protocol):
    """A number that depends on where the particles are, differentiable in `points` by autograd."""

    def __call__(self, points: Tensor, labels: Tensor | None, masses: Tensor) -> Tensor:
        """The 0-dim value.

        Args:
            points: (n, d) particles.
            labels: (n,) int64 class indices, or None for unlabelled particles.
            masses: (n,) float64, summing to 1.
        """


@dataclass(frozen=True, eq=False)
class WeightedFunctional:
    """One term w_k F_k of the objective.

    Attributes:
        name: what reports call it.
        weight: w_k, finite. A negative weight turns the term around: potentials repel, classes
            attract. Most potentials are then unbounded below and particles may run away.
        function: F_k; `Entropy` stands for the noise that takes its place.

    Raises:
        InputError: the weight is not finite, or that of the entropy is negative.
    """

    name: str
    weight: float
    function: Functional | Entropy

    def __post_init__(self) -> None:
        weight = self.weight
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight):
            raise InputError(
                f"the weight of functional {self.name} must be a finite number, got {weight!r}"
            )
        if isinstance(self.function, Entropy) and weight < 0:
            raise InputError(
                f"the weight of {self.name} must not be negative, got {weight}: noise can only "
                "spread particles"
            )
