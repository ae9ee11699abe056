"""What potentials of a cross term prove, by the bounds of `certificate`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otdd_flash.operators.base import Marginals, Operator
from otdd_flash.solver.certificate import (
    Certificate,
    hidden_mass,
    oscillation,
    outwards,
    slack_of,
    spread_of,
    where_mass,
)
from otdd_flash.solver.evaluated_plan import (
    SCALABLE,
    Lost,
    Plan,
    errors_of_rows,
    evaluate,
    excess,
    find_lost,
    lowered,
    reached,
)
from otdd_flash.solver.polytope import filled_value

# By how many units in its last place a column potential is lowered, so that roundings of the
# softmins that it comes from rarely leave a column with too much mass. Only widths depend on it.
MARGIN = 4.0

# A scaling by less than this share of the missing mass, or so many units, is taken as it is.
MOST_SCALED, SCALED_UNITS = 0.25, 16.0


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
    plan = evaluate(operator, f.double(), g, epsilon, accurate=polished)
    lost = find_lost(plan, (a, b), epsilon)
    kappa, mass, any_lost = torch.stack(
        (_scaling(operator, plan.sums), plan.sums.columns.sum(), lost.any)
    ).tolist()
    enough = 1 - kappa <= MOST_SCALED * (1 - mass) + SCALED_UNITS * unit
    if polished or any_lost or not enough:
        # Both updates once more, by exact sums; points of which errors may hide all get less than
        # these could make up for.
        # Factors of lost points are 1.
        f = plan.f + epsilon * _factors(operator, plan, lost).log()
        f = lowered(f, lost.rows, plan.row_errors, plan.sums.rows, a, epsilon)
        g = lowered(plan.g, lost.columns, plan.column_errors, plan.sums.columns, b, epsilon)
        plan = evaluate(operator, f, g, epsilon, accurate=polished)
        g = g - epsilon * excess(plan.sums.columns, b)
        plan = evaluate(operator, f, g, epsilon, accurate=polished)._replace(passes=3)
    return _proved(operator, plan, lost, epsilon)


def _proved(operator: Operator, plan: Plan, lost: Lost, epsilon: float) -> Certificate:
    """What the plan of a cross term proves, after a row update of all rows but the lost ones."""
    a, b, sums, g = operator.a, operator.b, plan.sums, plan.g
    factors = _factors(operator, plan, lost)
    f, rows = plan.f + epsilon * factors.log(), sums.rows * factors
    returned = f.to(operator.dtype), g.to(operator.dtype)
    of_rows = errors_of_rows(operator, sums, f, rows, epsilon)
    row_errors, column_errors = (
        torch.where(without, 0, errors) + (exact - rounded.double()).abs()
        for without, errors, exact, rounded in (
            (lost.rows, of_rows, f, returned[0]),
            (lost.columns, plan.column_errors, g, returned[1]),
        )
    )
    noise = hidden_mass(rows, row_errors, epsilon) + lost.hidden
    noise = noise + _hidden_after(sums, factors, column_errors, epsilon)
    kappa = _scaling(operator, sums)
    scaled = plan.f + epsilon * kappa.log(), g
    held = where_mass(f, a), where_mass(g, b)
    cost_errors = where_mass(sums.row_errors, a), where_mass(sums.column_errors, b)
    gap, row_gap, noise, dual, swing, row_swing, primal, size, mean_error, largest = torch.stack(
        (
            _column_gap(sums, factors, b),
            torch.where(factors == 1, (rows - a).abs(), 0).sum(),
            noise,
            a @ held[0] + b @ held[1] + epsilon * (1 - rows.sum()),
            oscillation(g, b > 0),
            oscillation(f, a > 0),
            filled_value(
                operator,
                scaled,
                (kappa * sums.rows, kappa * sums.columns),
                epsilon,
            ),
            a @ held[0].abs() + b @ held[1].abs(),
            a @ cost_errors[0] + b @ cost_errors[1],
            cost_errors[0].max() + cost_errors[1].max(),
        )
    ).tolist()
    relative, spread = sums.relative_error, spread_of(operator, sums, largest)
    upper = primal + relative * (size + 4 * spread + 2 * epsilon * (1 - math.log(relative)))
    if row_gap == 0:
        slack = slack_of(relative, swing + row_swing, spread)
        upper = min(upper, dual + gap * (swing + spread) / 2 + slack)
    bounds = outwards(operator, sums, (dual, upper), mean_error, size, epsilon)
    hidden = noise + 2 * relative
    error = max(gap, row_gap) + hidden
    return Certificate(*returned, dual, bounds, error, hidden, plan.passes)


def _factors(operator: Operator, plan: Plan, lost: Lost) -> Tensor:
    """Of the row update, a / r (n,), and 1 for rows that are lost or not reached by the plan."""
    scaled = reached(plan.sums, operator) & ~lost.rows
    return torch.where(scaled, operator.a / plan.sums.rows, 1)


def _scaling(operator: Operator, sums: Marginals) -> Tensor:
    """Kappa <= 1, by which no row and column of a plan has more than its mass."""
    ratios = [
        torch.where(part > 0, masses / part, torch.inf).min()
        for part, masses in ((sums.rows, operator.a), (sums.columns, operator.b))
    ]
    return (torch.minimum(ratios[0], ratios[1]) / (1 + sums.relative_error)).clamp_max(1)


def _column_gap(sums: Marginals, factors: Tensor, b: Tensor) -> Tensor:
    """L1 error of the columns after the row update by `factors` (n,)."""
    total = sums.rows.sum()
    gaps = [
        (sums.rows * (factors - k).abs()).sum() + (k * sums.columns - b).abs().sum()
        for k in (torch.ones_like(total), torch.where(total >= SCALABLE * sums.lost, 1 / total, 1))
    ]
    return torch.minimum(gaps[0], gaps[1])


def _hidden_after(sums: Marginals, factors: Tensor, errors: Tensor, epsilon: float) -> Tensor:
    """The same of the columns, after the row update by `factors`: none grows by more than one."""
    before = hidden_mass(sums.columns, errors, epsilon)
    moved = (sums.rows * (factors - 1).abs()).sum()
    most = torch.where(sums.columns > 0, torch.expm1(2 * errors / epsilon), 0).max() / 2
    return torch.minimum(before * factors.max(), before + moved * most)
