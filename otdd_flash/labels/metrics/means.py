"""`labels=means`: the squared distance of class means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.moment_distances import mean_distances
from otdd_flash.labels.pairs import PairDistances, Progress


@dataclass(frozen=True)
class Means(LabelMetric):
    """||m_i - m_j||^2, a lower bound of the squared 2-Wasserstein distance."""

    name = "means"

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        return mean_distances(clouds, pairs)
