"""`labels=none`: plain feature transport, for unlabelled data too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.pairs import PairDistances, Progress


@dataclass(frozen=True)
class NoLabels(LabelMetric):
    """0 between any two classes; datasets need no labels."""

    name = "none"
    fixed = True

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Return zeros for all pairs of classes."""
        return PairDistances.exactly(torch.zeros(len(pairs), device=clouds[0].points.device))
