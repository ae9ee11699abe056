"""`labels=sinkhorn`: debiased entropic transport between the points of two classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from otdd_flash.arguments.values import positive
from otdd_flash.checks import Declaration, optional
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.pairs import PairDistances, Progress
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances


@dataclass(frozen=True)
class Sinkhorn(LabelMetric):
    """S_epsilon(i, j) = OT_epsilon(i, j) - OT_epsilon(i, i) / 2 - OT_epsilon(j, j) / 2, bounded.

    Args:
        epsilon: entropic regularisation, in units of ||.||^2; None: the `epsilon` that a comparison
            is given, else 0.01 of the mean squared distance between all rows compared.
        tolerance: L1 marginal error at which solves stop.

    Raises:
        InputError: one of them is not positive and finite.
    """

    name = "sinkhorn"
    checks: ClassVar[Declaration] = {"epsilon": optional(positive), "tolerance": positive}

    epsilon: float | None = None
    tolerance: float = 1e-3

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        assert self.epsilon is not None
        return sinkhorn_distances(clouds, pairs, self.epsilon, self.tolerance, progress=progress)

    def recipe(self, device: torch.device) -> str:
        """Return what numbers depend on, the device included, as others round otherwise."""
        return f"sinkhorn epsilon={self.epsilon!r} tolerance={self.tolerance!r} on {device.type}"
