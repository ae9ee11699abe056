"""Mean and covariance of a class, in float64, the covariance as a factor A with S = A^T A."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.labels.classes import ClassCloud


def class_mean(cloud: ClassCloud) -> Tensor:
    """The weighted mean (d,), float64."""
    points = cloud.points.detach().to(torch.float64)
    return points.mean(0) if cloud.weights is None else cloud.weights @ points


def class_means(clouds: Sequence[ClassCloud]) -> Tensor:
    """The weighted means of all classes, (V, d) float64."""
    return torch.stack([class_mean(cloud) for cloud in clouds])


def covariance_factor(cloud: ClassCloud, unbiased: bool) -> Tensor:
    """A (n, d) float64 with A^T A the covariance of the class.

    A's rows are sqrt(w_i / z) (x_i - mean). The plain covariance has z = 1; the unbiased one has
    z = 1 - sum_i w_i^2 (reliability weights), so that w_i / z is 1 / (n - 1) for equal weights.

    Raises:
        InputError: a class of one sample has no unbiased covariance.
    """
    size = len(cloud)
    if unbiased and size < 2:
        raise InputError(
            f"class {cloud.name} has {size} sample, and an unbiased covariance needs 2; ways out: "
            "min_class_size=2 drops the class, labels.unbiased=false takes its covariance as 0, "
            "labels=means compares class means only"
        )
    centred = cloud.points.detach().to(torch.float64) - class_mean(cloud)
    if cloud.weights is None:
        return centred / math.sqrt(size - 1 if unbiased else size)
    weights = cloud.weights
    # Term by term, so that one dominant weight does not cancel all others.
    scale = float((weights - weights.square()).sum()) if unbiased else 1.0
    return centred * (weights / scale).sqrt().unsqueeze(1)


def total_variances(clouds: Sequence[ClassCloud], unbiased: bool) -> Tensor:
    """Traces of the class covariances, (V,) float64."""
    return torch.stack([covariance_factor(cloud, unbiased).square().sum() for cloud in clouds])


def squared_distances(points: Tensor) -> Tensor:
    """||p_i - p_j||^2 for the rows of (V, d), from differences: equal rows are at exactly 0."""
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
