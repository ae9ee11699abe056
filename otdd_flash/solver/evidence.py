"""Certificates of the potentials of one problem: values, bounds, errors, from the sums of a plan.

`solver.certificate` makes bounds of them, with the dual value and the bound by oscillation of
`formulas.evidence`, and `solver.solve` refuses by `rounding_floor` what rounding does not allow. A
change must leave every bound valid: `tests/solver/test_evidence.py` and
`tests/solver/test_primal.py` have problems that nearly attain them. Shapes are () for numbers,
(n,), (m,) for potentials and sums; units those of the cost, or of mass.

**Errors of a plan's entries.** What is proved of one problem comes from one operation,
`Operator.marginals`: row sums r and column sums c of a plan P each of whose entries was computed
once. In exact arithmetic it is the plan of the same potentials and of costs C' near C,

    |C'_ij - C_ij| <= A_i + B_j + rho |C_ij|,                                                 (1)

with A and B in the table below, and rho = u where costs are stored in float32, else 0. Everything
else is algebra on vectors in float64.

Values. Let P* be an optimal plan of C and P' one of C'. By (1) and their marginals a, b

    OT(C') <= <C', P*> + epsilon KL(P*) <= OT(C) + eta,    OT(C) <= OT(C') + eta,
    eta = <a, A> + <b, B> + rho <|C|, P*>,

where <C, P*> <= OT(C) as KL is not negative. So bounds of OT(C') become bounds of OT(C) by moving
outwards by eta. No second order is neglected and no independence of roundings is assumed.

Marginal error. Where the plan has mass, C_ij is f_i + g_j less epsilon times a moderate exponent,
so that rho |C_ij| can join A and B. The plan of C itself has P_ij exp(d_ij / epsilon), with |d_ij|
at most (1), for P_ij. As exp((s + t) / 2) <= (exp s + exp t) / 2, its marginals differ from r and c
in L1 by at most

    sum_ij P_ij (exp((A_i + B_j) / epsilon) - 1)
        <= sum_i r_i expm1(2 A_i / epsilon) / 2 + sum_j c_j expm1(2 B_j / epsilon) / 2.       (2)

What rounding a returned potential to its type changes is measured and added to A. Distant points
have larger rounding errors, so A and B are one number for each point. Where 2 A_i > epsilon, errors
may be as large as all of the point's mass, and (2) says nothing useful. The potential of such a
point is lowered so far that even with the errors it sends almost no mass. Its missing mass then
counts in the marginal error like any other, and the upper bound's correction adds it back.

Roundings, in units of u = 2^-24 (float32) and v = 2^-53 (float64); M_i + N_j bounds the sum of the
magnitudes of all that is added up in C_ij, `LabelledCost.magnitudes`.

| operation | bound | enters |
|---|---|---|
| C_ij in float64: a product of d terms, four additions | (2 d + 16) v (M_i + N_j) | A, B |
| the same on a lattice, in float32 | measured, `operators.integer_points` | A, B |
| C_ij rounded to float32, where costs are stored | u abs C_ij | rho |
| the same below 2^-126, where the least step is 2^-149 | 2^-150 | A, B |
| PyTorch: exponents and exp, float64 | 8 v (abs f_i + abs g_j + M_i + N_j) | A, B |
| Triton: the same where costs are given, `kernels.matrix.sums` | the same | A, B |
| PyTorch: sums of n or m terms, float64 | (n + m + 8) v of the sum | `relative_error` |
| Triton: points in fixed point of 24 or 32 bits | measured, `operators.fixed_point` | A, B |
| Triton: products of these | exact, but for what `kernels.points.digits` leaves out | A, B |
| Triton: exponents, exp2, sums, float64 | `kernels.passes.plan_entries` | A, B, `relative_error` |
| entries below 2^-125 of a product of masses | lost, and no sum of so little is scaled up | none |
| sums over points of numbers of size s, float64, any order | (n + m) v s | both ends |

**Primal values** are what plans with exactly the prescribed marginals cost, so upper bounds of OT.

    <C, Q> + epsilon KL(Q | a b^T) >= OT   for every Q >= 0 with row sums a and column sums b

The plan P of two potentials nearly has these marginals, and log (P_ij / a_i b_j) is its exponent:
P costs sum_ij P_ij (f_i + g_j), so that its row and column sums say all. What is missing is filled
with a matrix whose cost is known in closed form. No plan is ever formed. For a cross term g first
is at most T'(f), so that columns have at most the masses b, but for a few units in the last place.
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
    """expm1(2 A_i / epsilon) of sums r (k,) and A (k,), and 0 where there is no mass.

    One side of (2) is half of <r, this>.
    """
    return (errors / (epsilon / 2)).expm1_().masked_fill_(sums == 0, 0)


def hidden_after_update(before: Number, largest: Number, factor: Number, moved: Number) -> Number:
    """What (2) allows columns, (), once rows are scaled by factors s (n,).

    No column grows by more than the largest factor, nor all of them by more than the rows do.

    Args:
        before: what it allows them before.
        largest: half of their largest `growth_of`.
        factor: max s.
        moved: sum_i r_i |s_i - 1|.
    """
    return lesser(before * factor, before + moved * largest)


def share_of_costs(rounding: float, upper: Number, lowest: float) -> Number:
    """Bound on rho <|C|, P*>, (): as KL >= 0, <C, P*> is OT at the most, which is below `upper`.

    What costs are below 0, at most -`lowest`, counts twice more. The factor 2 is for another plan.
    """
    return rounding * 2 * (abs(upper) - min(0.0, lowest))


def outwards(
    costs: CostFacts,
    sums: Marginals,
    ends: tuple[Number, Number],
    mean_error: Number,
    size: Number,
    epsilon: float,
) -> tuple[float, float]:
    """Bounds for C from the dual value and an upper bound for the perturbed costs, () each.

    They move by eta, with <a, A> + <b, B> in `mean_error`, by what errors of sums make of
    potentials, and by rounding of sums over points, whose `size` is <a, |f|> + <b, |g|>.
    """
    # Of what is not a number and the dual value `max` gives the first: then nothing is proved.
    dual, upper = ends[0], max(reversed(ends))
    shares = share_of_costs(sums.cost_rounding, upper, costs.lowest)
    additions = (sums.rows.shape[-1] + sums.columns.shape[-1] + 16) * DOUBLE_UNIT * (size + epsilon)
    rounding = mean_error + shares + sums.relative_error * epsilon + additions
    return float(dual - rounding), float(upper + rounding)


# The scale of marginal errors that rounding causes or hides: (2) to first order, for the mean error
# of the costs and for potentials rounded to their type. No bound rests on it: a tolerance below
# twice the floor is refused.


def magnitude(operator: Operator, f: Tensor, g: Tensor) -> Tensor:
    """<a, |f|> + <b, |g|>: a point without mass does not count, however far away it is."""
    rows, columns = operator.a * f, operator.b * g
    size: Tensor = torch.linalg.vector_norm(rows, 1) + torch.linalg.vector_norm(columns, 1)
    return size


def hidden_error(costs: CostFacts, size: Number, epsilon: float) -> Number:
    """What a certificate will call hidden, with m = `magnitude` of the potentials in `size`."""
    unit = torch.finfo(costs.dtype).eps / 2
    return (costs.error + unit * size) / epsilon + unit


def rounding_floor(costs: CostFacts, size: Number, epsilon: float) -> Number:
    """Marginal error that rounding causes: what is hidden, and what half-steps cannot mend.

    Their exponents are of the size of a cost, in the type of the potentials.
    """
    unit = torch.finfo(costs.dtype).eps / 2
    return hidden_error(costs, size, epsilon) + unit * costs.magnitude / epsilon


# The bound by oscillation, of one plan.


def swings(potentials: Tensor, absent: Tensor, *sides: slice) -> list[Tensor]:
    """Return max - min, () each, of each side's potentials (k,) over the points that carry mass."""
    lowest, highest = (potentials.masked_fill(absent, end) for end in (torch.inf, -torch.inf))
    return [highest[..., side].amax(-1) - lowest[..., side].amin(-1) for side in sides]


