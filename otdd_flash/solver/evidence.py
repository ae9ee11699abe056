"""The error model of one problem, and its bounds from the row and column sums of its plan.

`solver.certificate` combines them with the dual value and the bound by oscillation of
`formulas.evidence`. `solver.solve` and `solver.small.route` refuse tolerances below what
`rounding_floor` allows; `solver.matrix.transport` calls `widen_bounds`, and `mixing.sources`
`share_of_costs`. A change must leave every bound valid:
`tests/solver/test_certificate_evidence.py` and `tests/solver/test_primal.py` have problems that
nearly attain them. Shapes are () for numbers, (n,), (m,) for potentials and sums; units those of
the cost, or of mass.

**Errors of a plan's entries.** All bounds of one problem come from one operation,
`Operator.marginals`: row sums r and column sums c of a plan P each of whose entries was computed
once. In exact arithmetic it is the plan of the same potentials and of costs C' near C,

    |C'_ij - C_ij| <= A_i + B_j + rho |C_ij|,                                                 (1)

with A and B in the table below, and rho = u where costs are stored in float32, else 0. Everything
else is algebra on vectors in float64.

Values. Let P* be an optimal plan of C and P' one of C'. By (1) and their marginals a, b

    OT(C') <= <C', P*> + epsilon KL(P*) <= OT(C) + eta,    OT(C) <= OT(C') + eta,
    eta = <a, A> + <b, B> + rho <|C|, P*>,

where <C, P*> <= OT(C) as KL is not negative. So bounds of OT(C') widened by eta are bounds of
OT(C). No second order is neglected and no independence of roundings is assumed.

Marginal error. Where the plan has mass, C_ij is f_i + g_j less epsilon times a moderate exponent,
so that rho |C_ij| can join A and B. The plan of C itself has P_ij exp(d_ij / epsilon), with |d_ij|
at most (1), for P_ij. As exp((s + t) / 2) <= (exp s + exp t) / 2, its marginals differ from r and c
in L1 by at most

    sum_ij P_ij (exp((A_i + B_j) / epsilon) - 1)
        <= sum_i r_i expm1(2 A_i / epsilon) / 2 + sum_j c_j expm1(2 B_j / epsilon) / 2.       (2)

The change of a returned potential when it is rounded to its type is measured and added to A.
Distant points have larger rounding errors, so A and B are one number for each point. Where 2 A_i >
epsilon, errors may be as large as all of the point's mass, and (2) says nothing useful: with exact
marginals the point is `unresolved`. Its potential is lowered so far that even with the errors it
sends almost no mass. Its missing mass then counts in the marginal error like any other, and the
upper bound's correction adds it back.

Roundings, in units of u = 2^-24 (float32) and v = 2^-53 (float64); M_i + N_j bounds the sum of the
magnitudes of all that is added up in C_ij, `LabelledCost.magnitudes`.

| operation | bound | enters |
|---|---|---|
| C_ij in float64: a product of d terms, four additions | (2 d + 16) v (M_i + N_j) | A, B |
| the same on a lattice, in float32 | measured, `operators.point_scores` | A, B |
| C_ij rounded to float32, where costs are stored | u abs C_ij | rho |
| the same below 2^-126, where the least step is 2^-149 | 2^-150 | A, B |
| PyTorch: exponents and exp, float64 | 8 v (abs f_i + abs g_j + M_i + N_j) | A, B |
| Triton: the same where costs are given, `kernels.matrix.sums` | the same | A, B |
| PyTorch: sums of n or m terms, float64 | (n + m + 8) v of the sum | `relative_error` |
| Triton: points in fixed point of 24 or 32 bits | measured, `operators.fixed_point` | A, B |
| Triton: products of these | exact, but for what `kernels.points.digits` leaves out | A, B |
| Triton: exponents, exp2, float64 sums | `kernels.passes.plan_marginals` | A, B, `relative_error` |
| entries below 2^-125 of a product of masses | may be 0; so small a sum is not scaled up | none |
| sums over points of numbers of size s, float64, any order | (n + m) v s | both ends |

**Primal values** are what plans with exactly the prescribed marginals cost, so upper bounds of OT.

    <C, Q> + epsilon KL(Q | a b^T) >= OT   for every Q >= 0 with row sums a and column sums b

The plan P of two potentials nearly has these marginals, and log (P_ij / a_i b_j) is its exponent: P
costs sum_ij P_ij (f_i + g_j), so that its row and column sums suffice. Missing mass is filled with
a matrix whose cost is known in closed form. No plan is ever formed. For a cross term g first is at
most T'(f), so that columns have at most the masses b, but for a few units in the last place.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts, Number, lesser
from otdd_flash.operators.base import Certifiable, Epsilon, Marginals, Operator

# Unit roundoff of float64.
DOUBLE_UNIT = 2.0**-53

# Keeps quotients finite where there is no mass.
TINY = torch.finfo(torch.float64).tiny


# Errors of a plan's entries.


def growth_of(sums: Tensor, errors: Tensor, epsilon: Epsilon) -> Tensor:
    """Compute expm1(2 A_i / epsilon) of A (k,); 0 where the sum r_i (k,) is 0.

    One side of (2) is half of <r, this>.
    """
    return (errors / (epsilon / 2)).expm1_().masked_fill_(sums == 0, 0)


def undetectable_after_update(
    before: Number, largest: Number, factor: Number, moved: Number
) -> Number:
    """Bound the columns' part of (2), (), after rows are scaled by factors s (n,).

    No column grows by more than the largest factor, nor all of them by more than the rows do.

    Args:
        before: that part before the scaling.
        largest: half of their largest `growth_of`.
        factor: max s.
        moved: sum_i r_i |s_i - 1|.
    """
    return lesser(before * factor, before + moved * largest)


def share_of_costs(rounding: float, upper: Number, lowest: float) -> Number:
    """Bound rho <|C|, P*>, (): as KL >= 0, <C, P*> is at most OT, which is at most `upper`.

    |C| exceeds C by twice the negative part of C, which is at most -`lowest`. The factor 2 allows
    for another plan than P*.
    """
    return rounding * 2 * (abs(upper) - min(0.0, lowest))


def widen_bounds(
    costs: CostFacts,
    sums: Marginals,
    ends: tuple[Number, Number],
    mean_error: Number,
    size: Number,
    epsilon: float,
    mass: float = 1.0,
) -> tuple[float, float]:
    """Widen the dual value and an upper bound for the perturbed costs, () each, to bounds for C.

    By eta, with <a, A> + <b, B> in `mean_error`; by the effect of the sums' errors on potentials;
    and by the rounding of sums over points, whose `size` is <a, |f|> + <b, |g|>. `mass` is that of
    the marginals.
    """
    # `max` returns an upper bound of NaN, as it comes first: then nothing is proved.
    dual, upper = ends[0], max(reversed(ends))
    most = max(1.0, mass)
    shares: Number | float = 0.0
    if sums.cost_rounding:
        shares = share_of_costs(sums.cost_rounding, upper, most * costs.lowest)
    terms = sums.rows.shape[-1] + sums.columns.shape[-1] + 16
    additions = terms * DOUBLE_UNIT * (size + most * epsilon)
    rounding = mean_error + shares + sums.relative_error * most * epsilon + additions
    return float(dual - rounding), float(upper + rounding)


# An estimate of the marginal errors that rounding causes or hides: (2) to first order, for the mean
# error of the costs and for potentials rounded to their type. No bound rests on it: a tolerance
# below twice the floor is refused.


def magnitude(operator: Operator, f: Tensor, g: Tensor) -> Tensor:
    """Return <a, |f|> + <b, |g|>: points without mass do not count, however far away they are."""
    rows, columns = operator.a * f, operator.b * g
    size: Tensor = torch.linalg.vector_norm(rows, 1) + torch.linalg.vector_norm(columns, 1)
    return size


def undetectable_error(costs: CostFacts, size: Number, epsilon: float) -> Number:
    """Estimate `Certificate.undetectable`; `size` is `magnitude` of f and g."""
    unit = torch.finfo(costs.dtype).eps / 2
    return (costs.error + unit * size) / epsilon + unit


def rounding_floor(costs: CostFacts, size: Number, epsilon: float) -> Number:
    """Estimate the marginal error that rounding causes: undetectable, or beyond half-steps.

    Half-steps round exponents of the size of a cost to the type of the potentials.
    """
    unit = torch.finfo(costs.dtype).eps / 2
    return undetectable_error(costs, size, epsilon) + unit * costs.magnitude / epsilon


# The bound by oscillation, of one plan.


def oscillations(potentials: Tensor, absent: Tensor, *sides: slice) -> list[Tensor]:
    """Return max - min, () each, of each side's potentials (k,) over the points that carry mass."""
    lowest, highest = (potentials.masked_fill(absent, end) for end in (torch.inf, -torch.inf))
    return [highest[..., side].amax(-1) - lowest[..., side].amin(-1) for side in sides]


