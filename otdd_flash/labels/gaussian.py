"""Squared Bures-Wasserstein distance between the Gaussians of pairs of classes.

W_ij = ||m_i - m_j||^2 + tr S_i + tr S_j - 2 tr (S_i^1/2 S_j S_i^1/2)^1/2

for class means m and covariances S; `covariance_factors` and `fidelity` say how. Everything is
float64, whatever the points are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.covariance_factors import reduced_factors
from otdd_flash.labels.fidelity import fidelities
from otdd_flash.labels.moments import class_means, squared_gaps, standard_deviations
from otdd_flash.labels.pair_chunks import used_classes
from otdd_flash.labels.pairs import PairDistances, Progress


class ClassMoments(NamedTuple):
    """What of a class its distances depend on, float64.

    Attributes:
        mean: (d,).
        factor: F (r, d) with F^T F the covariance, as `covariance_factors` makes it.
        trace: () of the covariance.
    """

    mean: Tensor
    factor: Tensor
    trace: Tensor


def gaussian_distances(
    clouds: Sequence[ClassCloud],
    pairs: Tensor,
    *,
    unbiased: bool = True,
    progress: Progress | None = None,
) -> PairDistances:
    """Bures-Wasserstein distances of Gaussian classes.

    Args:
        clouds: V classes.
        pairs: (P, 2) int64, indices of the classes of each pair.
        unbiased: whether covariances divide by n - 1 (for weights: by 1 - sum w^2) or by n.
        progress: called with the number of class pairs done and their total.

    Returns:
        P distances, each the same to the last bit whatever the other pairs are.
    """
    with torch.no_grad():
        return PairDistances.exactly(gaussian_table(clouds, pairs, unbiased, progress))


def diagonal_gaussian_distances(
    clouds: Sequence[ClassCloud], pairs: Tensor, *, unbiased: bool = True
) -> PairDistances:
    """As `gaussian_distances`, with all covariances between features taken as zero."""
    with torch.no_grad():
        return PairDistances.exactly(diagonal_gaussian_table(clouds, pairs, unbiased))


def gaussian_table(
    clouds: Sequence[ClassCloud],
    pairs: Tensor,
    unbiased: bool = True,
    progress: Progress | None = None,
) -> Tensor:
    """The values of `gaussian_distances`, (P,) float64, differentiable in the classes' points.

    Where a covariance or a product of two is singular the distance can have a kink; the gradient
    there leaves the lost directions out, and is finite.
    """
    clouds, pairs = used_classes(clouds, pairs)
    return moments_table(class_moments(clouds, unbiased), pairs, progress)


def class_moments(clouds: Sequence[ClassCloud], unbiased: bool) -> list[ClassMoments]:
    """Moments of all classes, differentiable in the points as `reduced_factors` says.

    Those of a class are the same to the last bit whatever the other classes are.
    """
    if not clouds:
        return []
    factors, traces = reduced_factors(clouds, unbiased)
    return list(map(ClassMoments, class_means(clouds), factors, traces))


def moments_table(
    moments: Sequence[ClassMoments], pairs: Tensor, progress: Progress | None = None
) -> Tensor:
    """The values of `gaussian_table` from the moments of V classes, for pairs (P, 2) of them."""
    if len(pairs) == 0:
        return torch.zeros(0, dtype=torch.float64, device=pairs.device)
    means, traces = (
        torch.stack([getattr(one, key) for one in moments]) for key in ("mean", "trace")
    )
    fidelity = fidelities([one.factor for one in moments], pairs, progress)
    first, second = pairs.to(traces.device).unbind(1)
    spread = traces[first] + traces[second] - 2 * fidelity
    # The Bures part is a squared distance; below zero there is only rounding.
    return squared_gaps(means, pairs) + spread.clamp_min(0)


def diagonal_gaussian_table(
    clouds: Sequence[ClassCloud], pairs: Tensor, unbiased: bool = True
) -> Tensor:
    """The values of `diagonal_gaussian_distances`, differentiable as `gaussian_table`.

    Commuting covariances make them ||m_i - m_j||^2 + ||s_i - s_j||^2, s the standard deviations.
    """
    clouds, pairs = used_classes(clouds, pairs)
    if len(pairs) == 0:
        return torch.zeros(0, dtype=torch.float64, device=pairs.device)
    deviations = standard_deviations(clouds, unbiased)
    return squared_gaps(class_means(clouds), pairs) + squared_gaps(deviations, pairs)
