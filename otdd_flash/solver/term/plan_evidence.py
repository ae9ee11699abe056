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
from otdd_flash.engine.evidence.dual import dual_value
from otdd_flash.engine.evidence.perturbed_costs import hidden_after_update, hidden_mass
from otdd_flash.engine.evidence.primal import dot
from otdd_flash.operators.base import Certifiable, Epsilon, Marginals
from otdd_flash.solver.term import plans

# By how many units in its last place a column potential is lowered, so that roundings of the
# softmins that it comes from rarely leave a column with too much mass. Only widths depend on it.
MARGIN = 4.0


class PlanEvidence(NamedTuple):
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
    g = (g - MARGIN * unit * g.abs()).double()
    return plans.evaluate(operator, f.double(), g, epsilon, accurate=accurate)


def polished_plan(
    operator: Certifiable, plan: plans.Plan, lost: plans.Lost, epsilon: Epsilon, *, accurate: bool
) -> plans.Plan:
    """That of both updates once more, by exact sums.

    Lost points, whose factors are 1, get potentials so low that errors cannot make up for it.
    """
    a, b = operator.a, operator.b
    f = plan.f + epsilon * plans.row_factors(operator, plan, lost).log()
    f = plans.lowered(f, lost.rows, plan.row_errors, plan.sums.rows, a, epsilon)
    g = plans.lowered(plan.g, lost.columns, plan.column_errors, plan.sums.columns, b, epsilon)
    plan = plans.evaluate(operator, f, g, epsilon, accurate=accurate)
    g = g - epsilon * plans.excess(plan.sums.columns, b)
    return plans.evaluate(operator, f, g, epsilon, accurate=accurate)._replace(passes=3)


def cross_evidence(
    operator: Certifiable, plan: plans.Plan, lost: plans.Lost, epsilon: Epsilon
) -> PlanEvidence:
    """Of the plan of a cross term, after a row update of all rows but the lost ones."""
    a, b, sums, g = operator.a, operator.b, plan.sums, plan.g
    factors = plans.row_factors(operator, plan, lost)
    f, rows = plan.f + epsilon * factors.log(), sums.rows * factors
    returned = f.to(operator.dtype), g.to(operator.dtype)
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
    return PlanEvidence(*returned, torch.stack(numbers, -1), sums, plan.passes)


def self_evidence(
    operator: Certifiable, plan: plans.Plan, lost: plans.Lost, epsilon: Epsilon
) -> PlanEvidence:
    """Of the plan of one potential, of mass 1."""
    a, sums, f, rows = operator.a, plan.sums, plan.f, plan.sums.rows
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
    return PlanEvidence(returned, returned, torch.stack(numbers, -1), sums, plan.passes)


def _where_mass(values: Tensor, masses: Tensor) -> Tensor:
    """Values (n,) where there is mass, and 0 elsewhere."""
    return torch.where(masses > 0, values, 0)
