"""What a map of a flow is, what each of them refuses, and how far one is from the flow."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

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
