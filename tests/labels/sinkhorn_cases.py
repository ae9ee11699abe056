"""Class clouds, and debiased divergences of them by other means than the segmented solver."""

from __future__ import annotations

import reference
import torch
from scipy.spatial.distance import cdist

from otdd_flash.labels.pairs import ClassCloud, all_pairs
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances


def make_clouds(sizes, dim=3, seed=0, *, weighted=False, spread=1.0):
    """Gaussian classes with means of their own; every other one weighted if asked for."""
    draw = torch.Generator().manual_seed(seed)
    clouds = []
    for k, size in enumerate(sizes):
        shape = torch.randn(dim, dim, generator=draw, dtype=torch.float64) / dim**0.5
        points = torch.randn(size, dim, generator=draw, dtype=torch.float64) @ shape
        points = points * spread + torch.randn(dim, generator=draw, dtype=torch.float64)
        weights = None
        if weighted and k % 2 == 0 and size > 1:
            weights = torch.rand(size, generator=draw, dtype=torch.float64) + 0.05
            weights = weights / weights.sum()
        clouds.append(ClassCloud(f"class {k}", points, weights))
    return clouds


def table_of(clouds, epsilon, tolerance=1e-3):
    """The values between all classes (V, V)."""
    pairs = all_pairs(len(clouds))
    table = torch.zeros(len(clouds), len(clouds), dtype=torch.float64)
    table[pairs[:, 0], pairs[:, 1]] = sinkhorn_distances(clouds, pairs, epsilon, tolerance).values
    return table + table.T


def cost_of(one, two):
    return torch.from_numpy(cdist(one.points, two.points, "sqeuclidean"))


def true_divergence(one, two, epsilon):
    """S_eps by Newton's method, to about 1e-10."""
    costs = cost_of(one, two), cost_of(one, one), cost_of(two, two)
    return reference.sinkhorn_divergence(costs, one.masses, two.masses, epsilon)


def moved(clouds, device):
    return [
        ClassCloud(
            cloud.name,
            cloud.points.to(device),
            None if cloud.weights is None else cloud.weights.to(device),
        )
        for cloud in clouds
    ]
