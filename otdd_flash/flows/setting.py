"""What stays the same during a flow: the two datasets, the cost, and how it is solved."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otdd_flash.labels import ClassDistances, LabelMetric
from otdd_flash.labels.pairs import Progress as PairProgress
from otdd_flash.operators.build import ComputeOptions, labelled_cost
from otdd_flash.operators.ground import GroundCost
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedule import Progress, Schedule


@dataclass(frozen=True, eq=False)
class FlowSetting:
    """The problem that a flow descends.

    Attributes:
        source: features, labels and weights of the n particles at the start, on the device.
        target: the m points they move towards, on the device.
        metric: how class distances are measured.
        epsilon: regularisation, in units of the cost.
        cost: weights of the ground cost.
        solver: how to solve and when to stop.
        compute: where and how passes run.
        device: where everything is.
        refresh: steps between two measurements of class distances.
        progress: told of every iteration of every solve.
        class_progress: told how many pairs of classes have been measured.
    """

    source: LabeledSamples
    target: LabeledSamples
    metric: LabelMetric
    epsilon: float
    cost: GroundCost
    solver: Schedule
    compute: ComputeOptions
    device: torch.device
    refresh: int = 1
    progress: Progress | None = None
    class_progress: PairProgress | None = None

    def at(self, features: Tensor) -> LabeledSamples:
        """The particles with features (n, d)."""
        return replace(self.source, features=features, subset_hash=None)

    def mean_cost(self, features: Tensor, class_distances: ClassDistances) -> float:
        """sum_ij a_i b_j C_ij of the particles with features (n, d), without any solve."""
        between = class_distances.xy
        cost = labelled_cost(self.at(features), self.target, between, self.cost, self.device)
        return float(cost.mean_cost)
