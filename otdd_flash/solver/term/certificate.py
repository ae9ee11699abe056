"""What the potentials of one term prove: its value, an interval that holds it, its marginal error.

The lower bound is the `dual` value at any potentials, the upper bound the lesser of `primal` and
`oscillation`; both move outwards by what `perturbed_costs` allows for errors. For a cross term f is
first replaced by its row update f + epsilon log(a / r), in float64, whose plan has row sums a and
mass 1. A self term's plan is given mass 1 by a constant, and balanced on its diagonal.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence import oscillation, primal
from otdd_flash.engine.evidence.perturbed_costs import outwards
from otdd_flash.operators.base import Certifiable, CostFacts, Marginals, Operator
from otdd_flash.solver.term import plans
from otdd_flash.solver.term.plan_evidence import (
    PlanEvidence,
    cross_evidence,
    lowered_plan,
    polished_plan,
    self_evidence,
)
from otdd_flash.solver.term.plan_numbers import CrossNumbers, SelfNumbers

# A scaling by less than this share of the missing mass, or so many units, is taken as it is.
MOST_SCALED, SCALED_UNITS = 0.25, 16.0


class Certificate(NamedTuple):
    """Potentials after the certifying pass, and what they prove.

    `marginal_error` is a bound of the larger of the L1 errors of rows and of columns, of which
    `hidden` is the part that rounding may hide. `passes` counts evaluations of
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
    scaled: float = 0.0,
) -> Certificate:
    """One row update from g (m,), near f (n,), one column update, one pass for all sums.

    With `updated`, which is T'(f), of an f that is T(g) already, the last pass alone. Where the
    rounding of these updates shows, or if `polished`, they are done once more by exact sums, in two
    passes. It does not show where the plan is scaled by no more than `scaled`.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    if updated is None:
        f = operator.softmin_rows(g, epsilon, f)
        updated = operator.softmin_columns(f, epsilon, g)
    plan = lowered_plan(operator, f, g, updated, epsilon, accurate=polished)
    lost = plans.find_lost(plan, epsilon)
    if not polished:
        evidence = cross_evidence(operator, plan, lost, epsilon)
        numbers = CrossNumbers(*evidence.numbers.tolist())
        if not shows_rounding(operator.costs, numbers, epsilon, scaled):
            return conclude(operator.costs, evidence, numbers, epsilon)
    plan = polished_plan(operator, plan, lost, epsilon, accurate=polished)
    evidence = cross_evidence(operator, plan, lost, epsilon)
    numbers = CrossNumbers(*evidence.numbers.tolist())
    return conclude(operator.costs, evidence, numbers, epsilon)


def hides_little(
    numbers: CrossNumbers | SelfNumbers,
    sums: Marginals,
    unit: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Read values, marginal errors and whether they hold from numbers (B,) of B terms.

    They do not where `certify` or `certify_self` would do more: rounding, of this unit in the
    potentials, shows, or the mass overflows.
    """
    if isinstance(numbers, CrossNumbers):
        fine = ~_shows_rounding(numbers.kappa, numbers.mass, numbers.lost, unit)
        gap = torch.maximum(numbers.gap, numbers.row_gap)
    else:
        fine, gap = numbers.lost == 0, numbers.gap
    error, value = gap + numbers.noise + 2 * sums.relative_error, numbers.dual(epsilon)
    return value, error, fine & numbers.mass.isfinite() & value.isfinite()


