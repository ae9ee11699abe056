"""The interface of maps, the map by nearest particles, and checks that all maps share.

`FlowMap` is the interface and `relative_error` compares a map with a flow that contained the
points. `NearestParticleMap` copies the displacement of the nearest particle, found by an exact
search. `flows.maps` exports these three; `flows.maps.entropic` and `flows.maps.residual` use the
checks and the matching of classes by name. Particles without mass are never nearest, because the
objective of the flow did not move them.
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
    """A map to where a flow would have taken points that were not in it."""

    def __call__(self, samples: LabeledSamples) -> LabeledSamples:
        """Return the samples, row by row, at new features (k, d), otherwise unchanged.

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
    """Raise an `InputError` unless two clouds have the same shape, as the same particles must."""
    if before.features.shape != after.features.shape:
        raise InputError(
            f"before has shape {tuple(before.features.shape)} and after "
            f"{tuple(after.features.shape)}; row i of both must be the same particle"
        )


def class_indices(samples: LabeledSamples, names: tuple[str, ...]) -> Tensor:
    """Return the labels (k,) of labelled samples as indices into `names`, matched by class name.

    Raises:
        InputError: a class of the samples is not among the names, or two classes share a name.
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
    """Return (sum_i a_i |map(z_i) - t_i|^2 / sum_i a_i |t_i - z_i|^2)^1/2 for samples z, masses a.

    A perfect map has 0, and the identity has 1.

    Args:
        flow_map: of a flow without the samples.
        samples: k points z at the start.
        truth: the same points, row by row, at the end of a flow that contained them.

    Raises:
        InputError: the two have different shapes, the truth did not move, or the map refuses the
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


# The most distances in memory at once.
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class NearestParticleMap:
    """z + (x_T - x_0)[i], with i the particle nearest to z at the start, of z's class if labelled.

    It is valid for any flow, also with momentum. Particles without mass are skipped.

    Args:
        before: the n particles before the first step.
        after: the same particles, row by row, after the last.

    Raises:
        InputError: the two have different shapes.
    """

    before: LabeledSamples
    after: LabeledSamples

    def __post_init__(self) -> None:
        check_same_particles(self.before, self.after)

    @computes
    def __call__(self, samples: LabeledSamples) -> LabeledSamples:
        """Return the moved samples; labels are matched by class name and ignored if missing.

        Raises:
            InputError: another dimension, or a class without particles that have mass.
        """
        check_dimension(samples, self.before.dim)
        rows = nearest_particles(samples, self.before)
        displacement = self.after.features[rows] - self.before.features[rows]
        return replace(samples, features=samples.features + displacement.to(samples.features))


def nearest_particles(samples: LabeledSamples, particles: LabeledSamples) -> Tensor:
    """Return the row of the nearest particle for k samples, of the same class if both have labels.

    Particles without mass are skipped: nothing in the flow's objective moved them.

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
    """Return the samples with labels in the numbering of the particles.

    Labels are matched by class name. Unlabelled samples get those of their nearest particles, or
    none if the particles have none.

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
    """Return the rows of the nearest particles among those of the mask `candidates` (n,)."""
    rows = torch.nonzero(candidates).squeeze(1)
    dtype = torch.promote_types(points.dtype, particles.features.dtype)
    known = particles.features[rows].to(dtype)
    height = max(1, BLOCK_ELEMENTS // len(rows))
    # A matrix product would cancel squared norms, and float32 would confuse near neighbours.
    mode = "donot_use_mm_for_euclid_dist"
    found = [
        torch.cdist(block.to(dtype), known, compute_mode=mode).argmin(1)
        for block in torch.split(points, height)
    ]
    return rows[torch.cat(found)]
