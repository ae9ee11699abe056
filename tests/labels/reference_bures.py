"""The textbook Gaussian distance in float64, for full-rank covariances, and a nuclear norm."""

from __future__ import annotations

import warnings

import mpmath
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


def exact_nuclear_norm(one, two, digits=50):
    """||one two^T||_* in arithmetic of many digits, from float64 matrices."""
    with mpmath.workdps(digits):
        product = mpmath.matrix(one.tolist()) * mpmath.matrix(two.tolist()).T
        return float(sum(mpmath.svd_r(product, compute_uv=False)))
