"""Potential energies: every particle falls by itself, in a field of its place and class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.flows.functionals.arrays import as_number, as_tensor
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import listing


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


@dataclass(frozen=True, eq=False)
class Norm(Potential):
    """V(x) = 1/2 ||x - c||^2.

    Attributes:
        centre: c (d,); None is the origin.
    """

    centre: Tensor | None = None

    @classmethod
    def configured(cls, start: LabeledSamples, centre: Any = None) -> Norm:
        """Build it in `start`'s dimension d; `centre` is d numbers or a file of them.

        Raises:
            InputError: the centre has another shape or is not finite.
        """
        return cls(None if centre is None else as_tensor("centre", centre, (start.dim,)))

    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        offsets = points if self.centre is None else points - self.centre.to(points)
        return offsets.square().sum(1) / 2


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
        """Build it in `start`'s dimension d; A and b are numbers or files of them.

        Raises:
            InputError: the shapes do not fit, or a value is not finite.
        """
        a = as_tensor("matrix", matrix, (None, start.dim))
        return cls(a, None if offset is None else as_tensor("offset", offset, (len(a),)))

    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        residuals = points @ self.matrix.to(points).T
        if self.offset is not None:
            residuals = residuals - self.offset.to(points)
        return residuals.square().sum(1) / 2


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
        chosen = points.index_select(1, self.coordinates.to(points.device))
        return (chosen - self.value).square().sum(1) / 2


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


def _indices(given: Sequence[int], dim: int) -> Tensor:
    whole = isinstance(given, list | tuple | range) and all(type(k) is int for k in given)
    if not whole or not given or not all(0 <= k < dim for k in given):
        raise InputError(f"coordinates must be a list of indices in [0, {dim}), got {given!r}")
    if len(set(given)) < len(given):
        raise InputError(f"coordinates must be distinct, got {given!r}")
    return torch.tensor(list(given))


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
                f"{listing(start.class_names)}"
            )
        if sign not in (1, -1):
            raise InputError(f"the sign of class {name} must be 1 or -1, got {sign!r}")
        signs[start.class_names.index(str(name))] = sign
    return signs