def shows_rounding(
    costs: CostFacts, numbers: CrossNumbers, epsilon: float, scaled: float = 0.0
) -> bool:
    """Whether the rounding of the updates shows, by the numbers of the plan.

    A scaling by up to `scaled` is taken as it is.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    plans.check_mass(costs, numbers.mass, epsilon)
    unit = torch.finfo(costs.dtype).eps / 2
    return bool(_shows_rounding(numbers.kappa + scaled, numbers.mass, numbers.lost, unit))


def _shows_rounding(kappa: Any, mass: Any, hidden: Any, unit: float) -> Any:
    return (hidden > 0) | (1 - kappa > MOST_SCALED * (1 - mass) + SCALED_UNITS * unit)


def conclude(
    costs: CostFacts, evidence: PlanEvidence, numbers: CrossNumbers, epsilon: float
) -> Certificate:
    """What the plan of a cross term proves, with what was read of `PlanEvidence.numbers`.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    dual, gap, kappa, size = numbers.dual(epsilon), numbers.gap, numbers.kappa, numbers.size
    plans.check_mass(costs, numbers.mass, epsilon)
    plans.check_mass(costs, dual, epsilon)
    sums, relative = evidence.sums, evidence.sums.relative_error
    spread = oscillation.perturbed_spread(costs, sums, numbers.row_error + numbers.column_error)
    paid = kappa * (numbers.paid_before + epsilon * math.log(kappa) * numbers.total)
    kept = kappa * min(numbers.total, numbers.mass)
    upper = primal.filled_value(numbers.filling, paid, kept, epsilon)
    upper += primal.filled_slack(relative, size, spread, epsilon)
    if numbers.row_gap == 0:
        slack = oscillation.slack(relative, numbers.row_swing + numbers.column_swing, spread)
        upper = min(upper, oscillation.bound(dual, gap, numbers.column_swing, spread) + slack)
    bounds = outwards(costs, sums, (dual, upper), numbers.mean_error, size, epsilon)
    if costs.forbidden:
        # Both upper bounds move mass between any two points.
        bounds = bounds[0], math.inf
    hidden = numbers.noise + 2 * relative
    error = max(gap, numbers.row_gap) + hidden
    return Certificate(evidence.f, evidence.g, dual, bounds, error, hidden, evidence.passes)


def certify_self(
    operator: Certifiable, f: Tensor, epsilon: float, *, accurate: bool = False
) -> Certificate:
    """The plan of one potential f (n,) between a cloud and itself: one pass.

    The plan is symmetric: it is the mean of the computed one and its transpose, whose costs are
    as near to C.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    plan = plans.evaluate_self(operator, f.double(), epsilon, accurate=accurate)
    lost = plans.find_lost(plan, epsilon)
    evidence = self_evidence(operator, plan, lost, epsilon)
    numbers = SelfNumbers(*evidence.numbers.tolist())
    if numbers.lost > 0:
        low = plans.lowered(plan.f, plan, plan.sides[0], lost, plan.sums.rows, epsilon)
        plan = plans.evaluate_self(operator, low, epsilon, accurate=accurate)._replace(passes=2)
        evidence = self_evidence(operator, plan, lost, epsilon)
        numbers = SelfNumbers(*evidence.numbers.tolist())
    return conclude_self(operator.costs, evidence, numbers, epsilon)


def conclude_self(
    costs: CostFacts, evidence: PlanEvidence, numbers: SelfNumbers, epsilon: float
) -> Certificate:
    """What the plan of one potential proves, likewise.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    dual, gap, swing = numbers.dual(epsilon), numbers.gap, numbers.swing
    plans.check_mass(costs, dual, epsilon)
    sums, relative = evidence.sums, evidence.sums.relative_error
    spread = oscillation.perturbed_spread(costs, sums, 2 * numbers.largest_error)
    # Of the plan that is balanced on its diagonal.
    upper = 2 * numbers.paid + epsilon * numbers.balancing
    if numbers.mass > 0.5:
        # Both marginals have mass 1.
        slack = oscillation.slack(relative, 2 * swing, spread)
        upper = min(upper, oscillation.self_bound(dual, gap, swing, spread) + slack)
    errors, size = 2 * numbers.mean_error, 2 * numbers.size
    bounds = outwards(costs, sums, (dual, upper), errors, size, epsilon)
    hidden = numbers.noise + 2 * relative
    error = gap + hidden
    return Certificate(evidence.f, evidence.g, dual, bounds, error, hidden, evidence.passes)
