"""Primal values: what plans with exactly the prescribed marginals cost, so upper bounds of OT.

    <C, Q> + epsilon KL(Q | a b^T) >= OT   for every Q >= 0 with row sums a and column sums b

The plan P of two potentials nearly has these marginals, and log (P_ij / a_i b_j) is its exponent:
P costs sum_ij P_ij (f_i + g_j), so that its row and column sums say all. What is missing is filled
with a matrix whose cost is known in closed form. No plan is ever formed. For a cross term g first
is at most T'(f), so that columns have at most the masses b, but for a few units in the last place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import Certifiable, Epsilon, Marginals, Number

# Keeps quotients and logarithms finite where there is no mass.
TINY = torch.finfo(torch.float64).tiny


def dot(x: Tensor, y: Tensor) -> Tensor:
    """<x, y> (), over points."""
    return (x * y).sum(-1)


def filled_value(
    operator: Certifiable,
    potentials: tuple[Tensor, Tensor],
    marginals: tuple[Tensor, Tensor],
    epsilon: Epsilon,
) -> Tensor:
    """Primal value () of the plan of f (n,), g (m,), which misses some mass, filled with a product.

    This ends the rounding of Altschuler, Weed & Rigollet 2017, Near-linear time approximation
    algorithms for optimal transport via Sinkhorn iteration. With `marginals` r <= a and c <= b, and
    u = a - r and v = b - c missing and t their mass, the plan is P + u v^T / t, a mixture of
    P / (1 - t) and u v^T / t^2. By convexity its KL is at most

        sum P log (P / a b^T) - (1 - t) log(1 - t)
            + sum u log(u / a) + sum v log(v / b) - 2 t log t.
    """
    f, g = (potential.double() for potential in potentials)
    rows, columns = marginals
    u, v = operator.a - rows, operator.b - columns
    # Both are the same number, but for rounding.
    missing = torch.maximum(u.sum(-1), v.sum(-1))
    kept = torch.minimum(rows.sum(-1), columns.sum(-1))
    shares = v / v.sum(-1, keepdim=True).clamp_min(TINY)
    filling = dot(u, operator.expected_costs(shares))
    entropy = _relative(u, operator.a) + _relative(v, operator.b)
    entropy = entropy - torch.xlogy(kept, kept) - 2 * torch.xlogy(missing, missing)
    return _paid(rows, f).sum(-1) + _paid(columns, g).sum(-1) + filling + epsilon * entropy


def fitting_scale(sums: Marginals, a: Tensor, b: Tensor) -> Tensor:
    """Kappa <= 1, (), by which no row and column of a plan has more than its mass."""
    ratios = [
        torch.where(part > 0, masses / part, torch.inf).amin(-1)
        for part, masses in ((sums.rows, a), (sums.columns, b))
    ]
    return (torch.minimum(ratios[0], ratios[1]) / (1 + sums.relative_error)).clamp_max(1)


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


def balanced_value(operator: Certifiable, f: Tensor, sums: RowSums, epsilon: Epsilon) -> Tensor:
    """Primal value () of the plan of f (n,) and f, balanced on its diagonal; no pass.

    A symmetric plan P whose row sums without the diagonal are z, in `sums`, gets the marginals a if
    its diagonal becomes a - z, where that is not negative. In general kappa P off the diagonal
    leaves at least half of P_ii on it if

        kappa = min(1, min_i (a_i - P_ii / 2) / z_i),    P_ii = a_i^2 exp((2 f_i - C_ii) / epsilon),

    or of a_i, where P_ii is more. The value is

        sum_i kappa z_i (2 f_i + epsilon log kappa) + Q_ii (C_ii + epsilon log(Q_ii / a_i^2)),

    with Q_ii = a_i - kappa z_i: convex in every z_i, so the worst is at an end of its interval. It
    differs from the dual's only in the second order of a - r: what moves stays in place, at the
    price that P already pays there.
    """
    a, costs, support = operator.a, operator.own_costs(), operator.a > 0
    weights = torch.where(support, 2 * a.log(), 0)
    diagonal = diagonal_of(operator, f, torch.zeros_like(f), epsilon).lowest
    room = a - torch.minimum(diagonal, a) / 2
    ratios = torch.where(sums.highest > 0, room / sums.highest.clamp_min(TINY), 1)
    kappa = ratios.amin(-1, keepdim=True).clamp_max(1)

    def value(moved: Tensor) -> Tensor:
        kept = kappa * moved
        own = (a - kept).clamp_min(0)
        prices = costs + epsilon * (own.clamp_min(TINY).log() - weights)
        return _paid(kept, 2 * f + epsilon * kappa.log()) + own * prices

    worst = torch.maximum(value(sums.lowest), value(sums.highest))
    return torch.where(support, worst, 0).sum(-1)


def diagonal_of(operator: Certifiable, f: Tensor, errors: Tensor, epsilon: Epsilon) -> RowSums:
    """The diagonal (n,) of the plan of f and f, whose costs are off by at most `errors`."""
    support = operator.a > 0
    logs = torch.where(support, 2 * operator.a.log(), 0) + (2 * f - operator.own_costs()) / epsilon
    spread = errors / epsilon
    low, high = ((logs + sign * spread).exp() for sign in (-1, 1))
    return RowSums(*(torch.where(support, end, 0) for end in (low, high)))


def _paid(sums: Tensor, potential: Tensor) -> Tensor:
    """What the mass of each point pays (n,); a potential does not count where there is none."""
    return torch.where(sums > 0, sums * potential, 0)


def _relative(part: Tensor, masses: Tensor) -> Tensor:
    """sum_i p_i log(p_i / a_i) of a part 0 <= p <= a."""
    return torch.xlogy(part, part / masses.clamp_min(TINY)).sum(-1)
