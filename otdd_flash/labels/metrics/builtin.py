"""The built-in methods of class distances, each a frozen dataclass of its parameters.

`gaussian`: Bures-Wasserstein distance of class means and covariances; `exact`: unregularised
transport between points; `sinkhorn`: debiased entropic transport between points; `means`: squared
distance of means; `upper_bound`: squared distance of means plus both variances; `none`: zero, plain
feature transport.

`labels.metrics` registers them. The numerical work is in `labels.gaussian`, `labels.exact`,
`labels.sinkhorn_pairs` and `labels.moments`. The text of a recipe is a key of the pair cache: a
change of it makes cached distances unknown. The names of fields are keys of `labels` in
configurations, so they must stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otdd_flash.arguments import Positive
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.exact import exact_distances, exact_parts
from otdd_flash.labels.gaussian import diagonal_gaussian_distances, gaussian_distances
from otdd_flash.labels.metrics.base import LabelMetric, Measured
from otdd_flash.labels.moments import mean_distances, upper_bound_distances
from otdd_flash.labels.pairs import PairDistances, Progress
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances


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
        """Return the cache key, with the device; None for diagonal covariances: no cache."""
        return None if self.diagonal else f"gaussian unbiased={self.unbiased} on {device.type}"

    @property
    def single_samples_are_points(self) -> bool:
        """Whether covariances divide by n - 1."""
        return self.unbiased


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
        """Yield distances as they are computed; classes need no preparation."""
        return exact_parts(clouds, pairs)

    def recipe(self, device: torch.device) -> str:
        """Return the cache key; distances are always computed on the CPU."""
        return "exact"


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

    epsilon: Positive | None = None
    tolerance: Positive = 1e-3

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        assert self.epsilon is not None
        return sinkhorn_distances(clouds, pairs, self.epsilon, self.tolerance, progress=progress)

    def recipe(self, device: torch.device) -> str:
        """Return the cache key, with the device, as devices round differently."""
        return f"sinkhorn epsilon={self.epsilon!r} tolerance={self.tolerance!r} on {device.type}"


@dataclass(frozen=True)
class Means(LabelMetric):
    """||m_i - m_j||^2, a lower bound of the squared 2-Wasserstein distance."""

    name = "means"

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        return mean_distances(clouds, pairs)


@dataclass(frozen=True)
class UpperBound(LabelMetric):
    """||m_i - m_j||^2 + tr S_i + tr S_j, the cost of the independent coupling; 0 if identical.

    Args:
        unbiased: covariances S divide by n - 1, else by n.

    Raises:
        InputError: it is neither true nor false.
    """

    name = "upper_bound"

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
