"""What the potential of a self term proves, by the bounds of `certificate`."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.solver.certificate import (
    Certificate,
    hidden_mass,
    oscillation,
    outwards,
    slack_of,
    spread_of,
    where_mass,
)
from otdd_flash.solver.evaluated_plan import evaluate_self, find_lost, lowered
from otdd_flash.solver.polytope import RowSums, balanced_value, diagonal_of


def certify_self(
    operator: Operator, f: Tensor, epsilon: float, *, accurate: bool = False
) -> Certificate:
    """The plan of one potential f (n,) between a cloud and itself: one pass.

    The plan is symmetric: it is the mean of the computed one and its transpose, whose costs are
    as near to C.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    a, plan = operator.a, evaluate_self(operator, f.double(), epsilon, accurate=accurate)
    lost = find_lost(plan, (a, a), epsilon)
    if bool(lost.any):
        low = lowered(plan.f, lost.rows, plan.row_errors, plan.sums.rows, a, epsilon)
        plan = evaluate_self(operator, low, epsilon, accurate=accurate)._replace(passes=2)
    sums, f, rows = plan.sums, plan.f, plan.sums.rows
    returned, relative = f.to(operator.dtype), sums.relative_error
    errors = torch.where(lost.rows, 0, plan.row_errors) + (f - returned.double()).abs()
    own_errors = 4 * (sums.row_errors + sums.cost_rounding * operator.own_costs().abs())
    diagonal = diagonal_of(operator, f, own_errors, epsilon)
    outside = RowSums(
        ((1 - relative) * rows - diagonal.highest).clamp_min(0),
        ((1 + relative) * rows - diagonal.lowest).clamp_min(0),
    )
    held, cost_errors = where_mass(f, a), where_mass(sums.row_errors, a)
    gap, mass, noise, dual, swing, primal, size, mean_error, largest = torch.stack(
        (
            (rows - a).abs().sum(),
            rows.sum(),
            2 * hidden_mass(rows, errors, epsilon) + lost.hidden,
            2 * (a @ held) + epsilon * (1 - rows.sum()),
            oscillation(f, a > 0),
            balanced_value(operator, f, outside, epsilon),
            2 * (a @ held.abs()),
            2 * (a @ cost_errors),
            2 * cost_errors.max(),
        )
    ).tolist()
    spread = spread_of(operator, sums, largest)
    upper = primal
    if mass > 0.5:
        # Both marginals have mass 1.
        upper = min(upper, dual + gap * (swing + spread) + slack_of(relative, 2 * swing, spread))
    bounds = outwards(operator, sums, (dual, upper), mean_error, size, epsilon)
    hidden = noise + 2 * relative
    return Certificate(returned, returned, dual, bounds, gap + hidden, hidden, plan.passes)
