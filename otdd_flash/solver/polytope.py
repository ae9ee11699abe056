"""Primal values: what plans with exactly the prescribed marginals cost, so upper bounds of OT.

    <C, Q> + epsilon KL(Q | a b^T) >= OT   for every Q >= 0 with row sums a and column sums b

The plan P of two potentials nearly has these marginals, and log (P_ij / a_i b_j) is its exponent:
what of it is kept, P' = diag(s) P diag(t), costs sum_ij P'_ij (f'_i + g'_j), with the potentials
f' = f + epsilon log s and g' = g + epsilon log t, so that its row and column sums say all. What is
missing is filled with a matrix whose cost is known in closed form. No plan is ever formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator

_TINY = torch.finfo(torch.float64).tiny


def column_marginal(masses: Tensor, g: Tensor, softmin: Tensor, epsilon: float) -> Tensor:
    """Column sums b_j exp((g_j - T(f)_j) / epsilon) of the plan of (f, g), given T(f), float64.

    The half-step that would update g thus yields the marginal of the plan before it, for free.
    """
    exponent = (g.double() - softmin.double()) / epsilon
    return masses * torch.where(masses > 0, exponent, 0).exp()


def rounded_value(
    operator: Operator, f: Tensor, g: Tensor, updated: Tensor, epsilon: float
) -> Tensor:
    """Primal value of the plan of f (n,) and g (m,) rounded onto the transport polytope; one pass.

    After Altschuler, Weed & Rigollet 2017, Near-linear time approximation algorithms for optimal
    transport via Sinkhorn iteration. The plan has row sums a. Columns with too much are scaled down
    to b, which lowers g to g' = min(g, updated) and leaves the row sums a exp((f - T(g')) /
    epsilon). With u and v the mass that rows and columns now miss, the rest is u v^T / t, of mass
    t: all of <C, u v^T> comes from moments. KL is convex, and P' + u v^T / t is the mixture
    (1 - t) P' / (1 - t) + t u v^T / t^2, so that its KL is at most that of P', which the potentials
    know, and - (1 - t) log(1 - t) + sum u log(u / a) + sum v log(v / b) - 2 t log t.

    Args:
        operator: the cost (n, m) and the masses.
        f: (n,) the softmin of g.
        g: (m,).
        updated: (m,) the softmin of f.
        epsilon: regularisation, in units of the cost.

    Returns:
        A number, float64.
    """
    a, b = operator.a, operator.b
    lowered = torch.minimum(g, updated)
    columns = column_marginal(b, lowered, updated, epsilon)
    softmin = operator.softmin_rows(lowered, epsilon, f)
    rows = torch.minimum(column_marginal(a, f, softmin, epsilon), a)
    # Both sums are one mass, but for rounding; only what both have is kept.
    kept = torch.minimum(rows.sum(), columns.sum())
    rows = rows * (kept / rows.sum().clamp_min(_TINY))
    columns = columns * (kept / columns.sum().clamp_min(_TINY))
    short_rows, short_columns = a - rows, b - columns
    missing = short_columns.sum()
    filling = short_rows @ operator.expected_costs(short_columns / missing.clamp_min(_TINY))
    divergence = (
        _relative(short_rows, a)
        + _relative(short_columns, b)
        - 2 * torch.xlogy(missing, missing)
        - torch.xlogy(kept, kept)
    )
    return rows @ f.double() + columns @ lowered.double() + filling + epsilon * divergence


def balanced_value(
    operator: Operator, f: Tensor, rows: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Primal value of the plan of f (n,) and f, balanced on its diagonal; no pass.

    A symmetric plan P of mass 1 with row sums r gets the marginals a by P + diag(a - r), where that
    is not negative. In general kappa P + diag(a - kappa r) leaves at least half of kappa P_ii if

        kappa = min(1, min_i a_i / (r_i - P_ii / 2)),    P_ii = a_i^2 exp((2 f_i - C_ii) / epsilon).

    Its value differs from the dual's only in the second order of a - r: what moves stays in place,
    at the price that P already pays there.

    Args:
        operator: the symmetric cost (n, n) and the masses.
        f: (n,) potential, shifted so that its plan has mass 1.
        rows: (n,) row sums of the plan.
        epsilon: regularisation, in units of the cost.

    Returns:
        The value, float64, and sum_i a_i |log(Q_ii / kappa P_ii)|, by which an error of the
        diagonal and the row sums counts.
    """
    a, doubled = operator.a, 2 * f.double()
    support, costs = a > 0, operator.own_costs()
    # Of a_i^2, which weighs a diagonal entry; 0 stands for points without mass.
    weights = torch.where(support, 2 * a.log(), 0)
    diagonal = torch.where(support, (weights + (doubled - costs) / epsilon).exp(), 0)
    ratios = torch.where(support, a / (rows - diagonal / 2).clamp_min(_TINY), 1)
    scale = ratios.min().clamp_max(1)
    kept = scale * diagonal
    balanced = (kept + (a - scale * rows)).clamp_min(0)
    prices = costs + epsilon * (balanced.clamp_min(_TINY).log() - weights)
    value = scale * (rows @ doubled) + epsilon * torch.xlogy(scale, scale)
    value = value + balanced @ prices - kept @ (doubled + epsilon * scale.log())
    change = torch.log(balanced.clamp_min(_TINY) / kept.clamp_min(_TINY))
    return value, a @ change.abs()


def _relative(part: Tensor, masses: Tensor) -> Tensor:
    """sum_i p_i log(p_i / a_i) of a part 0 <= p <= a."""
    return torch.xlogy(part, part / masses.clamp_min(_TINY)).sum()
