"""Other packages' entropic transport at this package's conventions: opponents and oracles.

Each function takes the same labelled clouds and epsilon and returns numbers that mean the same:

    OT_epsilon = min_P <C, P> + epsilon KL(P | a b^T)
    C_ij = lambda_x ||x_i - y_j||^2 + lambda_y W[l_i, l_j]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otdd_flash import GroundCost, LabeledSamples


@dataclass(frozen=True)
class Problem:
    """Two labelled clouds, the class distances W (V_x + V_y, V_x + V_y), and the cost's weights."""

    source: LabeledSamples
    target: LabeledSamples
    class_table: Tensor
    cost: GroundCost

    def matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The dense cost C (n, m)."""
        return self.dense(_tagged(self.source, 0, dtype), _tagged(self.target, self._shift, dtype))

    def dense(self, x: Tensor, y: Tensor) -> Tensor:
        """C between points (..., n, d + 1) and (..., m, d + 1) whose last column is the class."""
        squares = torch.cdist(x[..., :-1], y[..., :-1]).square()
        labels_x, labels_y = x[..., -1].long(), y[..., -1].long()
        table = self.class_table.to(x)
        labels = table[labels_x.unsqueeze(-1), labels_y.unsqueeze(-2)]
        return self.cost.lambda_x * squares + self.cost.lambda_y * labels

    def points(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both clouds with their class, numbered through both datasets, as a last column."""
        return _tagged(self.source, 0, dtype), _tagged(self.target, self._shift, dtype)

    @property
    def _shift(self) -> int:
        return self.source.class_total


def geomloss_divergence(
    problem: Problem, epsilon: float, *, scaling: float, dtype: torch.dtype = torch.float64
) -> float:
    """S_epsilon by geomloss's tensorized Sinkhorn, whose blur is sqrt(epsilon) at p = 2."""
    from geomloss import SamplesLoss

    x, y = problem.points(dtype)
    loss = SamplesLoss(
        "sinkhorn",
        p=2,
        blur=math.sqrt(epsilon),
        scaling=scaling,
        diameter=math.sqrt(float(problem.matrix().max())),
        cost=problem.dense,
        backend="tensorized",
    )
    a, b = problem.source.masses.to(dtype), problem.target.masses.to(dtype)
    return float(loss(a, x, b, y))


def pot_sinkhorn_log(
    problem: Problem,
    epsilon: float,
    *,
    tolerance: float = 1e-12,
    max_iterations: int = 100_000,
) -> tuple[float, Tensor, Tensor]:
    """OT_epsilon and potentials by POT's log-domain Sinkhorn in float64.

    POT regularises with sum P log P, whose minimiser is the same plan
    exp(log_u + log_v - C / epsilon); with log_u = f / epsilon + log a this is our form.

    Returns:
        The value with KL(P | a b^T), f (n,) and g (m,).
    """
    from ot.bregman import sinkhorn_log

    cost = problem.matrix()
    a, b = problem.source.masses, problem.target.masses
    plan, log = sinkhorn_log(
        a, b, cost, epsilon, numItermax=max_iterations, stopThr=tolerance, log=True, warn=True
    )
    f = epsilon * (log["log_u"] - a.log())
    g = epsilon * (log["log_v"] - b.log())
    divergence = torch.xlogy(plan, plan / (a[:, None] * b[None, :])).sum()
    return float((cost * plan).sum() + epsilon * divergence), f, g


def pot_emd2(problem: Problem) -> float:
    """The unregularised optimal value by POT's network simplex."""
    import ot

    a, b = problem.source.masses, problem.target.masses
    value: Any = ot.emd2(a, b, problem.matrix(), numItermax=10_000_000)
    return float(value)


def _tagged(samples: LabeledSamples, shift: int, dtype: torch.dtype) -> Tensor:
    labels = torch.zeros(len(samples)) if samples.labels is None else samples.labels + shift
    return torch.cat((samples.features.to(dtype), labels.to(dtype).unsqueeze(1)), 1)
