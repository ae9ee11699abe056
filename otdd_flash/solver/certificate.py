"""Value and two-sided bounds of a transport term from any potentials.

The value is the dual at the potentials, a lower bound. The upper bound is the lesser of two.

1. Primal: the value of a plan that has the marginals exactly. A cross term's is the plan of the
   potentials rounded onto the transport polytope, for one more pass: it is off by about the missing
   mass times mean C - value. A self term's is the plan of the potential balanced on its diagonal,
   for free, and off in the second order only. `polytope` has both.

2. Oscillation. After a row update the plan has row sums a and total mass 1. Let c be its column
   sums and lower = <a, f> + <b, g>. P is the optimal plan between a and c, whose value is <a, f> +
   <c, g>; the optimal value is convex in the second mass, with the optimal g* as subgradient:

       OT <= <a, f> + <c, g> + <g*, b - c> = lower + <g* - g, b - c>
          <= lower + ||c - b||_1 (osc g* + osc g) / 2,        osc g* <= R,  R >= max C - min C.

   Self term: shift f so that the plan has mass 1; with row sums r = column sums, lower = 2 <a, f>
   and both arguments move: OT <= lower + ||r - a||_1 (osc f + R). This is the lesser one where
   epsilon is above the costs or nearly all mass is missing.

Rounding. Potentials in floating point are still valid in the dual; what rounding spoils is the mass
that we believe their plan to have. Errors of computed exponents move the value by at most their
mean over an optimal plan, as OT with another cost C' is at most <P*, C' - C> above. An exponent
carries the error of its cost and of the potentials it was built from, so both ends move outwards by

    SAFETY (cost_error + u (<a, |f|> + <b, |g|>) + 4 u epsilon),      u = unit roundoff.

It also hides a part of the marginal error, `rounding_floor`, which the upper bounds have to pay
for. (2) adds it to ||c - b||_1 or ||r - a||_1. The rounded plan may have to move as much of each
row and column to the product a b^T, at the prices

    p_i = sum_j b_j (C_ij - g_j) - f_i,    p_j = sum_i a_i (C_ij - f_i) - g_j,

which are not negative at the optimum by Jensen's inequality, and add up to mean C - value on each
side. A far point is both dear and badly known, so every point pays for its own error, and not all
for the mean one. What computed row and column sums do not agree on has to move too, at the highest
price of a row. Where a point's error could be all of its mass, the plan is made without it, lest it
take what belongs to others. The balanced plan pays for the same error at the prices log (Q_ii /
P_ii) of its diagonal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.operators.base import Epsilon, Operator
from otdd_flash.solver.polytope import balanced_value, filled_value

SAFETY = 2.0


class Certificate(NamedTuple):
    """Potentials after the certifying pass, and what they prove."""

    f: Tensor
    g: Tensor
    value: float
    bounds: tuple[float, float]
    marginal_error: float


def certify(
    operator: Operator, f: Tensor, g: Tensor, epsilon: float, updated: Tensor | None = None
) -> Certificate:
    """One row update from g (m,), near f (n,), one column marginal, one rounding: three passes.

    With `updated`, which is T'(f), of an f that is T(g) already, the rounding alone.

    Raises:
        InputError: rounding leaves nothing of the plan.
    """
    if updated is None:
        f = operator.softmin_rows(g, epsilon, f)
        updated = operator.softmin_columns(f, epsilon, g)
    masses = column_marginal(operator.b, g, updated, epsilon)
    gap, size, total, dual, swing, primal, moved = torch.stack(
        (
            (masses - operator.b).abs().sum(),
            magnitude(operator, f, g),
            masses.sum(),
            operator.a @ f.double() + operator.b @ g.double(),
            oscillation(g, operator.b > 0),
            *_rounded_value(operator, f, g, updated, epsilon),
        )
    ).tolist()
    if not math.isfinite(total):
        # Rows are exact and add up to 1: what overflows is the rounding of a far point's exponent.
        raise InputError(
            f"some costs are too far above the mean at epsilon={epsilon:g}: rounding alone makes "
            "the plan's mass overflow; raise epsilon, set precision=double or leave out points "
            "that are far from all others"
        )
    value = dual + epsilon * (1 - total)
    rounding = value_rounding(operator, size, epsilon)
    floor = rounding_floor(operator, size, epsilon)
    error = gap + floor
    upper = min(value + error * (swing + cost_spread(operator)) / 2, primal + moved)
    return Certificate(f, g, value, (value - rounding, max(value, upper) + rounding), error)


def certify_self(
    operator: Operator, f: Tensor, epsilon: float, updated: Tensor | None = None
) -> Certificate:
    """The plan of one potential f (n,) between a cloud and itself: one pass.

    With `updated`, which is T(f), none.
    """
    if updated is None:
        updated = operator.softmin_rows(f, epsilon, f)
    excess = (f.double() - updated.double()) / epsilon
    logs = operator.a.log() + torch.where(operator.a > 0, excess, 0)
    # A start may be any constant away, too far for the mass itself.
    total = logs.logsumexp(0)
    rows = (logs - total).exp()
    # Before the shift, as in the iteration that stopped on it.
    before = magnitude(operator, f, f)
    f = f - (epsilon / 2 * total).to(f.dtype)
    primal, change = balanced_value(operator, f, rows, epsilon)
    gap, size_before, size, dual, swing, upper, share = torch.stack(
        (
            (rows - operator.a).abs().sum(),
            before,
            magnitude(operator, f, f),
            operator.a @ f.double(),
            oscillation(f, operator.a > 0),
            primal,
            change,
        )
    ).tolist()
    value = 2 * dual
    rounding = value_rounding(operator, size, epsilon)
    error = gap + rounding_floor(operator, size_before, epsilon)
    upper = min(value + error * (swing + cost_spread(operator)), upper + rounding * share)
    bounds = (value - rounding, max(value, upper) + rounding)
    return Certificate(f, f, value, bounds, error)


def column_marginal(masses: Tensor, g: Tensor, softmin: Tensor, epsilon: Epsilon) -> Tensor:
    """Column sums b_j exp((g_j - T(f)_j) / epsilon) of the plan of (f, g), given T(f), float64.

    The half-step that would update g thus yields the marginal of the plan before it, for free.
    """
    exponent = (g.double() - softmin.double()) / epsilon
    return masses * torch.where(masses > 0, exponent, 0).exp()


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


def value_rounding(operator: Operator, size: float, epsilon: float) -> float:
    """Bound on the floating-point error of a certified value, from the potentials' `magnitude`."""
    unit = torch.finfo(operator.dtype).eps / 2
    return SAFETY * (operator.cost_error + unit * (size + 4 * epsilon))