def perturbed_spread(costs: CostFacts, sums: Marginals, largest: Number) -> Number:
    """R of the perturbed costs, whose errors are at most `largest` () and a share of themselves."""
    return costs.spread + 2 * (largest + sums.cost_rounding * costs.largest)


def oscillation_slack(relative: float, osc: Number, spread: Number) -> Number:
    """What to add to the bounds if every sum is off by this share; `osc` is osc f + osc g."""
    return 2 * relative * (osc + 2 * spread)


def distance(one: Tensor, other: Tensor) -> Tensor:
    """||x - y||_1 (), over points."""
    apart: Tensor = torch.linalg.vector_norm(one - other, 1, dim=-1)
    return apart


def updated_gap(sums: Tensor, updated: Tensor, total: Tensor) -> Tensor:
    """Bound on ||P^T s - b||_1 of a plan P with sums (r, c) (n + m,) whose rows are scaled by s.

    With (s r, b) in `updated` it is, for any number t () in `total`,

        ||(r, c) / t - (s r, b)||_1 = sum_i r_i |s_i - 1 / t| + ||c / t - b||_1.
    """
    return distance(sums / total[..., None], updated)


# Primal values.


def dot(x: Tensor, y: Tensor) -> Tensor:
    """<x, y> (), over points."""
    product: Tensor = torch.linalg.vecdot(x, y)
    return product


