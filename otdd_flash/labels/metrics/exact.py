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
        """Measure pairs of classes; see `LabelMetric.measure`."""
        return exact_distances(clouds, pairs, progress=progress)

    def in_parts(self, clouds: Sequence[ClassCloud], pairs: Tensor) -> Measured:
        """Yield distances as they come; classes need no preparation."""
        return exact_parts(clouds, pairs)

    def recipe(self, device: torch.device) -> str:
        """Return what numbers depend on; they are always computed on the CPU."""
        return "exact"
