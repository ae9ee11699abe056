"""What the potentials of one term prove: its value, an interval that holds it, its marginal error.

The lower bound is the `dual` value at any potentials, the upper bound the lesser of `primal` and
`oscillation`; both move outwards by what `perturbed_costs` allows for errors. For a cross term f is
first replaced by its row update f + epsilon log(a / r), in float64, whose plan has row sums a and
mass 1. A self term's plan is given mass 1 by a constant, and balanced on its diagonal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence import oscillation, primal
from otdd_flash.engine.evidence.dual import dual_value
from otdd_flash.engine.evidence.perturbed_costs import hidden_after_update, hidden_mass, outwards
from otdd_flash.operators.base import Operator
from otdd_flash.solver import plans

# By how many units in its last place a column potential is lowered, so that roundings of the
# softmins that it comes from rarely leave a column with too much mass. Only widths depend on it.
MARGIN = 4.0

# A scaling by less than this share of the missing mass, or so many units, is taken as it is.
MOST_SCALED, SCALED_UNITS = 0.25, 16.0


class Certificate(NamedTuple):
    """Potentials after the certifying pass, and what they prove.

    `hidden` is the part of `marginal_error` that rounding may hide, `passes` counts evaluations of
    `Operator.marginals`.
    """

    f: Tensor
    g: Tensor
    value: float
    bounds: tuple[float, float]
    marginal_error: float
    hidden: float
    passes: int


def certify(
    operator: Operator,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    updated: Tensor | None = None,
    *,
    polished: bool = False,
) -> Certificate:
    """One row update from g (m,), near f (n,), one column update, one pass for all sums.

    With `updated`, which is T'(f), of an f that is T(g) already, the last pass alone. Where the
    rounding of these updates shows, or if `polished`, they are done once more by exact sums, in two
    passes.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    if updated is None:
        f = operator.softmin_rows(g, epsilon, f)
        updated = operator.softmin_columns(f, epsilon, g)
    a, b, unit = operator.a, operator.b, torch.finfo(operator.dtype).eps / 2
    g = torch.where(b > 0, torch.minimum(g, updated), updated)
    g = (g - MARGIN * unit * g.abs()).double()
    plan = plans.evaluate(operator, f.double(), g, epsilon, accurate=polished)
    lost = plans.find_lost(plan, (a, b), epsilon)
    kappa, mass, hidden = torch.stack(
        (primal.fitting_scale(plan.sums, a, b), plan.sums.columns.sum(), lost.hidden)
    ).tolist()
    enough = 1 - kappa <= MOST_SCALED * (1 - mass) + SCALED_UNITS * unit
    if polished or hidden > 0 or not enough:
        # Both updates once more, by exact sums. Lost points, whose factors are 1, get potentials
        # so low that errors cannot make up for it.
        f = plan.f + epsilon * plans.row_factors(operator, plan, lost).log()
        f = plans.lowered(f, lost.rows, plan.row_errors, plan.sums.rows, a, epsilon)
        g = plans.lowered(plan.g, lost.columns, plan.column_errors, plan.sums.columns, b, epsilon)
        plan = plans.evaluate(operator, f, g, epsilon, accurate=polished)
        g = g - epsilon * plans.excess(plan.sums.columns, b)
        plan = plans.evaluate(operator, f, g, epsilon, accurate=polished)._replace(passes=3)
    return _proved(operator, plan, lost, epsilon)


