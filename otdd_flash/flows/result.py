"""What a flow returns: the adapted dataset, and how it came about."""

from __future__ import annotations

from dataclasses import dataclass

from otdd_flash.flows.history import StepRecord, Trajectory
from otdd_flash.labels import ClassDistances
from otdd_flash.samples import LabeledSamples


@dataclass(frozen=True, eq=False)
class FlowResult:
    """A dataset that was moved towards another.

    Attributes:
        source: the n particles before the first step, in the space in which they move.
        target: the m points they moved towards, in the space of features.
        samples: the n particles after the last step, with their labels and weights: row i was row
            i of `source`.
        history: one record per step, and one of the end.
        trajectory: positions of some particles on the way.
        class_distances: W at the end.
        mode: how the flow moved.
        stopped_by: `steps`, `tolerance` or `interrupted`.
    """

    source: LabeledSamples
    target: LabeledSamples
    samples: LabeledSamples
    history: tuple[StepRecord, ...]
    trajectory: Trajectory
    class_distances: ClassDistances
    mode: str
    stopped_by: str
