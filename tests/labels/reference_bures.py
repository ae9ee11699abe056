"""The textbook Gaussian distance in float64: dense, slow, and for full-rank covariances only."""

from __future__ import annotations

import warnings

import numpy as np
import scipy.linalg


def class_moments(points, *, unbiased=True):
    """Mean (d,) and covariance (d, d) of one class."""
    return points.mean(0), np.cov(points, rowvar=False, ddof=int(unbiased)).reshape(
        points.shape[1], points.shape[1]
    )


def squared_bures_wasserstein(one, two, *, unbiased=True):
    """||m1 - m2||^2 + tr(S1 + S2 - 2 (S1^1/2 S2 S1^1/2)^1/2) of two classes' points."""
    mean_one, cov_one = class_moments(one, unbiased=unbiased)
    mean_two, cov_two = class_moments(two, unbiased=unbiased)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.linalg.LinAlgWarning)
        root = scipy.linalg.sqrtm(cov_one)
        cross = scipy.linalg.sqrtm(root @ cov_two @ root).real
    return ((mean_one - mean_two) ** 2).sum() + np.trace(cov_one + cov_two - 2 * cross)
