"""New points copy the displacement of the nearest particle, which an exact search finds.

What a map of a flow is, what each of them refuses, and how far one is from the flow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples


class FlowMap(Protocol):
    """Where a flow would have taken points that were not in it."""

    def __call__(self, samples: LabeledSamples) -> LabeledSamples:
        """The samples, row by row, at new features (k, d); all else about them stays.

        Raises:
            InputError: another dimension than that of the particles, or a class that the flow did
                not move.
        """
        ...


def check_dimension(samples: LabeledSamples, dim: int) -> None:
    """Raise an `InputError` unless samples have the dimension of the particles."""
    if samples.dim != dim:
        raise InputError(
            f"{samples.name} has {samples.dim} features, but the particles of the flow had {dim}; "
            "use the extractor that the flow's source came from"
        )


def check_same_particles(before: LabeledSamples, after: LabeledSamples) -> None:
    """Raise an `InputError` unless rows of two clouds can be the same particles."""
    if before.features.shape != after.features.shape:
        raise InputError(
            f"before has shape {tuple(before.features.shape)} and after "
            f"{tuple(after.features.shape)}; row i of both must be the same particle"
        )


def class_indices(samples: LabeledSamples, names: tuple[str, ...]) -> Tensor:
    """Labels (k,) of labelled samples as indices into `names`, matched by class name.

    Raises:
        InputError: a class that the samples use is not among the names, or two share one name.
    """
    assert samples.labels is not None
    if samples.class_names == names:
        return samples.labels
    known = {name: index for index, name in enumerate(names)}
    used = [samples.class_names[index] for index in torch.unique(samples.labels).tolist()]
    unknown = [name for name in used if name not in known]
    if unknown:
        raise InputError(
            f"{samples.name} has classes that the flow did not move: {', '.join(unknown)}; it "
            f"moved {', '.join(names)}. Leave them out with keep_classes, or rename them"
        )
    if len(known) < len(names):
        raise InputError(
            f"classes of the flow share names, so new points cannot be matched: {', '.join(names)}"
        )
    indices = [known.get(name, -1) for name in samples.class_names]
    return torch.tensor(indices, device=samples.labels.device)[samples.labels]


def relative_error(flow_map: FlowMap, samples: LabeledSamples, truth: LabeledSamples) -> float:
    """(sum_i a_i |map(z_i) - t_i|^2 / sum_i a_i |t_i - z_i|^2)^1/2 of samples z with masses a.

    0 is perfect, and the identity has 1.

    Args:
        flow_map: of a flow without the samples.
        samples: k points z at the start.
        truth: the same points, row by row, at the end of a flow that had them inside.

    Raises:
        InputError: the two are not of one shape, the truth did not move, or the map refuses the
            samples.
    """
    check_same_particles(samples, truth)
    moved = flow_map(samples).features.double()
    masses, start = samples.masses, samples.features.double()
    end = truth.features.to(start)
    distance = masses @ (end - start).square().sum(1)
    if not float(distance) > 0:
        raise InputError("the truth is where the samples began, so no error is relative to it")
    return float((masses @ (moved - end).square().sum(1) / distance).sqrt())


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
