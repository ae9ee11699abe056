"""What errors of a plan's entries do to its sums and values, for one problem.

What is proved of one problem comes from one operation, `Operator.marginals`: row sums r and column
sums c of a plan P each of whose entries was computed once. In exact arithmetic it is the plan of
the same potentials and of costs C' near C,

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
| the same on a lattice, in float32 | measured, `operators.whole_points` | A, B |
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
"""

from __future__ import annotations

from torch import Tensor

from otdd_flash.cost.facts import CostFacts, Number, lesser
from otdd_flash.operators.base import Epsilon, Marginals

# Unit roundoff of float64.
DOUBLE_UNIT = 2.0**-53


def growth(sums: Tensor, errors: Tensor, epsilon: Epsilon) -> Tensor:
    """expm1(2 A_i / epsilon) of sums r (k,) and A (k,), and 0 where there is no mass.

    One side of (2) is half of <r, this>.
    """
    return (errors / (epsilon / 2)).expm1_().masked_fill_(sums == 0, 0)


def hidden_after_update(before: Number, largest: Number, factor: Number, moved: Number) -> Number:
    """What (2) allows columns, (), once rows are scaled by factors s (n,).

    No column grows by more than the largest factor, nor all of them by more than the rows do.

    Args:
        before: what it allows them before.
        largest: half of their largest `growth`.
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
