"""Value and two-sided bounds of a transport term from any potentials: what is proved, and how.

`cross_certificate` and `self_certificate` apply it.

What is proved comes from one operation, `Operator.marginals`: row sums r and column sums c of a
plan P each of whose entries was computed once. It is the plan, in exact arithmetic, of the
potentials at hand and of costs C' near C,

    |C'_ij - C_ij| <= A_i + B_j + rho |C_ij|,                                                 (1)

with A and B in the table below, and rho = u where costs are stored in float32, else 0. Everything
else is algebra on vectors in float64.

Perturbed costs. Let P* be an optimal plan of C and P' one of C'. By (1) and their marginals a, b

    OT(C') <= <C', P*> + epsilon KL(P*) <= OT(C) + eta,    OT(C) <= OT(C') + eta,
    eta = <a, A> + <b, B> + rho <|C|, P*>,

where <C, P*> <= OT(C) as KL is not negative. So bounds of OT(C') become bounds of OT(C) by moving
outwards by eta. No second order is neglected and no independence of roundings is assumed.

Lower bound. The dual value at any potentials. With r at hand, f is replaced by its row update
f + epsilon log(a / r), in float64, whose plan has row sums a and mass 1: the value is

    D = <a, f> + <b, g> + epsilon (1 - sum P).

Upper bound, the lesser of two.

1. Primal: the value of a plan that has the marginals exactly, of `polytope`. For a cross term g is
   first lowered to min(g, T'(f)), so that columns have at most the masses b; what is missing is
   filled up with a product. Rounding may leave a row or column with too much by a few units in the
   last place: the plan is scaled by kappa, a little below 1. A self term's plan is balanced on its
   diagonal.

2. Oscillation. P is optimal between its own marginals r, c, and the optimal value is convex in
   them, with the optimal potentials f*, g* as subgradients. With r = a,

       OT <= D + <g* - g, b - c> <= D + ||c - b||_1 (osc g* + osc g) / 2,
       osc g* <= R = max C - min C.

   Self term: both marginals move, OT <= D + ||r - a||_1 (osc f + R). This is the lesser one where
   epsilon is above the costs or nearly all mass is missing.

   The row update changes columns too. With row factors s_i = a_i / r_i and any number k

       ||P^T s - b||_1 <= sum_i r_i |s_i - k| + ||k c - b||_1;

   the least over k = 1 and k = 1 / sum P is taken.

Marginal error. Where the plan has mass, C_ij is f_i + g_j less epsilon times a moderate exponent,
so that rho |C_ij| can join A and B. The plan of C itself has P_ij exp(d_ij / epsilon), with |d_ij|
at most (1), for P_ij. As exp((s + t) / 2) <= (exp s + exp t) / 2, its marginals differ from r and c
in L1 by at most

    sum_ij P_ij (exp((A_i + B_j) / epsilon) - 1)
        <= sum_i r_i expm1(2 A_i / epsilon) / 2 + sum_j c_j expm1(2 B_j / epsilon) / 2.       (2)

What a returned potential loses to the type of the potentials is measured and added to A. A point
with 2 A_i > epsilon, of whose mass errors may hide all, gets a potential so low that they cannot
make up for it; its mass is missing, and filled up like any other.

Roundings, in units of u = 2^-24 (float32) and v = 2^-53 (float64); M_i + N_j bounds the sum of the
magnitudes of all that is added up in C_ij, `LabelledCost.magnitudes`.

| operation | bound | enters |
|---|---|---|
| C_ij in float64: a product of d terms, four additions | (2 d + 16) v (M_i + N_j) | A, B |
| the same on a lattice, in float32 | measured, `operators.whole_points` | A, B |
| C_ij rounded to float32, where costs are stored | u abs C_ij | rho |
| PyTorch: exponents and exp, float64 | 8 v (abs f_i + abs g_j + M_i + N_j) | A, B |
| PyTorch: sums of n or m terms, float64 | (n + m + 8) v of the sum | `relative_error` |
| Triton: points in fixed point of 24 or 32 bits | measured, `operators.fixed_point` | A, B |
| Triton: products of these | exact, but for what `kernels.digits` leaves out | A, B |
| Triton: exponents in float64, exp2, sums | `kernels.plan_entries` | A, B, `relative_error` |
| entries below 2^-125 of a product of masses | lost, and no sum of so little is scaled up | none |
| sums over points of numbers of size s, float64, any order | (n + m) v s | both ends |

`rounding_floor` is (2) to first order, with what keeps half-steps from the solution (`rounding`). A
tolerance below twice as much is refused. The model is a worst case for what enters a bound; for the
half-steps it is a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import Marginals, Operator

# Unit roundoff of float64.
DOUBLE_UNIT = 2.0**-53


class Certificate(NamedTuple):
    """Potentials after the certifying pass, and what they prove.

    `hidden` is the part of `marginal_error` that rounding may hide, `passes` counts evaluations of
    `Operator.marginals`.
    """

    f: Tensor
    g: Tensor
    value: float
    bounds: tuple[float, float]
    marginal_error: float
    hidden: float
    passes: int


def oscillation(potential: Tensor, support: Tensor) -> Tensor:
    """Max - min of a potential over the points that carry mass, float64."""
    lowest = torch.where(support, potential, torch.inf).min()
    return (torch.where(support, potential, -torch.inf).max() - lowest).double()


def cost_spread(operator: Operator) -> float:
    """R >= max C - min C over the support."""
    return operator.cost_range.highest - operator.cost_range.lowest


def spread_of(operator: Operator, sums: Marginals, largest: float) -> float:
    """R of the perturbed costs, whose errors are `largest` and a share of themselves."""
    lowest, highest = operator.cost_range
    size = max(abs(lowest), abs(highest))
    return highest - lowest + 2 * (largest + sums.cost_rounding * size)


def hidden_mass(sums: Tensor, errors: Tensor, epsilon: float) -> Tensor:
    """What errors of costs may hide of a plan: sum_i r_i expm1(2 A_i / epsilon) / 2."""
    return torch.where(sums > 0, sums * torch.expm1(2 * errors / epsilon), 0).sum() / 2


def where_mass(values: Tensor, masses: Tensor) -> Tensor:
    """Values (n,) where there is mass, and 0 elsewhere."""
    return torch.where(masses > 0, values, 0)


def slack_of(relative: float, swing: float, spread: float) -> float:
    """What sums that are off by so much add to the bound by oscillation."""
    return 2 * relative * (swing + 2 * spread)


def outwards(
    operator: Operator,
    sums: Marginals,
    ends: tuple[float, float],
    mean_error: float,
    size: float,
    epsilon: float,
) -> tuple[float, float]:
    """Bounds for C from the dual value and an upper bound for the perturbed costs.

    Where an error is a share of a cost, its mean over an optimal plan is that share of OT at the
    most, as KL >= 0, and of twice what costs are below 0.
    """
    dual, upper = ends[0], max(ends)
    negative = -min(0.0, operator.cost_range.lowest)
    shares = sums.cost_rounding * 2 * (abs(upper) + negative)
    additions = (sum(operator.shape) + 16) * DOUBLE_UNIT * (size + epsilon)
    rounding = mean_error + shares + sums.relative_error * epsilon + additions
    return dual - rounding, upper + rounding
