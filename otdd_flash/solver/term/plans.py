"""A plan whose entries were evaluated once, and the points of which errors may hide all."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence.primal import dot
from otdd_flash.operators.base import Certifiable, CostFacts, Epsilon, Marginals
from otdd_flash.solver.term.epsilon import EpsilonOutOfRange, or_double

# A sum that is scaled up has so many times what is lost of it at the most, which then is nothing.
SCALABLE = 2.0**64


class Plan(NamedTuple):
    """Potentials f (n,) and g (m,), float64, their plan's sums, A and B of `perturbed_costs`."""

    f: Tensor
    g: Tensor
    sums: Marginals
    row_errors: Tensor
    column_errors: Tensor
    passes: int = 1


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
    row_errors = errors_of_rows(operator, sums, f, sums.rows, epsilon)
    return Plan(f, g, sums, row_errors, _errors_of_columns(operator, sums, g, epsilon))


def evaluate_self(operator: Certifiable, f: Tensor, epsilon: Epsilon, *, accurate: bool) -> Plan:
    """The plan of f (n,) and f, made symmetric, and given mass 1 by a constant.

    It keeps its mass if that is so small that all of it may be lost.
    """
    plan = evaluate(operator, f, f, epsilon, accurate=accurate)
    sums = plan.sums
    rows = (sums.rows + sums.columns) / 2
    total = rows.sum(-1, keepdim=True)
    total = torch.where(total >= SCALABLE * sums.lost, total, 1)
    f, rows = f - epsilon / 2 * total.log(), rows / total
    of_rows = errors_of_rows(operator, sums, f, rows, epsilon)
    of_columns = _errors_of_columns(operator, sums, f, epsilon)
    largest = torch.maximum(sums.row_errors, sums.column_errors)
    sums = sums._replace(rows=rows, columns=rows, row_errors=largest, column_errors=largest)
    errors = torch.maximum(of_rows, of_columns)
    return Plan(f, f, sums, errors, errors)


def errors_of_rows(
    operator: Certifiable, sums: Marginals, f: Tensor, rows: Tensor, epsilon: Epsilon
) -> Tensor:
    """A (n,) of a plan with row sums `rows` (n,), whose entries are those of f (n,).

    A cost is f_i + g_j less epsilon times the exponent e. As P_ij <= r_i, e <= log(r_i / a_i) -
    log b_j; where it is negative, |e| exp(e) < 1.
    """
    if not sums.cost_rounding:
        return sums.row_errors
    above = torch.where(operator.a > 0, (rows / operator.a).log(), 0).clamp_min(0) + 1
    return sums.row_errors + sums.cost_rounding * (f.abs() + epsilon * above)


def _errors_of_columns(
    operator: Certifiable, sums: Marginals, g: Tensor, epsilon: Epsilon
) -> Tensor:
    """B (m,) likewise."""
    if not sums.cost_rounding:
        return sums.column_errors
    below = torch.where(operator.b > 0, -operator.b.log(), 0)
    return sums.column_errors + sums.cost_rounding * (g.abs() + epsilon * below)


class Lost(NamedTuple):
    """Rows (n,) bool and columns (m,) bool with mass of which errors of costs may hide all.

    Their masses `hidden` () are what rounding loses, and more than errors may make up for.
    """

    rows: Tensor
    columns: Tensor
    hidden: Tensor


def find_lost(plan: Plan, masses: tuple[Tensor, Tensor], epsilon: Epsilon) -> Lost:
    """The points with mass and 2 A_i > epsilon."""
    rows = (masses[0] > 0) & (plan.row_errors > epsilon / 2)
    columns = (masses[1] > 0) & (plan.column_errors > epsilon / 2)
    hidden = dot(masses[0], rows.double()) + dot(masses[1], columns.double())
    return Lost(rows, columns, hidden)


def row_factors(operator: Certifiable, plan: Plan, lost: Lost) -> Tensor:
    """Of the row update, a / r (n,), and 1 for lost rows and those of whose sum all may be lost."""
    a, rows = operator.a, plan.sums.rows
    scaled = (a > 0) & (rows >= SCALABLE * plan.sums.lost * a) & ~lost.rows
    return torch.where(scaled, a / rows, 1)


def lowered(
    potential: Tensor, lost: Tensor, errors: Tensor, part: Tensor, masses: Tensor, epsilon: Epsilon
) -> Tensor:
    """A potential (n,) with which lost points have at most a_i exp(-2 A_i / epsilon)."""
    drop = 4 * errors + epsilon * excess(part, masses)
    return torch.where(lost, potential - drop, potential)


def excess(part: Tensor, masses: Tensor) -> Tensor:
    """log(r_i / a_i) where it is positive, else 0."""
    return torch.where(part > masses, (part / masses).log(), 0)
