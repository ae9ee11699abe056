"""Primal values: what plans with exactly the prescribed marginals cost, so upper bounds of OT.

    <C, Q> + epsilon KL(Q | a b^T) >= OT   for every Q >= 0 with row sums a and column sums b

The plan P of two potentials nearly has these marginals, and log (P_ij / a_i b_j) is its exponent:
P costs sum_ij P_ij (f_i + g_j), so that its row and column sums say all. What is missing is filled
with a matrix whose cost is known in closed form. No plan is ever formed. For a cross term g first
is at most T'(f), so that columns have at most the masses b, but for a few units in the last place.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.facts import Number
from otdd_flash.operators.base import Certifiable, Epsilon

# Keeps quotients finite where there is no mass.
TINY = torch.finfo(torch.float64).tiny


def dot(x: Tensor, y: Tensor) -> Tensor:
    """<x, y> (), over points."""
    product: Tensor = torch.linalg.vecdot(x, y)
    return product


class Filling(NamedTuple, Generic[Number]):
    """What a plan misses, and what a product of that costs, () each.

    Attributes:
        rows: the mass t that rows miss, the sum of u.
        columns: that of columns, of v; the same but for rounding.
        costs: <u, C v>.
        entropy: sum u log(u / a) + sum v log(v / b).
    """

    rows: Number
    columns: Number
    costs: Number
    entropy: Number


def filling_of(
    operator: Certifiable, masses: Tensor, absent: Tensor, sums: Tensor, scale: Tensor
) -> Filling[Tensor]:
    """Measure what a plan misses: its sums (n + m,), scaled, are at most the masses (n + m,).

    These are 0 where a point is `absent` (n + m,).
    """
    n = operator.a.shape[-1]
    missing = torch.addcmul(masses, sums, scale[..., None], value=-1)
    u, v = missing[..., :n], missing[..., n:].contiguous()
    # Over 1 in place of a mass of 0, of which nothing is missing.
    shares = missing / (masses + absent)
    return Filling(
        u.sum(-1),
        v.sum(-1),
        dot(u, operator.expected_costs(v)),
        torch.xlogy(missing, shares).sum(-1),
    )


def filled_value(filling: Filling[float], paid: float, kept: float, epsilon: float) -> float:
    """Primal value of the plan of f (n,), g (m,), which misses some mass, filled with a product.

    This ends the rounding of Altschuler, Weed & Rigollet 2017, Near-linear time approximation
    algorithms for optimal transport via Sinkhorn iteration. With sums r <= a and c <= b, of which
    u = a - r and v = b - c are missing and t is their mass, the plan is P + u v^T / t, a mixture of
    P / (1 - t) and u v^T / t^2. By convexity its KL is at most

        sum P log (P / a b^T) - (1 - t) log(1 - t)
            + sum u log(u / a) + sum v log(v / b) - 2 t log t.

    Args:
        filling: of u and v.
        paid: <r, f> + <c, g>.
        kept: 1 - t.
        epsilon: in units of the cost.
    """
    missing = max(filling.rows, filling.columns)
    entropy = filling.entropy - _x_log_x(kept) - 2 * _x_log_x(missing)
    costs = filling.costs / filling.columns if filling.columns > 0 else 0.0
    return paid + costs + epsilon * entropy


def fitting_scale(masses: Tensor, absent: Tensor, sums: Tensor, relative: float) -> Tensor:
    """Return kappa <= 1, (), such that no row or column of kappa P exceeds its mass.

    Of its sums (k,), each off by the share `relative` at the most, and 0 for `absent` points (k,).
    """
    fullest = (sums / (masses + absent)).amax(-1)
    return (fullest * (1 + relative)).clamp_min(1).reciprocal()


def filled_slack(relative: float, size: Number, spread: Number, epsilon: float) -> Number:
    """What to add to `filled_value`, (), if every sum is off by this share.

    What P pays changes by that share of <a, |f|> + <b, |g|>, in `size`; filling by at most that
    share of costs, which differ by `spread`, and logarithms by no more than those of the share.
    """
    return relative * (size + 4 * spread + 2 * epsilon * (1 - math.log(relative)))


class RowSums(NamedTuple):
    """Row sums (n,) of a symmetric plan without its diagonal, float64: an interval for each."""

    lowest: Tensor
    highest: Tensor


def diagonal_of(a: Tensor, f: Tensor, costs: Tensor, epsilon: Epsilon) -> Tensor:
    """Return log P_ii (n,) of the plan of f (n,) and f, for costs C_ii (n,); -inf without mass.

    The potential f is finite there, too.
    """
    return 2 * a.log() - torch.sub(costs, f, alpha=2) / epsilon


def sums_without(diagonal: Tensor, rows: Tensor, relative: float, spread: Tensor) -> RowSums:
    """Take log P_ii, off by `spread` (n,), from row sums r (n,), each off by a share `relative`."""
    low, high = (diagonal - spread).exp(), (diagonal + spread).exp()
    return RowSums(
        ((1 - relative) * rows - high).clamp_min_(0), ((1 + relative) * rows - low).clamp_min_(0)
    )


def balancing(a: Tensor, absent: Tensor, diagonal: Tensor, sums: RowSums) -> Tensor:
    """What it takes to balance a symmetric plan on its diagonal, (), in units of epsilon; no pass.

    A symmetric plan P whose row sums without the diagonal are z, in `sums`, gets the marginals a if
    its diagonal becomes a - z, where that is not negative. In general kappa P off the diagonal
    leaves at least half of P_ii on it if

        kappa = min(1, min_i (a_i - P_ii / 2) / z_i),    P_ii = a_i^2 exp((2 f_i - C_ii) / epsilon),

    or of a_i, where P_ii is more. As C_ii = 2 f_i - epsilon log(P_ii / a_i^2), the value is

        sum_i kappa z_i (2 f_i + epsilon log kappa) + Q_ii (C_ii + epsilon log(Q_ii / a_i^2))
            = 2 <a, f> + epsilon sum_i kappa z_i log kappa + Q_ii log(Q_ii / P_ii),

    with Q_ii = a_i - kappa z_i: convex in every z_i, so the worst is at an end of its interval. It
    differs from the dual's only in the second order of a - r: what moves stays in place, at the
    price that P already pays there.

    Args:
        a: masses (n,).
        absent: (n,) bool, where they are 0.
        diagonal: log P_ii (n,).
        sums: z.
    """
    room = torch.sub(a, torch.minimum(diagonal.exp(), a), alpha=0.5)
    # Infinite where nothing is off the diagonal; above 0 over 0 where there is no mass.
    ratios = (room + absent) / sums.highest
    kappa = ratios.amin(-1, keepdim=True).clamp_max(1)
    kept = kappa * torch.stack(sums)
    own = (a - kept).clamp_min_(0)
    ends = torch.xlogy(own, own).addcmul_(own, diagonal, value=-1).addcmul_(kept, kappa.log())
    return ends.amax(0).masked_fill_(absent, 0).sum(-1)


def _x_log_x(x: float) -> float:
    """Return x log x of a mass; 0 where there is none."""
    return x * math.log(x) if x > 0 else 0.0