def _proved(operator: Operator, plan: plans.Plan, lost: plans.Lost, epsilon: float) -> Certificate:
    """What the plan of a cross term proves, after a row update of all rows but the lost ones."""
    a, b, sums, g = operator.a, operator.b, plan.sums, plan.g
    factors = plans.row_factors(operator, plan, lost)
    f, rows = plan.f + epsilon * factors.log(), sums.rows * factors
    returned = f.to(operator.dtype), g.to(operator.dtype)
    of_rows = plans.errors_of_rows(operator, sums, f, rows, epsilon)
    row_errors = torch.where(lost.rows, 0, of_rows) + (f - returned[0]).abs()
    column_errors = torch.where(lost.columns, 0, plan.column_errors) + (g - returned[1]).abs()
    hidden = hidden_mass(rows, row_errors, epsilon) + lost.hidden
    kappa, total = primal.fitting_scale(sums, a, b), sums.rows.sum()
    scales = torch.ones_like(total), torch.where(total >= plans.SCALABLE * sums.lost, 1 / total, 1)
    gaps = [oscillation.updated_gap(sums.rows, sums.columns, factors, b, k) for k in scales]
    scaled = (plan.f + epsilon * kappa.log(), g), (kappa * sums.rows, kappa * sums.columns)
    held = _where_mass(f, a), _where_mass(g, b)
    cost_errors = _where_mass(sums.row_errors, a), _where_mass(sums.column_errors, b)
    numbers = (
        torch.minimum(*gaps),
        torch.where(factors == 1, (rows - a).abs(), 0).sum(),
        hidden + hidden_after_update(sums, factors, column_errors, epsilon),
        dual_value(a @ held[0] + b @ held[1], rows.sum(), epsilon),
        oscillation.swing(g, b > 0),
        oscillation.swing(f, a > 0),
        primal.filled_value(operator, *scaled, epsilon),
        a @ held[0].abs() + b @ held[1].abs(),
        a @ cost_errors[0] + b @ cost_errors[1],
        cost_errors[0].max() + cost_errors[1].max(),
    )
    # The host reads the device once.
    gap, row_gap, noise, dual, swing, row_swing, filled, size, mean_error, largest = (
        torch.stack(numbers).cpu().unbind()
    )
    relative, spread = sums.relative_error, oscillation.perturbed_spread(operator, sums, largest)
    upper = filled + primal.filled_slack(relative, size, spread, epsilon)
    if row_gap == 0:
        slack = oscillation.slack(relative, swing + row_swing, spread)
        upper = min(upper, oscillation.bound(dual, gap, swing, spread) + slack)
    bounds = outwards(operator, sums, (dual, upper), mean_error, size, epsilon)
    lost_to_rounding = float(noise) + 2 * relative
    error = float(max(gap, row_gap)) + lost_to_rounding
    return Certificate(*returned, float(dual), bounds, error, lost_to_rounding, plan.passes)


def certify_self(
    operator: Operator, f: Tensor, epsilon: float, *, accurate: bool = False
) -> Certificate:
    """The plan of one potential f (n,) between a cloud and itself: one pass.

    The plan is symmetric: it is the mean of the computed one and its transpose, whose costs are
    as near to C.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    a, plan = operator.a, plans.evaluate_self(operator, f.double(), epsilon, accurate=accurate)
    lost = plans.find_lost(plan, (a, a), epsilon)
    if bool(lost.hidden > 0):
        low = plans.lowered(plan.f, lost.rows, plan.row_errors, plan.sums.rows, a, epsilon)
        plan = plans.evaluate_self(operator, low, epsilon, accurate=accurate)._replace(passes=2)
    sums, f, rows = plan.sums, plan.f, plan.sums.rows
    returned, relative = f.to(operator.dtype), sums.relative_error
    errors = torch.where(lost.rows, 0, plan.row_errors) + (f - returned).abs()
    own_errors = 4 * (sums.row_errors + sums.cost_rounding * operator.own_costs().abs())
    diagonal = primal.diagonal_of(operator, f, own_errors, epsilon)
    outside = primal.RowSums(
        ((1 - relative) * rows - diagonal.highest).clamp_min(0),
        ((1 + relative) * rows - diagonal.lowest).clamp_min(0),
    )
    held, cost_errors = _where_mass(f, a), _where_mass(sums.row_errors, a)
    numbers = (
        (rows - a).abs().sum(),
        rows.sum(),
        2 * hidden_mass(rows, errors, epsilon) + lost.hidden,
        dual_value(2 * (a @ held), rows.sum(), epsilon),
        oscillation.swing(f, a > 0),
        primal.balanced_value(operator, f, outside, epsilon),
        2 * (a @ held.abs()),
        2 * (a @ cost_errors),
        2 * cost_errors.max(),
    )
    gap, mass, noise, dual, swing, upper, size, mean_error, largest = (
        torch.stack(numbers).cpu().unbind()
    )
    spread = oscillation.perturbed_spread(operator, sums, largest)
    if mass > 0.5:
        # Both marginals have mass 1.
        slack = oscillation.slack(relative, 2 * swing, spread)
        upper = min(upper, oscillation.self_bound(dual, gap, swing, spread) + slack)
    bounds = outwards(operator, sums, (dual, upper), mean_error, size, epsilon)
    hidden = float(noise) + 2 * relative
    error = float(gap) + hidden
    return Certificate(returned, returned, float(dual), bounds, error, hidden, plan.passes)


def _where_mass(values: Tensor, masses: Tensor) -> Tensor:
    """Values (n,) where there is mass, and 0 elsewhere."""
    return torch.where(masses > 0, values, 0)
