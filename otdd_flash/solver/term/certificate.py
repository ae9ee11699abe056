"""What the potentials of one term prove: its value, an interval that holds it, its marginal error.

The lower bound is the `dual` value at any potentials, the upper bound the lesser of `primal` and
`oscillation`; both move outwards by what `perturbed_costs` allows for errors. For a cross term f is
first replaced by its row update f + epsilon log(a / r), in float64, whose plan has row sums a and
mass 1. A self term's plan is given mass 1 by a constant, and balanced on its diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence import oscillation, primal
from otdd_flash.engine.evidence.dual import dual_value
from otdd_flash.engine.evidence.perturbed_costs import hidden_after_update, hidden_mass, outwards
from otdd_flash.engine.evidence.primal import dot
from otdd_flash.operators.base import Certifiable, CostFacts, Epsilon, Marginals, Operator
from otdd_flash.solver.term import plans

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
    if not polished:
        seen = see_cross(operator, f, g, updated, epsilon)
        numbers = seen.numbers.tolist()
        if not shows_rounding(operator.costs, numbers, epsilon):
            return conclude(operator.costs, seen, numbers, epsilon)
    seen = see_cross(operator, f, g, updated, epsilon, polished=True, accurate=polished)
    return conclude(operator.costs, seen, seen.numbers.tolist(), epsilon)


def see_cross(
    operator: Certifiable,
    f: Tensor,
    g: Tensor,
    updated: Tensor,
    epsilon: Epsilon,
    *,
    polished: bool = False,
    accurate: bool = False,
) -> Seen:
    """What `certify` computes, which asks the device nothing; arguments as there."""
    plan = _lowered(operator, f, g, updated, epsilon, accurate=accurate)
    lost = plans.find_lost(plan, (operator.a, operator.b), epsilon)
    if polished:
        plan = _polished(operator, plan, lost, epsilon, accurate=accurate)
    return _seen(operator, plan, lost, epsilon)


def hides_little(
    numbers: Tensor, sums: Marginals, unit: float, *, cross: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of B terms, from their `Seen.numbers` (B, .): values, marginal errors, whether they hold.

    They do not where `certify` or `certify_self` would do more: rounding, of this unit in the
    potentials, shows, or the mass overflows.
    """
    if cross:
        kappa, mass, lost, gap, row_gap, noise, value = numbers[:, :7].unbind(1)
        fine = ~_shows_rounding(kappa, mass, lost, unit)
        gap = torch.maximum(gap, row_gap)
    else:
        gap, mass, noise, value = numbers[:, :4].unbind(1)
        fine = torch.ones_like(mass, dtype=torch.bool)
    error = gap + noise + 2 * sums.relative_error
    return value, error, fine & mass.isfinite() & value.isfinite()


def shows_rounding(costs: CostFacts, numbers: Sequence[float], epsilon: float) -> bool:
    """Whether the rounding of the updates shows in what a plan proves, from its `Seen.numbers`.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    kappa, mass, hidden = numbers[:3]
    plans.check_mass(costs, mass, epsilon)
    unit = torch.finfo(costs.dtype).eps / 2
    return bool(_shows_rounding(kappa, mass, hidden, unit))


def _shows_rounding(kappa: Any, mass: Any, hidden: Any, unit: float) -> Any:
    return (hidden > 0) | (1 - kappa > MOST_SCALED * (1 - mass) + SCALED_UNITS * unit)


def _lowered(
    operator: Certifiable,
    f: Tensor,
    g: Tensor,
    updated: Tensor,
    epsilon: Epsilon,
    *,
    accurate: bool,
) -> plans.Plan:
    """The plan of f (n,) and the lesser of g (m,) and its update, which leaves no column too much.

    Points without mass take the update.
    """
    unit = torch.finfo(operator.costs.dtype).eps / 2
    g = torch.where(operator.b > 0, torch.minimum(g, updated), updated)
    g = (g - MARGIN * unit * g.abs()).double()
    return plans.evaluate(operator, f.double(), g, epsilon, accurate=accurate)


def _polished(
    operator: Certifiable, plan: plans.Plan, lost: plans.Lost, epsilon: Epsilon, *, accurate: bool
) -> plans.Plan:
    """Both updates once more, by exact sums.

    Lost points, whose factors are 1, get potentials so low that errors cannot make up for it.
    """
    a, b = operator.a, operator.b
    f = plan.f + epsilon * plans.row_factors(operator, plan, lost).log()
    f = plans.lowered(f, lost.rows, plan.row_errors, plan.sums.rows, a, epsilon)
    g = plans.lowered(plan.g, lost.columns, plan.column_errors, plan.sums.columns, b, epsilon)
    plan = plans.evaluate(operator, f, g, epsilon, accurate=accurate)
    g = g - epsilon * plans.excess(plan.sums.columns, b)
    return plans.evaluate(operator, f, g, epsilon, accurate=accurate)._replace(passes=3)


class Seen(NamedTuple):
    """What was computed of a plan where it is; the host has not asked for it yet.

    Attributes:
        f: (n,) potential of rows, in the operator's type.
        g: (m,) potential of columns, likewise.
        numbers: float64, of which `conclude` or `conclude_self` makes a certificate.
        sums: of the plan.
        passes: evaluations of `Operator.marginals`.
    """

    f: Tensor
    g: Tensor
    numbers: Tensor
    sums: Marginals
    passes: int


def _seen(operator: Certifiable, plan: plans.Plan, lost: plans.Lost, epsilon: Epsilon) -> Seen:
    """Of the plan of a cross term, after a row update of all rows but the lost ones."""
    a, b, sums, g = operator.a, operator.b, plan.sums, plan.g
    factors = plans.row_factors(operator, plan, lost)
    f, rows = plan.f + epsilon * factors.log(), sums.rows * factors
    returned = f.to(operator.costs.dtype), g.to(operator.costs.dtype)
    of_rows = plans.errors_of_rows(operator, sums, f, rows, epsilon)
    row_errors = torch.where(lost.rows, 0, of_rows) + (f - returned[0]).abs()
    column_errors = torch.where(lost.columns, 0, plan.column_errors) + (g - returned[1]).abs()
    hidden = hidden_mass(rows, row_errors, epsilon) + lost.hidden
    kappa, total = primal.fitting_scale(sums, a, b), sums.rows.sum(-1)
    scales = torch.ones_like(total), torch.where(total >= plans.SCALABLE * sums.lost, 1 / total, 1)
    gaps = [oscillation.updated_gap(sums.rows, sums.columns, factors, b, k) for k in scales]
    scale = kappa[..., None]
    scaled = (plan.f + epsilon * scale.log(), g), (scale * sums.rows, scale * sums.columns)
    held = _where_mass(f, a), _where_mass(g, b)
    cost_errors = _where_mass(sums.row_errors, a), _where_mass(sums.column_errors, b)
    numbers = (
        kappa,
        sums.columns.sum(-1),
        lost.hidden,
        torch.minimum(*gaps),
        torch.where(factors == 1, (rows - a).abs(), 0).sum(-1),
        hidden + hidden_after_update(sums, factors, column_errors, epsilon),
        dual_value(dot(a, held[0]) + dot(b, held[1]), rows.sum(-1), epsilon),
        oscillation.swing(g, b > 0),
        oscillation.swing(f, a > 0),
        primal.filled_value(operator, *scaled, epsilon),
        dot(a, held[0].abs()) + dot(b, held[1].abs()),
        dot(a, cost_errors[0]) + dot(b, cost_errors[1]),
        cost_errors[0].amax(-1) + cost_errors[1].amax(-1),
    )
    return Seen(*returned, torch.stack(numbers, -1), sums, plan.passes)


def conclude(costs: CostFacts, seen: Seen, numbers: Sequence[float], epsilon: float) -> Certificate:
    """What the plan of a cross term proves, with what was read of `Seen.numbers`.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    gap, row_gap, noise, dual, swing, row_swing, filled, size, mean_error, largest = numbers[3:]
    plans.check_mass(costs, dual, epsilon)
    sums, relative = seen.sums, seen.sums.relative_error
    spread = oscillation.perturbed_spread(costs, sums, largest)
    upper = filled + primal.filled_slack(relative, size, spread, epsilon)
    if row_gap == 0:
        slack = oscillation.slack(relative, swing + row_swing, spread)
        upper = min(upper, oscillation.bound(dual, gap, swing, spread) + slack)
    bounds = outwards(costs, sums, (dual, upper), mean_error, size, epsilon)
    hidden = noise + 2 * relative
    error = max(gap, row_gap) + hidden
    return Certificate(seen.f, seen.g, dual, bounds, error, hidden, seen.passes)


