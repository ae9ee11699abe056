"""The classes of new points, in the numbering of the particles."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples


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