def perturbed_spread(costs: CostFacts, sums: Marginals, largest: Number) -> Number:
    """Return R of perturbed costs, off by at most `largest` () and a share of themselves."""
    return costs.spread + 2 * (largest + sums.cost_rounding * costs.largest)


def oscillation_slack(relative: float, osc: Number, spread: Number) -> Number:
    """Return what to add to the bound if every sum is off by this share; `osc` is osc f + osc g."""
    return 2 * relative * (osc + 2 * spread)


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return ||x - y||_1 (), over points."""
    apart: Tensor = torch.linalg.vector_norm(one - other, 1, dim=-1)
    return apart


def updated_gap(sums: Tensor, updated: Tensor, total: Tensor) -> Tensor:
    """Bound ||P^T s - b||_1 of a plan P with sums (r, c) (n + m,) whose rows are scaled by s.

    With (s r, b) in `updated` it is, for any number t () in `total`,

        ||(r, c) / t - (s r, b)||_1 = sum_i r_i |s_i - 1 / t| + ||c / t - b||_1.
    """
    return distance(sums / total[..., None], updated)


# Primal values.


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Return <x, y> (), over points."""
    product: Tensor = torch.linalg.vecdot(x, y)
    return product


class Filling(NamedTuple, Generic[Number]):
    """The filling u v^T / t of a plan whose rows miss u and whose columns miss v, () each.

    Attributes:
        rows: the mass t that rows miss, the sum of u.
        columns: that of columns, of v; the same but for rounding.
        costs: <u, C v>.
        entropy: sum u log(u / a) + sum v log(v / b).
    """

    rows: Number
    columns: Number
    costs: Number
    entropy: Number


