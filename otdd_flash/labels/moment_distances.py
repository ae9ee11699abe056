"""Distances between classes from their means and total variances alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.moments import class_means, squared_gaps, total_variances
from otdd_flash.labels.pair_chunks import used_classes
from otdd_flash.labels.pairs import PairDistances


def mean_distances(clouds: Sequence[ClassCloud], pairs: Tensor) -> PairDistances:
    """||m_i - m_j||^2 of pairs (P, 2) of classes."""
    with torch.no_grad():
        return PairDistances.exactly(mean_table(clouds, pairs))


def upper_bound_distances(
    clouds: Sequence[ClassCloud], pairs: Tensor, *, unbiased: bool = True
) -> PairDistances:
    """||m_i - m_j||^2 + tr S_i + tr S_j of pairs (P, 2) of classes.

    It is the cost of the independent coupling. Covariances divide by n - 1 where `unbiased`.
    """
    with torch.no_grad():
        return PairDistances.exactly(upper_bound_table(clouds, pairs, unbiased))


def mean_table(clouds: Sequence[ClassCloud], pairs: Tensor) -> Tensor:
    """The values of `mean_distances`, (P,) float64, differentiable in the classes' points."""
    clouds, pairs = used_classes(clouds, pairs)
    if len(pairs) == 0:
        return torch.zeros(0, dtype=torch.float64, device=pairs.device)
    return squared_gaps(class_means(clouds), pairs)


def upper_bound_table(clouds: Sequence[ClassCloud], pairs: Tensor, unbiased: bool = True) -> Tensor:
    """The values of `upper_bound_distances`, differentiable as `mean_table`."""
    clouds, pairs = used_classes(clouds, pairs)
    if len(pairs) == 0:
        return torch.zeros(0, dtype=torch.float64, device=pairs.device)
    traces = total_variances(clouds, unbiased)
    first, second = pairs.unbind(1)
    return squared_gaps(class_means(clouds), pairs) + (traces[first] + traces[second])
