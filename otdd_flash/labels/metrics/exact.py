"""`labels=exact`: unregularised transport between the points of two classes, for small classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.exact import exact_distances, exact_parts
from otdd_flash.labels.metrics.base import LabelMetric, Measured
from otdd_flash.labels.pairs import PairDistances, Progress


@dataclass(frozen=True)
class Exact(LabelMetric):
    """min_P <||x_k - y_l||^2, P>, the squared 2-Wasserstein distance of the points themselves."""

    name = "exact"

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """See the base class."""
        return exact_distances(clouds, pairs, progress=progress)

    def in_parts(self, clouds: Sequence[ClassCloud], pairs: Tensor) -> Measured:
        """What one process computes at once; needs no preparation of classes."""
        return exact_parts(clouds, pairs)

    def recipe(self, device: torch.device) -> str:
        """Always measured on the CPU."""
        return "exact"
