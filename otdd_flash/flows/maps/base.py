"""What a map of a flow is, and what each of them refuses."""

from __future__ import annotations

from typing import Protocol

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
