"""The interaction energy: points of different classes repel each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.flows.functionals.arrays import as_number
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.known_gradient import KnownGradient

# Pairs of points at once: 64 MB in float32.
TILE = 2**24
# Points whose distances give the automatic radius, and the seed that draws them.
SAMPLED = 1024
SEED = 0


@dataclass(frozen=True)
class ClassRepulsion:
    """F(x) = sum_ij a_i a_j k_ij with k_ij = 1[l_i != l_j] exp(-||x_i - x_j||^2 / (2 s^2)).

    Work is O(n^2 d); memory is that of n points and of one tile of pairs. The gradient

        dF / dx_i = -(2 a_i / s^2) sum_j a_j k_ij (x_i - x_j)

    is computed together with the value, so autograd keeps no pairs either.

    Attributes:
        radius: s, in units of the points. Pairs far beyond it do not feel each other.
    """

    radius: float

    @classmethod
    def configured(cls, start: LabeledSamples, radius: float | None = None) -> ClassRepulsion:
        """Build it with the given radius, or `median_radius` of the starting points.

        Raises:
            InputError: unlabelled particles, a radius that is not positive, or none to be found.
        """
        if start.labels is None:
            raise InputError("needs labelled particles: only different classes repel each other")
        if radius is None:
            return cls(median_radius(start))
        if as_number("radius", radius) <= 0:
            raise InputError(f"radius must be positive, got {radius}")
        return cls(float(radius))

    def __call__(self, points: Tensor, labels: Tensor | None, masses: Tensor) -> Tensor:
        """The energy, 0-dim float64.

        Raises:
            InputError: the particles have no labels.
        """
        if labels is None:
            raise InputError("class_repulsion needs labelled particles")
        with torch.no_grad():
            value, gradient = _value_and_gradient(points, labels, masses, self.radius)
        return cast(Tensor, KnownGradient.apply(value, (gradient,), None, points))


def median_radius(start: LabeledSamples) -> float:
    """The median distance between points of different classes, whatever their masses.

    Over 1,024 of the points that have mass, drawn by a fixed seed: the same for the same points.

    Raises:
        InputError: no two of them differ in class, or most such pairs coincide.
    """
    assert start.labels is not None
    present = torch.nonzero(start.masses.cpu() > 0).squeeze(1)
    generator = torch.Generator().manual_seed(SEED)
    rows = present[torch.randperm(len(present), generator=generator)[:SAMPLED]]
    rows = rows.to(start.features.device)
    points, labels = start.features[rows].double(), start.labels[rows]
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    apart = distances[labels[:, None] != labels]
    if len(apart) == 0:
        raise InputError(
            f"no two of {len(rows)} starting points differ in class; give radius=NUMBER, or leave "
            "class_repulsion out"
        )
    radius = float(apart.median())
    if radius == 0:
        raise InputError("most points of different classes coincide; give radius=NUMBER")
    return radius


def _value_and_gradient(
    points: Tensor, labels: Tensor, masses: Tensor, radius: float
) -> tuple[Tensor, Tensor]:
    """F and dF / dx (n, d), in tiles of rows against all points."""
    # Centred, so that the scalar products below do not cancel far from the origin.
    z = (points - points.mean(0)) / radius
    halves = z.square().sum(1) / 2
    weights = masses.to(z)
    value = torch.zeros((), dtype=torch.float64, device=points.device)
    gradient = torch.empty_like(z)
    rows = max(1, TILE // len(z))
    for start in range(0, len(z), rows):
        tile = slice(start, start + rows)
        # a_j exp(-|z_i - z_j|^2 / 2), in place: a tile is the largest thing here.
        kernel = (z[tile] @ z.T).sub_(halves[tile, None]).sub_(halves).clamp_(max=0).exp_()
        kernel.masked_fill_(labels[tile, None] == labels, 0).mul_(weights)
        felt = kernel.sum(1)
        value += masses[tile] @ felt.double()
        differences = felt[:, None] * z[tile] - kernel @ z
        gradient[tile] = (-2 / radius) * weights[tile, None] * differences
    return value, gradient
