"""Value and two-sided bounds of a transport term from any potentials.

Cross term. After a row update the plan has row sums a and total mass 1. Let c be its column sums
and lower = <a, f> + <b, g>, a dual value. P is the optimal plan between a and c, whose value is
<a, f> + <c, g>; the optimal value is convex in the second mass, with the optimal g* as subgradient:

    OT <= <a, f> + <c, g> + <g*, b - c> = lower + <g* - g, b - c>
       <= lower + ||c - b||_1 (osc g* + osc g) / 2,        osc g* <= R,  R >= max C - min C.

Self term with one potential. Shift f so that the plan has mass 1; with row sums r = column sums,
lower = 2 <a, f> and both arguments move: OT <= lower + ||r - a||_1 (osc f + R).

Rounding. Potentials in floating point are still valid in the dual; what rounding spoils is the mass
that we believe their plan to have. An error delta of every computed exponent moves the value by at
most delta, and an exponent carries the error of its cost and of the potentials it was built from,
so both ends move outwards by

    SAFETY (cost_error + u (<a, |f|> + <b, |g|>) + 4 u epsilon),      u = unit roundoff.

It also hides a part of the marginal error, and a mass that seems transported may have a long way to
go: the upper bounds take the measured distances ||c - b||_1 and ||r - a||_1 plus `rounding_floor`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.solver.polytope import balanced_value, column_marginal, rounded_value

SAFETY = 2.0


class Certificate(NamedTuple):
    """Potentials after the certifying pass, and what they prove."""

    f: Tensor
    g: Tensor
    value: float
    bounds: tuple[float, float]
    marginal_error: float


def certify(operator: Operator, f: Tensor, g: Tensor, epsilon: float) -> Certificate:
    """One row update from g (m,), near f (n,), one column marginal, one rounding: three passes."""
    f = operator.softmin_rows(g, epsilon, f)
    updated = operator.softmin_columns(f, epsilon, g)
    masses = column_marginal(operator.b, g, updated, epsilon)
    gap, size, total, dual, swing, primal = torch.stack(
        (
            (masses - operator.b).abs().sum(),
            magnitude(operator, f, g),
            masses.sum(),
            operator.a @ f.double() + operator.b @ g.double(),
            oscillation(g, operator.b > 0),
            rounded_value(operator, f, g, updated, epsilon),
        )
    ).tolist()
    value = dual + epsilon * (1 - total)
    rounding = value_rounding(operator, size, gap, epsilon)
    floor = rounding_floor(operator, size, epsilon)
    error = gap + floor
    upper = min(
        value + error * (swing + cost_spread(operator)) / 2,
        primal + SAFETY * floor * max(0.0, operator.mean_cost - value),
    )
    return Certificate(f, g, value, (value - rounding, max(value, upper) + rounding), error)


def certify_self(operator: Operator, f: Tensor, epsilon: float) -> Certificate:
    """The plan of one potential f (n,) between a cloud and itself: one pass."""
    masses = column_marginal(operator.a, f, operator.softmin_rows(f, epsilon, f), epsilon)
    total = masses.sum()
    # Before the shift, as in the iteration that stopped on it.
    before = magnitude(operator, f, f)
    f = f - (epsilon / 2 * total.log()).to(f.dtype)
    primal, change = balanced_value(operator, f, masses / total, epsilon)
    gap, size_before, size, dual, swing, upper, share = torch.stack(
        (
            (masses / total - operator.a).abs().sum(),
            before,
            magnitude(operator, f, f),
            operator.a @ f.double(),
            oscillation(f, operator.a > 0),
            primal,
            change,
        )
    ).tolist()
    value = 2 * dual
    rounding = value_rounding(operator, size, gap, epsilon)
    error = gap + rounding_floor(operator, size_before, epsilon)
    upper = min(value + error * (swing + cost_spread(operator)), upper + rounding * share)
    bounds = (value - rounding, max(value, upper) + rounding)
    return Certificate(f, f, value, bounds, error)


def magnitude(operator: Operator, f: Tensor, g: Tensor) -> Tensor:
    """<a, |f|> + <b, |g|>: a point without mass does not count, however far away it is."""
    return operator.a @ f.abs().double() + operator.b @ g.abs().double()


def rounding_floor(operator: Operator, size: float, epsilon: float) -> float:
    """Marginal error that rounding causes: u ((m + 2 mean C) / epsilon + 4).

    The exponents of the plan hold potentials and costs over epsilon, each rounded; what counts is
    the mean over the plan, for the potentials m = `magnitude`. The 4 is for the sums.
    """
    unit = torch.finfo(operator.dtype).eps / 2
    return unit * ((size + 2 * operator.mean_cost) / epsilon + 4)


def value_rounding(operator: Operator, size: float, gap: float, epsilon: float) -> float:
    """Bound on the floating-point error of a certified value.

    Errors count by the mean over the plan, of the potentials' `magnitude` and of the costs, whose
    mean is known for plans between a and b; `gap` is how far the plan is from being one.
    """
    unit = torch.finfo(operator.dtype).eps / 2
    cost_error = operator.mean_cost_error + gap * operator.cost_error
    return SAFETY * (cost_error + unit * (size + 4 * epsilon))


def oscillation(potential: Tensor, support: Tensor) -> Tensor:
    """Max - min of a potential over the points that carry mass, float64."""
    lowest = torch.where(support, potential, torch.inf).min()
    return (torch.where(support, potential, -torch.inf).max() - lowest).double()


def cost_spread(operator: Operator) -> float:
    """R >= max C - min C over the support."""
    return operator.cost_range.highest - operator.cost_range.lowest
