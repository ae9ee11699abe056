"""Intervals for the values of many small problems, from any potentials, in float64.

    <a, f> + <b, g> - epsilon log sum P <= OT_epsilon <= <C, Q> + epsilon KL(Q | a b^T)

with P of f and g, and Q the plan with marginals a and b that P / sum P is rounded to (Altschuler,
Weed & Rigollet 2017, Near-linear time approximation algorithms for optimal transport via Sinkhorn
iteration): no row or column keeps more than its mass, and what is missing is filled with a product.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny
UNIT = torch.finfo(torch.float64).eps / 2


def bounds_of(costs: Tensor, a: Tensor, b: Tensor, f: Tensor, g: Tensor, epsilon: Tensor) -> Tensor:
    """Both bounds (B, 2), in units of the cost.

    Rounding: an exponent (f + g - C) / epsilon is off by 4 u of its terms, over epsilon, and so is
    each P_ij, relatively. Sums of n m terms by pairs, and by rows and columns, add n + m units at
    the most; logarithms of sums and of shares carry the same errors times epsilon. Marginals of Q
    are off by as many units of 1, each at most the price of a pair.

    Args:
        costs: C (B, n, m) float64, +inf for forbidden pairs.
        a: (B, n) float64, not negative; divided by its sum here.
        b: (B, m), likewise.
        f: (B, n) float64, in units of the cost.
        g: (B, m), likewise.
        epsilon: (B,) float64.
    """
    a, b = (masses / masses.sum(1, keepdim=True) for masses in (a, b))
    has_a, has_b = a > 0, b > 0
    f, g = torch.where(has_a, f, 0), torch.where(has_b, g, 0)
    eps = epsilon[:, None, None]
    product = a[:, :, None] * b[:, None]
    # By logarithms: where epsilon is small, rounded potentials make exponents of any size.
    logs = torch.where(
        product > 0, product.log() + (f[:, :, None] + g[:, None] - costs) / eps, -torch.inf
    )
    of_mass = logs.flatten(1).logsumexp(1)
    plan = (logs - of_mass[:, None, None]).exp()
    lower = (a * f).sum(1) + (b * g).sum(1) - epsilon * of_mass

    plan = plan * (a / plan.sum(2).clamp_min(TINY)).clamp_max(1)[:, :, None]
    plan = plan * (b / plan.sum(1).clamp_min(TINY)).clamp_max(1)[:, None]
    u, v = (a - plan.sum(2)).clamp_min(0), (b - plan.sum(1)).clamp_min(0)
    missing = torch.maximum(u.sum(1), v.sum(1)).clamp_min(TINY)
    plan = plan + u[:, :, None] * v[:, None] / missing[:, None, None]
    logs = torch.xlogy(plan, plan / product.clamp_min(TINY))
    upper = (torch.where(plan > 0, plan * costs, 0) + eps * logs).sum((1, 2))

    finite = torch.where(costs.isfinite(), costs, 0).abs().amax((1, 2))
    largest = torch.maximum(f.abs().amax(1) + g.abs().amax(1), finite)
    prices = largest + epsilon * (1 - product.clamp_min(TINY).log().amin((1, 2)))
    slack = 8 * UNIT * (sum(costs.shape[1:]) + 16) * prices
    return torch.stack((lower - slack, upper + slack), 1)
