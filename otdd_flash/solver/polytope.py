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

# Keeps quotients and logarithms finite where there is no mass.
TINY = torch.finfo(torch.float64).tiny


def filled_value(
    operator: Operator,
    potentials: tuple[Tensor, Tensor],
    marginals: tuple[Tensor, Tensor],
    epsilon: float,
) -> Tensor:
    """Primal value of a plan whose marginals are too small, filled up with a product.

    This ends the rounding of Altschuler, Weed & Rigollet 2017, Near-linear time approximation
    algorithms for optimal transport via Sinkhorn iteration. With u = a - r and v = b - c missing
    and t their mass, the plan is P' + u v^T / t, a mixture of P' / (1 - t) and u v^T / t^2. By
    convexity its KL is at most

        sum P' log (P' / a b^T) - (1 - t) log(1 - t)
            + sum u log(u / a) + sum v log(v / b) - 2 t log t.

    Args:
        operator: the cost (n, m) and the masses.
        potentials: f' (n,) and g' (m,) of P'.
        marginals: its row sums r <= a (n,) and column sums c <= b (m,), float64.
        epsilon: regularisation, in units of the cost.

    Returns:
        A number, float64.
    """
    f, g = (potential.double() for potential in potentials)
    rows, columns = marginals
    # Both add up to one mass, but for rounding: only what both have is kept.
    kept = torch.minimum(rows.sum(), columns.sum())
    rows = rows * (kept / rows.sum().clamp_min(TINY))
    columns = columns * (kept / columns.sum().clamp_min(TINY))
    u, v = operator.a - rows, operator.b - columns
    missing = v.sum()
    filling = u @ operator.expected_costs(v / missing.clamp_min(TINY))
    entropy = _relative(u, operator.a) + _relative(v, operator.b)
    entropy = entropy - torch.xlogy(kept, kept) - 2 * torch.xlogy(missing, missing)
    return rows @ f + columns @ g + filling + epsilon * entropy


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
    ratios = torch.where(support, a / (rows - diagonal / 2).clamp_min(TINY), 1)
    scale = ratios.min().clamp_max(1)
    kept = scale * diagonal
    balanced = (kept + (a - scale * rows)).clamp_min(0)
    prices = costs + epsilon * (balanced.clamp_min(TINY).log() - weights)
    value = scale * (rows @ doubled) + epsilon * torch.xlogy(scale, scale)
    value = value + balanced @ prices - kept @ (doubled + epsilon * scale.log())
    change = torch.log(balanced.clamp_min(TINY) / kept.clamp_min(TINY))
    return value, a @ change.abs()


def _relative(part: Tensor, masses: Tensor) -> Tensor:
    """sum_i p_i log(p_i / a_i) of a part 0 <= p <= a."""
    return torch.xlogy(part, part / masses.clamp_min(TINY)).sum()
