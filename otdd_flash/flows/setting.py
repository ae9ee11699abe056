"""What stays the same during a flow: the two datasets, the cost, and how it is solved."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from otdd_flash.labels import ClassDistances, LabelMetric
from otdd_flash.labels.pairs import Progress as PairProgress
from otdd_flash.operators.build import labelled_cost
from otdd_flash.operators.request import Request
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import SIDES
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.term.result import Progress


@dataclass(frozen=True, eq=False)
class FlowSetting:
    """The problem that a flow descends.

    Attributes:
        request: features, labels and weights of the n particles at the start and of the m points
            they move towards, on the device, as the ground cost sees them.
        metric: how class distances are measured.
        epsilon: regularisation, in units of the cost.
        solver: how to solve and when to stop.
        refresh: steps between two measurements of class distances.
        progress: told of every iteration of every solve.
        class_progress: told how many pairs of classes have been measured.
    """

    request: Request
    metric: LabelMetric
    epsilon: float
    solver: Schedule
    refresh: int = 1
    progress: Progress | None = None
    class_progress: PairProgress | None = None

    @property
    def source(self) -> LabeledSamples:
        """The particles at the start."""
        return self.request.seen[0]

    @property
    def target(self) -> LabeledSamples:
        """What they move towards."""
        return self.request.seen[1]

    def at(self, features: Tensor) -> LabeledSamples:
        """The particles with features (n, d)."""
        return replace(self.source, features=features, subset_hash=None)

    def mean_cost(self, features: Tensor, class_distances: ClassDistances) -> float:
        """sum_ij a_i b_j C_ij of the particles with features (n, d), without any solve."""
        request = self.request.at(self.at(features), self.target)
        return float(labelled_cost(request.inputs(SIDES["xy"], class_distances.xy)).mean_cost)
