"""`labels=upper_bound`: the squared distance of class means plus both variances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from otdd_flash.checks import Declaration, flag
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.moment_distances import upper_bound_distances
from otdd_flash.labels.pairs import PairDistances, Progress


@dataclass(frozen=True)
class UpperBound(LabelMetric):
    """||m_i - m_j||^2 + tr S_i + tr S_j, the cost of the independent coupling; 0 if identical.

    Args:
        unbiased: covariances S divide by n - 1, else by n.

    Raises:
        InputError: it is neither true nor false.
    """

    name = "upper_bound"
    checks: ClassVar[Declaration] = {"unbiased": flag}

    unbiased: bool = True

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        return upper_bound_distances(clouds, pairs, unbiased=self.unbiased)

    @property
    def single_samples_are_points(self) -> bool:
        """Whether covariances divide by n - 1."""
        return self.unbiased
