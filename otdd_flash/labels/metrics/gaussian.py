"""`labels=gaussian`: the squared Bures-Wasserstein distance of class means and covariances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from otdd_flash.checks import Declaration, flag
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.gaussian import diagonal_gaussian_distances, gaussian_distances
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.pairs import PairDistances, Progress


@dataclass(frozen=True)
class Gaussian(LabelMetric):
    """||m_i - m_j||^2 + tr S_i + tr S_j - 2 tr (S_i^1/2 S_j S_i^1/2)^1/2.

    Args:
        unbiased: covariances S divide by n - 1, else by n.
        diagonal: covariances between features are taken as zero.

    Raises:
        InputError: one of them is neither true nor false.
    """

    name = "gaussian"
    checks: ClassVar[Declaration] = {"unbiased": flag, "diagonal": flag}

    unbiased: bool = True
    diagonal: bool = False

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        if self.diagonal:
            return diagonal_gaussian_distances(clouds, pairs, unbiased=self.unbiased)
        return gaussian_distances(clouds, pairs, unbiased=self.unbiased, progress=progress)

    def recipe(self, device: torch.device) -> str | None:
        """Return what numbers depend on, the device included; None for diagonal covariances."""
        return None if self.diagonal else f"gaussian unbiased={self.unbiased} on {device.type}"

    @property
    def single_samples_are_points(self) -> bool:
        """Whether covariances divide by n - 1."""
        return self.unbiased