def filling_of(
    operator: Certifiable,
    masses: Tensor,
    absent: Tensor,
    owed: Tensor,
    sums: Tensor,
    scale: Tensor,
) -> Filling[Tensor]:
    """Measure the filling of a plan whose sums (n + m,), scaled, are at most the `owed` masses.

    Masses are 0 where a point is `absent` (n + m,).
    """
    n = operator.a.shape[-1]
    missing = torch.addcmul(owed, sums, scale[..., None], value=-1)
    u, v = missing[..., :n], missing[..., n:].contiguous()
    # A mass of 0, of which nothing is missing, is replaced by 1.
    shares = missing / (masses + absent)
    return Filling(
        u.sum(-1),
        v.sum(-1),
        dot(u, operator.expected_costs(v)),
        torch.xlogy(missing, shares).sum(-1),
    )


def filled_value(
    filling: Filling[float], plan_cost: float, retained: float, epsilon: float, mass: float = 1.0
) -> float:
    """Bound the primal value of the plan of f (n,), g (m,), filled to its marginals, from above.

    This is the last step of the rounding of Altschuler, Weed & Rigollet 2017, Near-linear time
    approximation algorithms for optimal transport via Sinkhorn iteration. With sums r <= a and
    c <= b, of which u = a - r and v = b - c are missing and t is their mass, the plan is
    P + u v^T / t, a mixture of P / (1 - t) and u v^T / t^2. By convexity its KL is at most

        sum P log (P / a b^T) - (1 - t) log(1 - t)
            + sum u log(u / a) + sum v log(v / b) - 2 t log t.

    Of marginals with another mass mu, 1 - t and t are in units of mu in all logarithms but one of
    t; and KL(P | a b^T) has another 1 - mu.

    Args:
        filling: of u and v.
        plan_cost: <r, f> + <c, g>.
        retained: the mass of P, 1 - t.
        epsilon: in units of the cost.
        mass: mu.
    """
    missing = max(filling.rows, filling.columns)
    mixed = _x_log(retained, mass) + _x_log(missing, mass) + _x_log(missing, 1.0)
    costs = filling.costs / filling.columns if filling.columns > 0 else 0.0
    return plan_cost + costs + epsilon * (filling.entropy - mixed + (1 - mass))


