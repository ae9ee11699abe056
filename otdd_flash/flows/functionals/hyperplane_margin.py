"""The hyperplane margin potential: classes move to their sides of a plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.flows.functionals.arrays import as_number, as_tensor
from otdd_flash.flows.functionals.potential import Potential
from otdd_flash.samples import LabeledSamples


@dataclass(frozen=True, eq=False)
class HyperplaneMargin(Potential):
    """V(x, l) = max(0, margin - s_l (<w, x> - b)), the hinge loss of a linear classifier.

    Particles stop at distance margin / ||w|| from the plane <w, x> = b, on the side of their class.

    Attributes:
        normal: w (d,).
        signs: s (V,), the side of each class: 1, -1, or 0 for classes that feel nothing (V = 0).
        offset: b.
        margin: in units of <w, x>.
    """

    normal: Tensor
    signs: Tensor
    offset: float = 0.0
    margin: float = 1.0

    @classmethod
    def configured(
        cls,
        start: LabeledSamples,
        normal: Any,
        signs: Mapping[str, int],
        offset: float = 0.0,
        margin: float = 1.0,
    ) -> HyperplaneMargin:
        """For `start`'s dimension d and classes.

        Args:
            start: the particles before the first step.
            normal: w as d numbers or a file of them.
            signs: 1 or -1 by class name; classes that are not named feel nothing.
            offset: b.
            margin: not negative.

        Raises:
            InputError: unlabelled particles, an unknown class, a sign other than 1 and -1, or
                numbers that do not fit.
        """
        return cls(
            as_tensor("normal", normal, (start.dim,)),
            _signs(signs, start),
            as_number("offset", offset),
            as_number("margin", margin, least=0.0),
        )

    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        """V (n,).

        Raises:
            InputError: the particles have no labels.
        """
        if labels is None:
            raise InputError("hyperplane_margin needs labelled particles: classes have sides")
        sides = self.signs.to(points)[labels]
        distances = points @ self.normal.to(points) - self.offset
        return sides.abs() * torch.relu(self.margin - sides * distances)


def _signs(given: Any, start: LabeledSamples) -> Tensor:
    if start.labels is None:
        raise InputError("needs labelled particles: classes have sides")
    if not isinstance(given, Mapping) or not given:
        raise InputError(f"signs must give 1 or -1 by class name, got {given!r}")
    signs = torch.zeros(len(start.class_names))
    for name, sign in given.items():
        # YAML reads the name of the class "3" as a number.
        if str(name) not in start.class_names:
            raise InputError(
                f"signs names an unknown class {str(name)!r}; the classes are: "
                f"{', '.join(start.class_names)}"
            )
        if sign not in (1, -1):
            raise InputError(f"the sign of class {name} must be 1 or -1, got {sign!r}")
        signs[start.class_names.index(str(name))] = sign
    return signs
