"""Mean and covariance of a class, in float64, the covariance as a factor A with S = A^T A.

All of it is differentiable in the points; the weights are constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.pair_chunks import chunk_size, equal_chunks


def class_mean(cloud: ClassCloud) -> Tensor:
    """The weighted mean (d,), float64."""
    points = cloud.points.to(torch.float64)
    return points.mean(0) if cloud.weights is None else cloud.weights @ points


def class_means(clouds: Sequence[ClassCloud]) -> Tensor:
    """The weighted means of all classes, (V, d) float64."""
    return torch.stack([class_mean(cloud) for cloud in clouds])


def covariance_factor(cloud: ClassCloud, unbiased: bool) -> Tensor:
    """A (n, d) float64 with A^T A the covariance of the class.

    A's rows are sqrt(w_i / z) (x_i - mean). The plain covariance has z = 1; the unbiased one has
    z = 1 - sum_i w_i^2 (reliability weights), so that w_i / z is 1 / (n - 1) for equal weights.
    A class of one sample is a point: its covariance is 0, `unbiased` or not.
    """
    size = len(cloud)
    unbiased = unbiased and size > 1
    centred = cloud.points.to(torch.float64) - class_mean(cloud)
    if cloud.weights is None:
        return centred / math.sqrt(size - 1 if unbiased else size)
    weights = cloud.weights
    # Term by term, so that one dominant weight does not cancel all others.
    masses = weights / (weights - weights.square()).sum() if unbiased else weights
    return centred * masses.sqrt().unsqueeze(1)


def total_variances(clouds: Sequence[ClassCloud], unbiased: bool) -> Tensor:
    """Traces of the class covariances, (V,) float64."""
    return torch.stack([covariance_factor(cloud, unbiased).square().sum() for cloud in clouds])


def standard_deviations(clouds: Sequence[ClassCloud], unbiased: bool) -> Tensor:
    """Of every feature within every class, (V, d) float64; with gradient 0 where they are 0."""
    return torch.stack(
        [torch.linalg.vector_norm(covariance_factor(cloud, unbiased), dim=0) for cloud in clouds]
    )


def squared_gaps(points: Tensor, pairs: Tensor) -> Tensor:
    """||p_i - p_j||^2 (P,) for the rows of (V, d) and pairs (P, 2), from differences.

    Equal rows are at exactly 0.
    """
    gaps = [points.new_zeros(0)]
    # Two rows, their difference and its squares.
    size = chunk_size(4 * points.shape[1], points.device)
    for count, chunk in equal_chunks(pairs.to(points.device), size):
        first, second = chunk.unbind(1)
        gaps.append((points[first] - points[second]).square().sum(1)[:count])
    return torch.cat(gaps)