def oscillation(potential: Tensor, support: Tensor) -> Tensor:
    """Max - min of a potential over the points that carry mass, float64."""
    lowest = torch.where(support, potential, torch.inf).min()
    return (torch.where(support, potential, -torch.inf).max() - lowest).double()


def cost_spread(operator: Operator) -> float:
    """R >= max C - min C over the support."""
    return operator.cost_range.highest - operator.cost_range.lowest


def absent(operator: Operator) -> float:
    """Stands for a potential of -inf: finite, and far below any cost."""
    return -max(1e20, 1e6 * operator.cost_range.highest)


def _rounded_value(
    operator: Operator, f: Tensor, g: Tensor, updated: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Primal value of the plan of (f, g) rounded onto the transport polytope: one pass.

    Columns with too much mass are scaled down to b, by lowering g to min(g, T(f)); rows, which were
    exact, are then short of mass too. Points of whose mass rounding may hide all get none, and are
    filled up like the others; if there are such rows, that takes another pass.

    Returns:
        The value, and what moving the mass that rounding hides may add to it.
    """
    a, b = operator.a, operator.b
    row_costs, column_costs = operator.expected_costs(b), operator.expected_column_costs(a)
    row_prices = (row_costs - b @ g.double() - f.double()).clamp_min(0)
    column_prices = (column_costs - a @ f.double() - g.double()).clamp_min(0)
    hidden_rows = _hidden(operator, f, row_costs, epsilon)
    hidden_columns = _hidden(operator, g, column_costs, epsilon)
    lost_rows, lost_columns = (a > 0) & (hidden_rows >= 1), (b > 0) & (hidden_columns >= 1)
    if bool(lost_rows.any()):
        f = torch.where(lost_rows, absent(operator), f)
        updated = operator.softmin_columns(f, epsilon)
    g = torch.where(lost_columns, absent(operator), torch.minimum(g, updated))
    columns = column_marginal(b, g, updated, epsilon)
    rows = column_marginal(a, f, operator.softmin_rows(g, epsilon, f), epsilon)
    marginals = torch.minimum(rows, a), columns
    value = filled_value(operator, (f, g), marginals, epsilon)
    hidden = marginals[0] @ (hidden_rows * row_prices)
    hidden = hidden + marginals[1] @ (hidden_columns * column_prices)
    dearest = torch.where(a > 0, row_prices, 0).max()
    return value, hidden + (rows.sum() - columns.sum()).abs() * dearest


def _hidden(operator: Operator, potential: Tensor, costs: Tensor, epsilon: float) -> Tensor:
    """What rounding may hide over what a plan gives each point, from its potential and mean costs.

    Exponents are off by u ((|f_i| + sum_j b_j C_ij) / epsilon + 2), of which `rounding_floor` is
    the mean of rows plus that of columns.
    """
    unit = torch.finfo(operator.dtype).eps / 2
    return SAFETY * unit * ((potential.double().abs() + costs) / epsilon + 2)
