"""Class clouds, both ways to decompose, and references for gaussian class distances."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import scipy.linalg
import torch

from otdd_flash.labels import gaussian
from otdd_flash.labels.pairs import ClassCloud

ROUTES = ("lapack", "products")
every_route = pytest.mark.parametrize("route", ROUTES)


@contextmanager
def decomposing_by(route):
    """SVD and QR as on the CPU ("lapack"), or matrix products as on a GPU ("products")."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "by_products", lambda _: route == "products")
        yield


def random_cloud(size, dim, seed=0, *, weighted=False, scale=1.0, dtype=torch.float64):
    """A class with its own mean and covariance."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(size, dim)) @ rng.normal(size=(dim, dim)) / dim**0.5
    points = scale * (points + rng.normal(size=dim))
    weights = None
    if weighted:
        weights = torch.from_numpy(rng.uniform(0.2, 1, size))
        weights = weights / weights.sum()
    return ClassCloud(f"class {seed}", torch.from_numpy(points).to(dtype), weights)


def moved(cloud, points):
    return ClassCloud(cloud.name, points, cloud.weights)


def squared_bures_wasserstein(one, two, *, unbiased=True):
    """||m1 - m2||^2 + tr(S1 + S2 - 2 (S1^1/2 S2 S1^1/2)^1/2) of two classes' points."""
    cov_one, cov_two = (
        np.atleast_2d(np.cov(points, rowvar=False, ddof=int(unbiased))) for points in (one, two)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.linalg.LinAlgWarning)
        root = scipy.linalg.sqrtm(cov_one)
        cross = scipy.linalg.sqrtm(root @ cov_two @ root).real
    return ((one.mean(0) - two.mean(0)) ** 2).sum() + np.trace(cov_one + cov_two - 2 * cross)
