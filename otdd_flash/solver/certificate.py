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

SAFETY = 2.0


class Certificate(NamedTuple):
    """Potentials after the certifying pass, and what they prove."""

    f: Tensor
    g: Tensor
    value: float
    bounds: tuple[float, float]
    marginal_error: float


def certify(operator: Operator, g: Tensor, epsilon: float) -> Certificate:
    """One row update from g (m,), one column marginal: two passes."""
    f = operator.softmin_rows(g, epsilon)
    masses = column_marginal(operator.b, g, operator.softmin_columns(f, epsilon), epsilon)
    support = operator.b > 0
    gap = float((masses - operator.b).abs().sum())
    value = _dot(operator.a, f) + _dot(operator.b, g) + epsilon * (1 - float(masses.sum()))
    spread = oscillation(g, support) + cost_spread(operator)
    rounding = value_rounding(operator, f, g, epsilon)
    error = gap + rounding_floor(operator, f, g, epsilon)
    bounds = (value - rounding, value + error * spread / 2 + rounding)
    return Certificate(f, g, value, bounds, error)


def certify_self(operator: Operator, f: Tensor, epsilon: float) -> Certificate:
    """The plan of one potential f (n,) between a cloud and itself: one pass."""
    masses = column_marginal(operator.a, f, operator.softmin_rows(f, epsilon), epsilon)
    total = masses.sum()
    gap = float((masses / total - operator.a).abs().sum())
    # Before the shift, as in the iteration that stopped on it.
    error = gap + rounding_floor(operator, f, f, epsilon)
    f = f - (epsilon / 2 * total.log()).to(f.dtype)
    value = 2 * _dot(operator.a, f)
    spread = oscillation(f, operator.a > 0) + cost_spread(operator)
    rounding = value_rounding(operator, f, f, epsilon)
    bounds = (value - rounding, value + error * spread + rounding)
    return Certificate(f, f, value, bounds, error)


def column_marginal(masses: Tensor, g: Tensor, softmin: Tensor, epsilon: float) -> Tensor:
    """Column sums b_j exp((g_j - T(f)_j) / epsilon) of the plan of (f, g), given T(f), float64.

    The half-step that would update g thus yields the marginal of the plan before it, for free.
    """
    exponent = (g.double() - softmin.double()) / epsilon
    return masses * torch.where(masses > 0, exponent, 0).exp()


def rounding_floor(operator: Operator, f: Tensor, g: Tensor, epsilon: float) -> float:
    """Marginal error that rounding causes: u ((m + 2 mean C) / epsilon + 4).

    The exponents of the plan hold potentials and costs over epsilon, each rounded; what counts is
    the mean over the plan, m = <a, |f|> + <b, |g|> for the potentials. The 4 is for the sums.
    """
    unit = torch.finfo(operator.dtype).eps / 2
    return unit * ((_magnitude(operator, f, g) + 2 * operator.mean_cost) / epsilon + 4)


def value_rounding(operator: Operator, f: Tensor, g: Tensor, epsilon: float) -> float:
    """Bound on the floating-point error of a certified value, in units of the cost."""
    unit = torch.finfo(operator.dtype).eps / 2
    return SAFETY * (operator.cost_error + unit * (_magnitude(operator, f, g) + 4 * epsilon))


def oscillation(potential: Tensor, support: Tensor) -> float:
    """Max - min of a potential over the points that carry mass."""
    carried = potential[support]
    return float(carried.max() - carried.min())


def cost_spread(operator: Operator) -> float:
    """R >= max C - min C over the support."""
    return operator.cost_range.highest - operator.cost_range.lowest


def _magnitude(operator: Operator, f: Tensor, g: Tensor) -> float:
    """<a, |f|> + <b, |g|>: a point without mass does not count, however far away it is."""
    return _dot(operator.a, f.abs()) + _dot(operator.b, g.abs())


def _dot(masses: Tensor, potential: Tensor) -> float:
    return float(masses @ potential.double())
