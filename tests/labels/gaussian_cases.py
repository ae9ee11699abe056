"""Class clouds, and both ways to decompose, for the tests of gaussian class distances."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from otdd_flash.labels import covariance_factors, fidelity, nuclear_norm
from otdd_flash.labels.classes import ClassCloud

ROUTES = ("lapack", "products")
every_route = pytest.mark.parametrize("route", ROUTES)


@contextmanager
def decomposing_by(route):
    """SVD and QR as on the CPU ("lapack"), or matrix products as on a GPU ("products")."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (nuclear_norm, covariance_factors, fidelity):
            patch.setattr(module, "by_products", lambda _: route == "products")
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


def numpy_points(cloud):
    return cloud.points.detach().double().numpy()
