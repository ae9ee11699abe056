"""What the potentials of one term are evidence for, computed where they are and read by nobody yet.

For a cross term f is first replaced by its row update f + epsilon log(a / r), in float64, whose
plan has row sums a and mass 1. A self term's plan is given mass 1 by a constant. Of B terms side by
side everything has a leading dimension B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence import oscillation, primal
from otdd_flash.engine.evidence.perturbed_costs import growth as growth_of
from otdd_flash.engine.evidence.primal import dot
from otdd_flash.operators.base import Certifiable, Epsilon, Marginals
from otdd_flash.solver.term import plans
from otdd_flash.solver.term.plan_numbers import CrossNumbers, SelfNumbers

# By how many units in its last place a column potential is lowered, so that roundings of the
# softmins that it comes from rarely leave a column with too much mass. Only widths depend on it.
MARGIN = 4.0


class PlanEvidence(NamedTuple):
    """What was computed of a plan where it is; the host has not asked for it yet.

    Attributes:
        f: (n,) potential of rows, in the operator's type.
        g: (m,) potential of columns, likewise.
        numbers: float64, `CrossNumbers` or `SelfNumbers`.
        sums: of the plan; of terms side by side only their number and what errors they have.
        passes: evaluations of `Operator.marginals`.
    """

    f: Tensor
    g: Tensor
    numbers: Tensor
    sums: Marginals
    passes: int

    def every_other(self, first: int) -> PlanEvidence:
        """Of terms side by side, those of two kinds in turn, the first or the second kind."""
        part = slice(first, None, 2)
        return self._replace(f=self.f[part], g=self.g[part], numbers=self.numbers[part])


def lowered_plan(
    operator: Certifiable,
    f: Tensor,
    g: Tensor,
    updated: Tensor,
    epsilon: Epsilon,
    *,
    accurate: bool = False,
) -> plans.Plan:
    """The plan of f (n,) and the lesser of g (m,) and its update, which leaves no column too much.

    Points without mass take the update. It asks the device nothing.
    """
    unit = torch.finfo(operator.dtype).eps / 2
    g = torch.where(operator.b > 0, torch.minimum(g, updated), updated)
    g = torch.sub(g, g.abs(), alpha=MARGIN * unit).double()
    return plans.evaluate(operator, f.double(), g, epsilon, accurate=accurate)


def polished_plan(
    operator: Certifiable, plan: plans.Plan, lost: plans.Lost, epsilon: Epsilon, *, accurate: bool
) -> plans.Plan:
    """Evaluate the plan after both updates once more, by exact sums.

    Lost points, whose factors are 1, get potentials so low that errors cannot make up for it.
    """
    b, (rows, columns) = operator.b, plan.sides
    f = plan.f + epsilon * plans.row_update(operator, plan, lost).factors.log()
    f = plans.lowered(f, plan, rows, lost, plan.sums.rows, epsilon)
    g = plans.lowered(plan.g, plan, columns, lost, plan.sums.columns, epsilon)
    plan = plans.evaluate(operator, f, g, epsilon, accurate=accurate)
    g = g - epsilon * plans.excess(plan.sums.columns, b)
    return plans.evaluate(operator, f, g, epsilon, accurate=accurate)._replace(passes=3)


def cross_evidence(
    operator: Certifiable, plan: plans.Plan, lost: plans.Lost, epsilon: Epsilon
) -> PlanEvidence:
    """Bound a cross term by its plan after a row update of all rows but the lost ones."""
    sums, points, (rows, columns) = plan.sums, (plan.masses, plan.absent), plan.sides
    factors, updated_rows = plans.row_update(operator, plan, lost)
    shift = epsilon * factors.log()
    f, g = plan.f + shift, plan.g
    returned = f.to(operator.dtype), g.to(operator.dtype)
    both = torch.cat((sums.rows, sums.columns), -1)
    held = torch.cat((plan.f, g), -1).masked_fill_(plan.absent, 0)
    paid_before = dot(both, held)
    held[..., rows].add_(shift)
    errors = plans.errors_of(operator, plan, f, updated_rows, epsilon)
    growth = _growth(both, errors, lost, held - torch.cat(returned, -1), epsilon)
    kappa, total = primal.fitting_scale(*points, both, sums.relative_error), sums.rows.sum(-1)
    # A sum of which all may be lost is not scaled up.
    total_scaled = total.clamp_min(max(plans.SCALABLE * sums.lost, primal.TINY))
    updated = torch.cat((updated_rows, operator.b), -1)
    filling = primal.filling_of(operator, *points, both, kappa)
    row_swing, column_swing = oscillation.swings(held, plan.absent, rows, columns)
    numbers = CrossNumbers(
        kappa=kappa,
        mass=sums.columns.sum(-1),
        lost=lost.hidden,
        total=total,
        moved=oscillation.distance(sums.rows, updated_rows),
        missed=oscillation.distance(sums.columns, operator.b),
        scaled_gap=oscillation.updated_gap(both, updated, total_scaled),
        row_gap=oscillation.distance(updated_rows, operator.a),
        factor=factors.amax(-1),
        row_growth=dot(updated_rows, growth[..., rows]),
        column_growth=dot(sums.columns, growth[..., columns]),
        largest_growth=growth[..., columns].amax(-1),
        paid=dot(plan.masses, held),
        updated=updated_rows.sum(-1),
        size=dot(plan.masses, held.abs()),
        paid_before=paid_before,
        missing_rows=filling.rows,
        missing_columns=filling.columns,
        filling_costs=filling.costs,
        filling_entropy=filling.entropy,
        row_swing=row_swing,
        column_swing=column_swing,
        mean_error=dot(plan.masses, plan.cost_errors),
        row_error=plan.cost_errors[..., rows].amax(-1),
        column_error=plan.cost_errors[..., columns].amax(-1),
    )
    return PlanEvidence(*returned, torch.stack(numbers, -1), sums, plan.passes)


def self_evidence(
    operator: Certifiable, plan: plans.Plan, lost: plans.Lost, epsilon: Epsilon
) -> PlanEvidence:
    """Bound a self term by the plan of one potential, of mass 1."""
    a, sums, rows = operator.a, plan.sums, plan.sums.rows
    returned, held = plan.f.to(operator.dtype), plan.f.masked_fill(plan.absent, 0)
    growth = _growth(rows, plan.errors, lost, held - returned, epsilon)
    costs, errors = operator.own_costs(), plan.cost_errors
    if sums.cost_rounding:
        errors = (errors + sums.cost_rounding * costs.abs()).masked_fill_(plan.absent, 0)
    diagonal = primal.diagonal_of(a, held, costs, epsilon)
    spread = errors / (epsilon / 4)
    (swing,) = oscillation.swings(held, plan.absent, *plan.sides)
    outside = primal.sums_without(diagonal, rows, sums.relative_error, spread)
    numbers = SelfNumbers(
        gap=oscillation.distance(rows, a),
        mass=rows.sum(-1),
        lost=lost.hidden,
        growth=dot(rows, growth),
        paid=dot(a, held),
        size=dot(a, held.abs()),
        swing=swing,
        balancing=primal.balancing(a, plan.absent, diagonal, outside),
        mean_error=dot(a, plan.cost_errors),
        largest_error=plan.cost_errors.amax(-1),
    )
    return PlanEvidence(returned, returned, torch.stack(numbers, -1), sums, plan.passes)


def _growth(
    sums: Tensor, errors: Tensor, lost: plans.Lost, rounding: Tensor, epsilon: Epsilon
) -> Tensor:
    """`growth` (k,) with the errors that potentials were rounded by; lost points are apart."""
    return growth_of(sums, errors.masked_fill(lost.points, 0) + rounding.abs(), epsilon)