class Filling(NamedTuple, Generic[Number]):
    """What a plan misses, and what a product of that costs, () each.

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
    operator: Certifiable, masses: Tensor, absent: Tensor, sums: Tensor, scale: Tensor
) -> Filling[Tensor]:
    """Measure what a plan misses: its sums (n + m,), scaled, are at most the masses (n + m,).

    These are 0 where a point is `absent` (n + m,).
    """
    n = operator.a.shape[-1]
    missing = torch.addcmul(masses, sums, scale[..., None], value=-1)
    u, v = missing[..., :n], missing[..., n:].contiguous()
    # Over 1 in place of a mass of 0, of which nothing is missing.
    shares = missing / (masses + absent)
    return Filling(
        u.sum(-1),
        v.sum(-1),
        dot(u, operator.expected_costs(v)),
        torch.xlogy(missing, shares).sum(-1),
    )


def filled_value(filling: Filling[float], paid: float, kept: float, epsilon: float) -> float:
    """Primal value of the plan of f (n,), g (m,), which misses some mass, filled with a product.

    This ends the rounding of Altschuler, Weed & Rigollet 2017, Near-linear time approximation
    algorithms for optimal transport via Sinkhorn iteration. With sums r <= a and c <= b, of which
    u = a - r and v = b - c are missing and t is their mass, the plan is P + u v^T / t, a mixture of
    P / (1 - t) and u v^T / t^2. By convexity its KL is at most

        sum P log (P / a b^T) - (1 - t) log(1 - t)
            + sum u log(u / a) + sum v log(v / b) - 2 t log t.

    Args:
        filling: of u and v.
        paid: <r, f> + <c, g>.
        kept: 1 - t.
        epsilon: in units of the cost.
    """
    missing = max(filling.rows, filling.columns)
    entropy = filling.entropy - _x_log_x(kept) - 2 * _x_log_x(missing)
    costs = filling.costs / filling.columns if filling.columns > 0 else 0.0
    return paid + costs + epsilon * entropy


def fitting_scale(masses: Tensor, absent: Tensor, sums: Tensor, relative: float) -> Tensor:
    """Return kappa <= 1, (), such that no row or column of kappa P exceeds its mass.

    Of its sums (k,), each off by the share `relative` at the most, and 0 for `absent` points (k,).
    """
    fullest = (sums / (masses + absent)).amax(-1)
    return (fullest * (1 + relative)).clamp_min(1).reciprocal()


def filled_slack(relative: float, size: Number, spread: Number, epsilon: float) -> Number:
    """What to add to `filled_value`, (), if every sum is off by this share.

    What P pays changes by that share of <a, |f|> + <b, |g|>, in `size`; filling by at most that
    share of costs, which differ by `spread`, and logarithms by no more than those of the share.
    """
    return relative * (size + 4 * spread + 2 * epsilon * (1 - math.log(relative)))


class RowSums(NamedTuple):
    """Row sums (n,) of a symmetric plan without its diagonal, float64: an interval for each."""

    lowest: Tensor
    highest: Tensor


def diagonal_of(a: Tensor, f: Tensor, costs: Tensor, epsilon: Epsilon) -> Tensor:
    """Return log P_ii (n,) of the plan of f (n,) and f, for costs C_ii (n,); -inf without mass.

    The potential f is finite there, too.
    """
    return 2 * a.log() - torch.sub(costs, f, alpha=2) / epsilon


def sums_without(diagonal: Tensor, rows: Tensor, relative: float, spread: Tensor) -> RowSums:
    """Take log P_ii, off by `spread` (n,), from row sums r (n,), each off by a share `relative`."""
    low, high = (diagonal - spread).exp(), (diagonal + spread).exp()
    return RowSums(
        ((1 - relative) * rows - high).clamp_min_(0), ((1 + relative) * rows - low).clamp_min_(0)
    )


def balancing(a: Tensor, absent: Tensor, diagonal: Tensor, sums: RowSums) -> Tensor:
    """What it takes to balance a symmetric plan on its diagonal, (), in units of epsilon; no pass.

    A symmetric plan P whose row sums without the diagonal are z, in `sums`, gets the marginals a if
    its diagonal becomes a - z, where that is not negative. In general kappa P off the diagonal
    leaves at least half of P_ii on it if

        kappa = min(1, min_i (a_i - P_ii / 2) / z_i),    P_ii = a_i^2 exp((2 f_i - C_ii) / epsilon),

    or of a_i, where P_ii is more. As C_ii = 2 f_i - epsilon log(P_ii / a_i^2), the value is

        sum_i kappa z_i (2 f_i + epsilon log kappa) + Q_ii (C_ii + epsilon log(Q_ii / a_i^2))
            = 2 <a, f> + epsilon sum_i kappa z_i log kappa + Q_ii log(Q_ii / P_ii),

    with Q_ii = a_i - kappa z_i: convex in every z_i, so the worst is at an end of its interval. It
    differs from the dual's only in the second order of a - r: what moves stays in place, at the
    price that P already pays there.

    Args:
        a: masses (n,).
        absent: (n,) bool, where they are 0.
        diagonal: log P_ii (n,).
        sums: z.
    """
    room = torch.sub(a, torch.minimum(diagonal.exp(), a), alpha=0.5)
    # Infinite where nothing is off the diagonal; above 0 over 0 where there is no mass.
    ratios = (room + absent) / sums.highest
    kappa = ratios.amin(-1, keepdim=True).clamp_max(1)
    kept = kappa * torch.stack(sums)
    own = (a - kept).clamp_min_(0)
    ends = torch.xlogy(own, own).addcmul_(own, diagonal, value=-1).addcmul_(kept, kappa.log())
    return ends.amax(0).masked_fill_(absent, 0).sum(-1)


def _x_log_x(x: float) -> float:
    """Return x log x of a mass; 0 where there is none."""
    return x * math.log(x) if x > 0 else 0.0