def fitting_scale(masses: Tensor, absent: Tensor, sums: Tensor, relative: float) -> Tensor:
    """Return kappa <= 1, (), such that no row or column of kappa P exceeds its mass.

    The sums (k,) of P are off by the share `relative` at the most, and 0 at `absent` points (k,).
    """
    fullest = (sums / (masses + absent)).amax(-1)
    return (fullest * (1 + relative)).clamp_min(1).reciprocal()


def filled_slack(relative: float, size: Number, spread: Number, epsilon: float) -> Number:
    """Return what to add to `filled_value`, (), if every sum is off by the share `relative`.

    <r, f> + <c, g> changes by that share of <a, |f|> + <b, |g|>, in `size`; the filling's cost by
    at most that share of costs, which differ by `spread`, and its entropy as rho log rho does.
    """
    return relative * (size + 4 * spread + 2 * epsilon * (1 - math.log(relative)))


class RowSums(NamedTuple):
    """Intervals that hold the row sums (n,) of a symmetric plan without its diagonal, float64."""

    lowest: Tensor
    highest: Tensor


def diagonal_of(a: Tensor, f: Tensor, costs: Tensor, epsilon: Epsilon) -> Tensor:
    """Return log P_ii (n,) of the plan of f (n,) and f, for costs C_ii (n,); -inf without mass.

    The potential f must be finite there, too.
    """
    return 2 * a.log() - torch.sub(costs, f, alpha=2) / epsilon


def off_diagonal_sums(diagonal: Tensor, rows: Tensor, relative: float, spread: Tensor) -> RowSums:
    """Subtract P_ii from row sums r (n,): log P_ii is off by `spread` (n,), r by a share each."""
    low, high = (diagonal - spread).exp(), (diagonal + spread).exp()
    return RowSums(
        ((1 - relative) * rows - high).clamp_min_(0), ((1 + relative) * rows - low).clamp_min_(0)
    )


def balancing(a: Tensor, absent: Tensor, diagonal: Tensor, sums: RowSums) -> Tensor:
    """Return by how much the primal value of a plan balanced on its diagonal exceeds 2 <a, f>, ().

    In units of epsilon; it takes no pass. A symmetric plan P whose row sums without the diagonal
    are z, in `sums`, gets the marginals a if its diagonal becomes a - z, where that is not
    negative. In general kappa P off the diagonal leaves at least half of P_ii on it if

        kappa = min(1, min_i (a_i - P_ii / 2) / z_i),    P_ii = a_i^2 exp((2 f_i - C_ii) / epsilon),

    or of a_i, where P_ii is more. As C_ii = 2 f_i - epsilon log(P_ii / a_i^2), the value is

        sum_i kappa z_i (2 f_i + epsilon log kappa) + Q_ii (C_ii + epsilon log(Q_ii / a_i^2))
            = 2 <a, f> + epsilon sum_i kappa z_i log kappa + Q_ii log(Q_ii / P_ii),

    with Q_ii = a_i - kappa z_i: convex in every z_i, so the largest is at an end of its interval.
    It exceeds the dual value only in second order of a - r: mass is moved to the diagonal, at the
    price that P already has there.

    Args:
        a: masses (n,).
        absent: (n,) bool, where they are 0.
        diagonal: log P_ii (n,).
        sums: z.
    """
    room = torch.sub(a, torch.minimum(diagonal.exp(), a), alpha=0.5)
    # Infinite where nothing is off the diagonal; 1 / 0, not 0 / 0, where there is no mass.
    ratios = (room + absent) / sums.highest
    kappa = ratios.amin(-1, keepdim=True).clamp_max(1)
    kept = kappa * torch.stack(sums)
    own = (a - kept).clamp_min_(0)
    ends = torch.xlogy(own, own).addcmul_(own, diagonal, value=-1).addcmul_(kept, kappa.log())
    return ends.amax(0).masked_fill_(absent, 0).sum(-1)


def _x_log(x: float, whole: float) -> float:
    """Return x log(x / whole) of a mass; 0 where there is none."""
    if x <= 0:
        return 0.0
    share = x / whole
    return x * (math.log(share) if share > 0 else math.log(x) - math.log(whole))
