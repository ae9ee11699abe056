"""New points copy the displacement of the nearest particle, which an exact search finds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.flows.maps.base import check_dimension, check_same_particles, class_indices
from otdd_flash.samples import LabeledSamples

# Distances that are held at once.
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class NearestParticleMap:
    """z + (x_T - x_0)[i], with i the particle nearest to z at the start, of z's class if labelled.

    Right for any flow, also with momentum. Particles without mass are passed over.

    Args:
        before: the n particles before the first step.
        after: the same particles, row by row, after the last.

    Raises:
        InputError: the two are not of one shape.
    """

    before: LabeledSamples
    after: LabeledSamples

    def __post_init__(self) -> None:
        check_same_particles(self.before, self.after)

    @computes
    def __call__(self, samples: LabeledSamples) -> LabeledSamples:
        """The samples moved, their labels matched by class name; without labels, by place alone.

        Raises:
            InputError: another dimension, or a class without particles that have mass.
        """
        check_dimension(samples, self.before.dim)
        rows = nearest_particles(samples, self.before)
        displacement = self.after.features[rows] - self.before.features[rows]
        return replace(samples, features=samples.features + displacement.to(samples.features))


def nearest_particles(samples: LabeledSamples, particles: LabeledSamples) -> Tensor:
    """Row of the nearest particle for each of k samples, of the same class if both have labels.

    Particles without mass are passed over: nothing moved them in the flow's objective.

    Returns:
        (k,) int64, on the device of the particles.

    Raises:
        InputError: a sample's class is not among the particles, or has no mass there.
    """
    device = particles.features.device
    points, carriers = samples.features.to(device), particles.masses > 0
    if samples.labels is None or particles.labels is None:
        return _nearest_among(carriers, points, particles)
    labels = class_indices(samples, particles.class_names).to(device)
    rows = torch.empty_like(labels)
    for index in torch.unique(labels).tolist():
        same = carriers & (particles.labels == index)
        if not bool(same.any()):
            raise InputError(
                f"no particle of class {particles.class_names[index]!r} has mass, so none tells "
                f"where {samples.name} would go; leave the class out"
            )
        mine = labels == index
        rows[mine] = _nearest_among(same, points[mine], particles)
    return rows


def in_classes_of(samples: LabeledSamples, particles: LabeledSamples) -> LabeledSamples:
    """The samples with labels in the numbering of the particles.

    Labels are matched by class name; unlabelled samples take those of their nearest particles, and
    next to unlabelled particles there are none.

    Raises:
        InputError: a sample's class is not among the particles.
    """
    if particles.labels is None:
        return replace(samples, labels=None)
    if samples.labels is None:
        labels = particles.labels[nearest_particles(samples, particles)]
    else:
        labels = class_indices(samples, particles.class_names)
    return replace(samples, labels=labels, class_names=particles.class_names)


def _nearest_among(candidates: Tensor, points: Tensor, particles: LabeledSamples) -> Tensor:
    """Find the nearest among the particles where the mask `candidates` (n,) holds."""
    rows = torch.nonzero(candidates).squeeze(1)
    dtype = torch.promote_types(points.dtype, particles.features.dtype)
    known = particles.features[rows].to(dtype)
    height = max(1, BLOCK_ELEMENTS // len(rows))
    # By a matrix product, squares of norms would cancel and float32 mistake near neighbours.
    mode = "donot_use_mm_for_euclid_dist"
    found = [
        torch.cdist(block.to(dtype), known, compute_mode=mode).argmin(1)
        for block in torch.split(points, height)
    ]
    return rows[torch.cat(found)]
