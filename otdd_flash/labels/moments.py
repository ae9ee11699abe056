"""Means and covariances of classes in float64, and class distances that need no more than these.

A covariance S is kept as a factor A with A^T A = S. `mean_table` and `upper_bound_table`
are the methods `labels=means` and `labels=upper_bound`. `labels.gaussian`,
`labels.metrics`, `contributions`, `flows.modes.jointly_driven` and `flows.modes.feature_driven`
call this module.

A change must keep everything differentiable in the points, for flows that move them, and in weights
that keep their sum, for `contributions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.pairs import chunk_size, equal_chunks, used_classes


def class_mean(cloud: ClassCloud) -> Tensor:
    """Return the weighted mean (d,), float64."""
    anchor, _, shift = _from_the_heaviest(cloud)
    return anchor + shift


def _from_the_heaviest(cloud: ClassCloud) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heaviest point (d,), the points (n, d) relative to it, and their mean (d,).

    Differences from a point of the class keep the digits that a large distance from the origin
    would take, and the small offset of a dominant point from the mean. The heaviest point counts as
    a constant.
    """
    points = cloud.points.to(torch.float64)
    heaviest = points.new_zeros(1, dtype=torch.int64)
    if cloud.weights is not None:
        heaviest = cloud.weights.argmax().reshape(1)
    anchor = points.detach().index_select(0, heaviest).squeeze(0)
    seen = points - anchor
    return anchor, seen, seen.mean(0) if cloud.weights is None else cloud.weights @ seen


def class_means(clouds: Sequence[ClassCloud]) -> Tensor:
    """Return the weighted means of all classes, (V, d) float64."""
    return torch.stack([class_mean(cloud) for cloud in clouds])


def covariance_factor(cloud: ClassCloud, unbiased: bool) -> Tensor:
    """Return A (n, d) float64 with A^T A the covariance of the class.

    The rows of A are sqrt(w_i / z) (x_i - mean). The plain covariance has z = 1; the unbiased one
    has z = 1 - sum_i w_i^2 (reliability weights), so that w_i / z is 1 / (n - 1) for equal weights.
    The covariance of a class of one sample is 0, `unbiased` or not.
    """
    size = len(cloud)
    unbiased = unbiased and size > 1
    _, seen, shift = _from_the_heaviest(cloud)
    centred = seen - shift
    if cloud.weights is None:
        return centred / math.sqrt(size - 1 if unbiased else size)
    masses = cloud.weights / _unevenness(cloud.weights) if unbiased else cloud.weights
    return centred * masses.sqrt().unsqueeze(1)


def _unevenness(weights: Tensor) -> Tensor:
    """Return 1 - sum_i w_i^2 = sum_i w_i (1 - w_i) without cancellation, weights (n,) of sum 1.

    At most one weight exceeds 1/2; its 1 - w is computed as the sum of the others.
    """
    heaviest = weights.argmax().reshape(1)
    others = weights.index_fill(0, heaviest, 0.0)
    # The largest weight is selected by its index: the derivative of a maximum would be shared among
    # equal weights.
    heavy = weights.index_select(0, heaviest).squeeze(0)
    return (others * (1 - others)).sum() + heavy * others.sum()


def total_variances(clouds: Sequence[ClassCloud], unbiased: bool) -> Tensor:
    """Return the traces of the class covariances, (V,) float64."""
    return torch.stack([covariance_factor(cloud, unbiased).square().sum() for cloud in clouds])


def standard_deviations(clouds: Sequence[ClassCloud], unbiased: bool) -> Tensor:
    """Compute the features' deviations within classes, (V, d) float64; gradient 0 at 0."""
    return torch.stack(
        [torch.linalg.vector_norm(covariance_factor(cloud, unbiased), dim=0) for cloud in clouds]
    )


def squared_gaps(points: Tensor, pairs: Tensor) -> Tensor:
    """Return ||p_i - p_j||^2 (P,) for rows of `points` (V, d) and pairs (P, 2), from differences.

    Equal rows are at exactly 0.
    """
    gaps = [points.new_zeros(0)]
    # The numbers of a pair are two rows, their difference and its squares.
    size = chunk_size(4 * points.shape[1], points.device)
    for count, chunk in equal_chunks(pairs.to(points.device), size):
        first, second = chunk.unbind(1)
        gaps.append((points[first] - points[second]).square().sum(1)[:count])
    return torch.cat(gaps)


def mean_table(clouds: Sequence[ClassCloud], pairs: Tensor) -> Tensor:
    """Return ||m_i - m_j||^2 of pairs (P, 2) of classes, (P,) float64, differentiable in points."""
    clouds, pairs = used_classes(clouds, pairs)
    if len(pairs) == 0:
        return torch.zeros(0, dtype=torch.float64, device=pairs.device)
    return squared_gaps(class_means(clouds), pairs)


def upper_bound_table(clouds: Sequence[ClassCloud], pairs: Tensor, unbiased: bool = True) -> Tensor:
    """Return ||m_i - m_j||^2 + tr S_i + tr S_j of pairs (P, 2), differentiable as in `mean_table`.

    It is the cost of the independent coupling. Covariances divide by n - 1 if `unbiased`.
    """
    clouds, pairs = used_classes(clouds, pairs)
    if len(pairs) == 0:
        return torch.zeros(0, dtype=torch.float64, device=pairs.device)
    traces = total_variances(clouds, unbiased)
    first, second = pairs.unbind(1)
    return squared_gaps(class_means(clouds), pairs) + (traces[first] + traces[second])
