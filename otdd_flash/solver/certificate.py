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
for. (2) adds it to ||c - b||_1 or ||r - a||_1. It is spread over all points, so the rounded plan
has to move that share of itself to the product a b^T, at SAFETY floor (mean C - value): by Jensen's
inequality T(g)_i <= sum_j b_j (C_ij - g_j), so no point's share costs less than 0 and all add up to
that. A point with a small mass and costs far above the mean has more than its share: by rounding it
can take all mass of some rows, and only the sum of all columns tells. What row and column sums do
not agree on has to move too, at the highest price of a row. The balanced plan pays for the same
error at the prices log (Q_ii / P_ii) of its diagonal.
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
    gap, size, total, dual, swing, primal, astray = torch.stack(
        (
            (masses - operator.b).abs().sum(),
            magnitude(operator, f, g),
            masses.sum(),
            operator.a @ f.double() + operator.b @ g.double(),
            oscillation(g, operator.b > 0),
            *_rounded_value(operator, f, torch.minimum(g, updated), updated, epsilon),
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
    upper = min(
        value + error * (swing + cost_spread(operator)) / 2,
        primal + astray + SAFETY * floor * max(0.0, operator.mean_cost - value),
    )
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


def _rounded_value(
    operator: Operator, f: Tensor, lowered: Tensor, updated: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Primal value of the plan of (f, g) rounded onto the transport polytope: one pass.

    Columns with too much mass are scaled down to b, by lowering g to min(g, T(f)); rows, which were
    exact, are then short of mass too.

    Returns:
        The value, and what it may be short of where row and column sums do not add up to the same.
    """
    columns = column_marginal(operator.b, lowered, updated, epsilon)
    softmin = operator.softmin_rows(lowered, epsilon, f)
    rows = column_marginal(operator.a, f, softmin, epsilon)
    marginals = torch.minimum(rows, operator.a), columns
    # No more than to move that mass from the dearest row to the product.
    prices = operator.expected_costs(operator.b) - operator.b @ lowered.double() - f.double()
    dearest = torch.where(operator.a > 0, prices, 0).max()
    value = filled_value(operator, (f, lowered), marginals, epsilon)
    return value, (rows.sum() - columns.sum()).abs() * dearest