def certify_self(
    operator: Certifiable, f: Tensor, epsilon: float, *, accurate: bool = False
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
    seen = see_self(operator, plan, lost, epsilon)
    return conclude_self(operator.costs, seen, seen.numbers.tolist(), epsilon)


def see_self(operator: Certifiable, plan: plans.Plan, lost: plans.Lost, epsilon: Epsilon) -> Seen:
    """Of the plan of one potential, of mass 1."""
    a, sums, f, rows = operator.a, plan.sums, plan.f, plan.sums.rows
    returned, relative = f.to(operator.costs.dtype), sums.relative_error
    errors = torch.where(lost.rows, 0, plan.row_errors) + (f - returned).abs()
    own_errors = 4 * (sums.row_errors + sums.cost_rounding * operator.own_costs().abs())
    diagonal = primal.diagonal_of(operator, f, own_errors, epsilon)
    outside = primal.RowSums(
        ((1 - relative) * rows - diagonal.highest).clamp_min(0),
        ((1 + relative) * rows - diagonal.lowest).clamp_min(0),
    )
    held, cost_errors = _where_mass(f, a), _where_mass(sums.row_errors, a)
    numbers = (
        (rows - a).abs().sum(-1),
        rows.sum(-1),
        2 * hidden_mass(rows, errors, epsilon) + lost.hidden,
        dual_value(2 * dot(a, held), rows.sum(-1), epsilon),
        oscillation.swing(f, a > 0),
        primal.balanced_value(operator, f, outside, epsilon),
        2 * dot(a, held.abs()),
        2 * dot(a, cost_errors),
        2 * cost_errors.amax(-1),
    )
    return Seen(returned, returned, torch.stack(numbers, -1), sums, plan.passes)


def conclude_self(
    costs: CostFacts, seen: Seen, numbers: Sequence[float], epsilon: float
) -> Certificate:
    """What the plan of one potential proves, likewise.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    gap, mass, noise, dual, swing, upper, size, mean_error, largest = numbers
    plans.check_mass(costs, dual, epsilon)
    sums, relative = seen.sums, seen.sums.relative_error
    spread = oscillation.perturbed_spread(costs, sums, largest)
    if mass > 0.5:
        # Both marginals have mass 1.
        slack = oscillation.slack(relative, 2 * swing, spread)
        upper = min(upper, oscillation.self_bound(dual, gap, swing, spread) + slack)
    bounds = outwards(costs, sums, (dual, upper), mean_error, size, epsilon)
    hidden = noise + 2 * relative
    error = gap + hidden
    return Certificate(seen.f, seen.g, dual, bounds, error, hidden, seen.passes)


def _where_mass(values: Tensor, masses: Tensor) -> Tensor:
    """Values (n,) where there is mass, and 0 elsewhere."""
    return torch.where(masses > 0, values, 0)
