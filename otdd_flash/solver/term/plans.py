"""A plan whose entries were evaluated once, and the points of which errors may hide all."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import Certifiable, CostFacts, Epsilon, Marginals
from otdd_flash.solver.term.epsilon import EpsilonOutOfRange, or_double

# A sum that is scaled up has so many times what is lost of it at the most, which then is nothing.
SCALABLE = 2.0**64


class Plan(NamedTuple):
    """A plan whose entries were evaluated once.

    What is known of its k points is in one vector (k,): rows and then columns, n + m of a cross
    term, and the n points of a self term.

    Attributes:
        f: (n,) potential of rows, float64.
        g: (m,) potential of columns, float64.
        sums: of the plan.
        masses: (k,).
        absent: (k,) bool, the points without mass.
        cost_errors: (k,) errors of costs as in `sums`, 0 where there is no mass.
        errors: (k,) A and B of `perturbed_costs`, likewise.
        passes: evaluations of `Operator.marginals`.
    """

    f: Tensor
    g: Tensor
    sums: Marginals
    masses: Tensor
    absent: Tensor
    cost_errors: Tensor
    errors: Tensor
    passes: int = 1

    @property
    def sides(self) -> list[slice]:
        """The places of rows, and of columns if they are others, among the points."""
        n, total = self.f.shape[-1], self.masses.shape[-1]
        return [slice(n), slice(n, total)][: 1 + (total > n)]


def check_mass(costs: CostFacts, mass: float, epsilon: float) -> None:
    """Refuse a plan with a mass, or a dual value, that is not finite.

    Raises:
        EpsilonOutOfRange: it overflows.
    """
    if not math.isfinite(mass):
        raise EpsilonOutOfRange(
            "some costs are too far above the mean at {given}: rounding alone makes the plan's "
            f"mass overflow; raise {{name}}{or_double(costs.dtype)} or leave out points that "
            "are far from all others",
            epsilon,
        )


def evaluate(
    operator: Certifiable, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool
) -> Plan:
    """Evaluate the plan of f (n,) and g (m,), float64."""
    sums = operator.marginals(f, g, epsilon, accurate=accurate)
    masses = torch.cat((operator.a, operator.b), -1)
    absent = masses == 0
    errors = torch.cat((sums.row_errors, sums.column_errors), -1).masked_fill_(absent, 0)
    plan = Plan(f, g, sums, masses, absent, errors, errors)
    return plan._replace(errors=errors_of(operator, plan, f, sums.rows, epsilon))


def evaluate_self(operator: Certifiable, f: Tensor, epsilon: Epsilon, *, accurate: bool) -> Plan:
    """The plan of f (n,) and f, made symmetric, and given mass 1 by a constant.

    It keeps its mass if that is so small that all of it may be lost.
    """
    sums = operator.marginals(f, f, epsilon, accurate=accurate)
    rows, row_errors, column_errors = sums.rows, sums.row_errors, sums.column_errors
    if sums.columns is not rows:
        rows = (rows + sums.columns) / 2
    total = rows.sum(-1, keepdim=True)
    total.masked_fill_(total < SCALABLE * sums.lost, 1)
    f, rows = f - epsilon / 2 * total.log(), rows / total
    largest, absent = _larger(row_errors, column_errors), operator.a == 0
    cost_errors = errors = largest.masked_fill(absent, 0)
    if sums.cost_rounding:
        x, y = (sums.cost_rounding * each for each in _sizes(operator, f, f, rows, epsilon))
        errors = torch.maximum(row_errors + x, column_errors + y).masked_fill_(absent, 0)
    sums = sums._replace(rows=rows, columns=rows, row_errors=largest, column_errors=largest)
    return Plan(f, f, sums, operator.a, absent, cost_errors, errors)


def _larger(one: Tensor, other: Tensor) -> Tensor:
    return one if one is other else torch.maximum(one, other)


def errors_of(
    operator: Certifiable, plan: Plan, f: Tensor, rows: Tensor, epsilon: Epsilon
) -> Tensor:
    """A and B (n + m,) of a plan with another f (n,) and row sums (n,)."""
    if not plan.sums.cost_rounding:
        return plan.cost_errors
    sizes = torch.cat(_sizes(operator, f, plan.g, rows, epsilon), -1)
    return plan.cost_errors + plan.sums.cost_rounding * sizes.masked_fill_(plan.absent, 0)


def _sizes(
    operator: Certifiable, f: Tensor, g: Tensor, rows: Tensor, epsilon: Epsilon
) -> tuple[Tensor, Tensor]:
    """Numbers (n,) and (m,) whose sums bound |C_ij| in a plan with these potentials and row sums.

    A cost is f_i + g_j less epsilon times the exponent e. As P_ij <= r_i, e <= log(r_i / a_i) -
    log b_j; where it is negative, |e| exp(e) < 1. Unspecified where there is no mass.
    """
    above = (rows / operator.a).log().clamp_min(0) + 1
    return f.abs() + epsilon * above, g.abs() - epsilon * operator.b.log()


class Lost(NamedTuple):
    """Points (k,) bool with mass of which errors of costs may hide all.

    Their masses `hidden` () are what rounding loses, and more than errors may make up for.
    """

    points: Tensor
    hidden: Tensor


def find_lost(plan: Plan, epsilon: Epsilon) -> Lost:
    """The points with mass and 2 A_i > epsilon."""
    points = plan.errors > epsilon / 2
    return Lost(points, (plan.masses * points).sum(-1))


class RowUpdate(NamedTuple):
    """What a row update scales the rows (n,) of a plan by, and what they sum to then."""

    factors: Tensor
    rows: Tensor


def row_update(operator: Certifiable, plan: Plan, lost: Lost) -> RowUpdate:
    """Scale rows by a / r, except lost ones and those of whose sum all may be lost."""
    a, rows = operator.a, plan.sums.rows
    kept = (rows <= SCALABLE * plan.sums.lost * a) | lost.points[..., plan.sides[0]]
    return RowUpdate((a / rows).masked_fill_(kept, 1), torch.where(kept, rows, a))


def lowered(
    potential: Tensor, plan: Plan, side: slice, lost: Lost, sums: Tensor, epsilon: Epsilon
) -> Tensor:
    """A potential (n,) of a side with which lost points have at most a_i exp(-2 A_i / epsilon).

    Now they have these sums (n,).
    """
    errors, masses, points = (each[..., side] for each in (plan.errors, plan.masses, lost.points))
    drop = 4 * errors + epsilon * excess(sums, masses)
    return torch.where(points, potential - drop, potential)


def excess(part: Tensor, masses: Tensor) -> Tensor:
    """log(r_i / a_i) where it is positive, else 0."""
    return torch.where(part > masses, (part / masses).log(), 0)
