"""Class clouds, and debiased divergences of them by other means than the segmented solver."""

from __future__ import annotations

import numpy as np
import reference
import torch
from scipy.spatial.distance import cdist

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances
from otdd_flash.operators.matrix import MatrixOperator
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.alternating import solve_alternating
from otdd_flash.solver.term.symmetric import solve_symmetric


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


def pot_divergence(one, two, epsilon):
    """S_eps from POT's plans, each valued as <P, C> + eps KL(P | a b^T)."""
    import ot

    def cost_between(first, second):
        cost = cost_of(first, second).numpy()
        a, b = first.masses.numpy(), second.masses.numpy()
        plan = ot.bregman.sinkhorn_log(a, b, cost, epsilon, numItermax=5_000, stopThr=1e-9)
        return (plan * cost).sum() + epsilon * (plan * np.log(plan / np.outer(a, b))).sum()

    own = cost_between(one, one) + cost_between(two, two)
    return cost_between(one, two) - own / 2


def pair_by_pair(one, two, epsilon, tolerance):
    """S_eps from three solves, each alone, of the solvers for single problems."""
    options = Converged(tolerance=tolerance)

    def operator(first, second):
        return MatrixOperator(cost_of(first, second), first.masses, second.masses)

    own = [solve_symmetric(operator(cloud, cloud), epsilon, options).value for cloud in (one, two)]
    return solve_alternating(operator(one, two), epsilon, options).value - sum(own) / 2


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
