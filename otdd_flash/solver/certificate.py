"""Value and two-sided bounds of a transport term from any potentials.

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
| C_ij rounded to float32, where costs are stored | u abs C_ij | rho |
| PyTorch: exponents and exp, float64 | 8 v (abs f_i + abs g_j + M_i + N_j) | A, B |
| PyTorch: sums of n or m terms, float64 | (n + m + 8) v of the sum | `relative_error` |
| Triton: points in fixed point of 22 or 29 bits | measured, `operators.fixed_point` | A, B |
| Triton: products of these | exact, but for digits left out, `kernels.digits` | A, B |
| Triton: exponents in float64, exp2, sums | `kernels.plan_marginals` | A, B, `relative_error` |
| entries below 2^-126 of a product of masses | lost: less than 2^-126 in all | none |
| sums over points of numbers of size s, float64, any order | (n + m) v s | both ends |

`rounding_floor` is (2) to first order, with what keeps half-steps from the solution: potentials and
exponents, of the size of a cost, in the type of the potentials. A tolerance below twice as much is
refused. The model is a worst case for what enters a bound; for the half-steps it is a scale.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import Epsilon, Marginals, Operator
from otdd_flash.solver.epsilon import EpsilonTooSmall, or_double
from otdd_flash.solver.polytope import TINY, RowSums, balanced_value, diagonal_of, filled_value

SAFETY = 2.0

# Unit roundoff of float64.
DOUBLE_UNIT = 2.0**-53

# By how many units in its last place a column potential is lowered, so that roundings of the
# softmins that it comes from rarely leave a column with too much mass. Only widths depend on it.
MARGIN = 4.0

# A scaling by less than this share of the missing mass, or so many units, is taken as it is.
MOST_SCALED, SCALED_UNITS = 0.25, 16.0


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


class Plan(NamedTuple):
    """Potentials f (n,) and g (m,), float64, the sums of their plan, and A and B of (2)."""

    f: Tensor
    g: Tensor
    sums: Marginals
    row_errors: Tensor
    column_errors: Tensor
    passes: int = 1


def certify(
    operator: Operator,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    updated: Tensor | None = None,
    *,
    polished: bool = False,
) -> Certificate:
    """One row update from g (m,), near f (n,), one column update, one pass for all sums.

    With `updated`, which is T'(f), of an f that is T(g) already, the last pass alone. Where the
    rounding of these updates shows, or if `polished`, they are done once more by exact sums, in two
    passes.

    Raises:
        EpsilonTooSmall: the plan's mass overflows.
    """
    if updated is None:
        f = operator.softmin_rows(g, epsilon, f)
        updated = operator.softmin_columns(f, epsilon, g)
    a, b, unit = operator.a, operator.b, torch.finfo(operator.dtype).eps / 2
    g = torch.where(b > 0, torch.minimum(g, updated), updated)
    g = (g - MARGIN * unit * g.abs()).double()
    plan = _plan(operator, f.double(), g, epsilon, accurate=polished)
    lost = _lost(plan, (a, b), epsilon)
    kappa, mass, any_lost = torch.stack(
        (_scaling(operator, plan.sums), plan.sums.columns.sum(), lost.any)
    ).tolist()
    enough = 1 - kappa <= MOST_SCALED * (1 - mass) + SCALED_UNITS * unit
    if polished or any_lost or not enough:
        # Both updates once more, by exact sums; points of which errors may hide all get less than
        # these could make up for.
        f = plan.f + epsilon * _factors(operator, plan, lost).log()
        f = torch.where(lost.rows, plan.f - lost.row_drop, f)
        g = torch.where(lost.columns, plan.g - lost.column_drop, plan.g)
        plan = _plan(operator, f, g, epsilon, accurate=polished)
        g = g - epsilon * _excess(plan.sums.columns, b)
        plan = _plan(operator, f, g, epsilon, accurate=polished)._replace(passes=3)
    return _proved(operator, plan, lost, epsilon)


def certify_self(
    operator: Operator, f: Tensor, epsilon: float, *, accurate: bool = False
) -> Certificate:
    """The plan of one potential f (n,) between a cloud and itself: one pass.

    The plan is symmetric: it is the mean of the computed one and its transpose, whose costs are
    as near to C. It is given mass 1 by a constant.

    Raises:
        EpsilonTooSmall: the plan's mass overflows.
    """
    a, plan = operator.a, _self_plan(operator, f.double(), epsilon, accurate=accurate)
    lost = _lost(plan, (a, a), epsilon)
    if bool(lost.any):
        lowered = torch.where(lost.rows, plan.f - lost.row_drop, plan.f)
        plan = _self_plan(operator, lowered, epsilon, accurate=accurate)._replace(passes=2)
    sums = plan.sums
    total = sums.rows.sum().clamp_min(TINY)
    rows, f = sums.rows / total, plan.f - epsilon / 2 * total.log()
    returned, relative = f.to(operator.dtype), sums.relative_error
    errors = torch.where(lost.rows, 0, plan.row_errors) + (f - returned.double()).abs()
    own_errors = 4 * (sums.row_errors + sums.cost_rounding * operator.own_costs().abs())
    diagonal = diagonal_of(operator, f, own_errors, epsilon)
    outside = RowSums(
        ((1 - relative) * rows - diagonal.highest).clamp_min(0),
        ((1 + relative) * rows - diagonal.lowest).clamp_min(0),
    )
    gap, noise, dual, swing, primal, size, cost_errors, largest = torch.stack(
        (
            (rows - a).abs().sum(),
            2 * _hidden(rows, errors, epsilon) + lost.hidden,
            2 * _mean(a, f),
            oscillation(f, a > 0),
            balanced_value(operator, f, outside, epsilon),
            2 * _mean(a, f.abs()),
            2 * _mean(a, sums.row_errors),
            2 * _largest(sums.row_errors, a),
        )
    ).tolist()
    spread = _spread(operator, sums, largest)
    upper = min(primal, dual + gap * (swing + spread) + _slack(relative, 2 * swing, spread))
    bounds = _outwards(operator, sums, (dual, upper), cost_errors, size, epsilon)
    hidden = noise + 2 * relative
    return Certificate(returned, returned, dual, bounds, gap + hidden, hidden, plan.passes)


def _proved(operator: Operator, plan: Plan, lost: Lost, epsilon: float) -> Certificate:
    """What the plan of a cross term proves, after a row update of all rows but the lost ones."""
    a, b, sums, g = operator.a, operator.b, plan.sums, plan.g
    factors = _factors(operator, plan, lost)
    f, rows = plan.f + epsilon * factors.log(), sums.rows * factors
    returned = f.to(operator.dtype), g.to(operator.dtype)
    row_errors, column_errors = (
        torch.where(without, 0, errors) + (exact - rounded.double()).abs()
        for without, errors, exact, rounded in (
            (lost.rows, plan.row_errors, f, returned[0]),
            (lost.columns, plan.column_errors, g, returned[1]),
        )
    )
    noise = _hidden(rows, row_errors, epsilon) + lost.hidden
    noise = noise + _hidden_after(sums, factors, column_errors, epsilon)
    kappa = _scaling(operator, sums)
    scaled = plan.f + epsilon * kappa.log(), g
    gap, row_gap, noise, dual, swing, row_swing, primal, size, cost_errors, largest = torch.stack(
        (
            _column_gap(sums, factors, b),
            torch.where(factors == 1, (rows - a).abs(), 0).sum(),
            noise,
            _mean(a, f) + _mean(b, g) + epsilon * (1 - rows.sum()),
            oscillation(g, b > 0),
            oscillation(f, a > 0),
            filled_value(
                operator,
                scaled,
                (kappa * sums.rows, kappa * sums.columns),
                epsilon,
            ),
            _mean(a, f.abs()) + _mean(b, g.abs()),
            _mean(a, sums.row_errors) + _mean(b, sums.column_errors),
            _largest(sums.row_errors, a) + _largest(sums.column_errors, b),
        )
    ).tolist()
    relative, spread = sums.relative_error, _spread(operator, sums, largest)
    upper = primal + relative * (size + 4 * spread + 2 * epsilon * (1 - math.log(relative)))
    if row_gap == 0:
        slack = _slack(relative, swing + row_swing, spread)
        upper = min(upper, dual + gap * (swing + spread) / 2 + slack)
    bounds = _outwards(operator, sums, (dual, upper), cost_errors, size, epsilon)
    hidden = noise + 2 * relative
    error = max(gap, row_gap) + hidden
    return Certificate(*returned, dual, bounds, error, hidden, plan.passes)


def column_marginal(masses: Tensor, g: Tensor, softmin: Tensor, epsilon: Epsilon) -> Tensor:
    """Column sums b_j exp((g_j - T(f)_j) / epsilon) of the plan of (f, g), given T(f), float64.

    The half-step that would update g thus yields the marginal of the plan before it, for free.
    """
    exponent = (g.double() - softmin.double()) / epsilon
    return masses * torch.where(masses > 0, exponent, 0).exp()


def magnitude(operator: Operator, f: Tensor, g: Tensor) -> Tensor:
    """<a, |f|> + <b, |g|>: a point without mass does not count, however far away it is."""
    return operator.a @ f.abs().double() + operator.b @ g.abs().double()


def hidden_error(operator: Operator, size: float, epsilon: float) -> float:
    """What a certificate will call hidden, with m = `magnitude` of the potentials.

    (2) to first order, of the mean error of the costs and of potentials rounded to their type.
    """
    unit = torch.finfo(operator.dtype).eps / 2
    return (operator.cost_error + unit * size) / epsilon + unit


def rounding_floor(operator: Operator, size: float, epsilon: float) -> float:
    """Marginal error that rounding causes, with m = `magnitude` of the potentials.

    What a certificate will call hidden, and what exponents of the size of a cost in the type of the
    potentials keep half-steps from.
    """
    unit = torch.finfo(operator.dtype).eps / 2
    cost = operator.mean_cost - 2 * min(0.0, operator.cost_range.lowest)
    return hidden_error(operator, size, epsilon) + unit * cost / epsilon


def oscillation(potential: Tensor, support: Tensor) -> Tensor:
    """Max - min of a potential over the points that carry mass, float64."""
    lowest = torch.where(support, potential, torch.inf).min()
    return (torch.where(support, potential, -torch.inf).max() - lowest).double()


def cost_spread(operator: Operator) -> float:
    """R >= max C - min C over the support."""
    return operator.cost_range.highest - operator.cost_range.lowest


def absent(operator: Operator) -> float:
    """Stands for a potential of -inf: finite in float32, and far below any cost."""
    return -min(1e37, max(1e20, 1e6 * max(map(abs, operator.cost_range))))


def _plan(operator: Operator, f: Tensor, g: Tensor, epsilon: float, *, accurate: bool) -> Plan:
    """Evaluate the plan of f (n,) and g (m,), float64.

    Raises:
        EpsilonTooSmall: its mass overflows.
    """
    sums = operator.marginals(f, g, epsilon, accurate=accurate)
    if not math.isfinite(float(sums.rows.sum())):
        raise EpsilonTooSmall(
            "some costs are too far above the mean at {given}: rounding alone makes the plan's "
            f"mass overflow; raise {{name}}{or_double(operator.dtype)} or leave out points that "
            "are far from all others",
            epsilon,
        )
    # A cost is f_i + g_j less epsilon times the exponent e. As P_ij <= r_i, e <= log(r_i / a_i) -
    # log b_j; where it is negative, |e| exp(e) < 1.
    rows, columns = operator.a > 0, operator.b > 0
    above = torch.where(rows, (sums.rows / operator.a).log(), 0).clamp_min(0) + 1
    below = torch.where(columns, -operator.b.log(), 0)
    row_errors = sums.row_errors + sums.cost_rounding * (f.abs() + epsilon * above)
    column_errors = sums.column_errors + sums.cost_rounding * (g.abs() + epsilon * below)
    return Plan(f, g, sums, row_errors, column_errors)


def _self_plan(operator: Operator, f: Tensor, epsilon: float, *, accurate: bool) -> Plan:
    """The plan of f (n,) and f, made symmetric."""
    plan = _plan(operator, f, f, epsilon, accurate=accurate)
    sums = plan.sums
    rows, errors = (
        (sums.rows + sums.columns) / 2,
        torch.maximum(sums.row_errors, sums.column_errors),
    )
    sums = sums._replace(rows=rows, columns=rows, row_errors=errors, column_errors=errors)
    errors = torch.maximum(plan.row_errors, plan.column_errors)
    return Plan(f, f, sums, errors, errors)


class Lost(NamedTuple):
    """Points with mass of which errors of costs may hide all.

    Attributes:
        rows: (n,) bool.
        columns: (m,) bool.
        row_drop: (n,) by what the potentials of such rows are lowered, float64.
        column_drop: (m,) likewise of columns.
        hidden: () their masses: what rounding loses, and more than errors may make up for.
    """

    rows: Tensor
    columns: Tensor
    row_drop: Tensor
    column_drop: Tensor
    hidden: Tensor

    @property
    def any(self) -> Tensor:
        """1 if there are such points, else 0; () float64."""
        return (self.rows.any() | self.columns.any()).double()


def _lost(plan: Plan, masses: tuple[Tensor, Tensor], epsilon: float) -> Lost:
    """The points with 2 A_i > epsilon; lowered by 4 A_i they have at most a_i exp(-2 A_i / eps)."""
    points, drops, hidden = [], [], []
    for part, errors, mass in (
        (plan.sums.rows, plan.row_errors, masses[0]),
        (plan.sums.columns, plan.column_errors, masses[1]),
    ):
        lost = (mass > 0) & (2 * errors > epsilon)
        points.append(lost)
        drops.append(4 * errors + epsilon * _excess(part, mass))
        hidden.append(torch.where(lost, mass, 0).sum())
    return Lost(points[0], points[1], drops[0], drops[1], hidden[0] + hidden[1])


def _factors(operator: Operator, plan: Plan, lost: Lost) -> Tensor:
    """Of the row update, a / r (n,), and 1 for rows that are lost or not reached by the plan."""
    rows = plan.sums.rows
    return torch.where((operator.a > 0) & (rows > 0) & ~lost.rows, operator.a / rows, 1)


def _scaling(operator: Operator, sums: Marginals) -> Tensor:
    """Kappa <= 1, by which no row and column of a plan has more than its mass."""
    ratios = [
        torch.where(part > 0, masses / part, torch.inf).min()
        for part, masses in ((sums.rows, operator.a), (sums.columns, operator.b))
    ]
    return (torch.minimum(ratios[0], ratios[1]) / (1 + sums.relative_error)).clamp_max(1)


def _excess(part: Tensor, masses: Tensor) -> Tensor:
    """log(r_i / a_i) where it is positive, else 0."""
    return torch.where(part > masses, (part / masses).log(), 0)


def _column_gap(sums: Marginals, factors: Tensor, b: Tensor) -> Tensor:
    """L1 error of the columns after the row update by `factors` (n,)."""
    total = sums.rows.sum()
    gaps = [
        (sums.rows * (factors - k).abs()).sum() + (k * sums.columns - b).abs().sum()
        for k in (torch.ones_like(total), 1 / total.clamp_min(TINY))
    ]
    return torch.minimum(gaps[0], gaps[1])


def _hidden(sums: Tensor, errors: Tensor, epsilon: float) -> Tensor:
    """What errors of costs may hide of a plan: sum_i r_i expm1(2 A_i / epsilon) / 2."""
    return torch.where(sums > 0, sums * torch.expm1(2 * errors / epsilon), 0).sum() / 2


def _hidden_after(sums: Marginals, factors: Tensor, errors: Tensor, epsilon: float) -> Tensor:
    """The same of the columns, after the row update by `factors`: none grows by more than one."""
    before = _hidden(sums.columns, errors, epsilon)
    moved = (sums.rows * (factors - 1).abs()).sum()
    most = torch.where(sums.columns > 0, torch.expm1(2 * errors / epsilon), 0).max() / 2
    return torch.minimum(before * factors.max(), before + moved * most)


def _mean(masses: Tensor, potential: Tensor) -> Tensor:
    return torch.where(masses > 0, masses * potential, 0).sum()


def _largest(errors: Tensor, masses: Tensor) -> Tensor:
    return torch.where(masses > 0, errors, 0).max()


def _spread(operator: Operator, sums: Marginals, largest: float) -> float:
    """R of the perturbed costs, whose errors are `largest` and a share of themselves."""
    lowest, highest = operator.cost_range
    size = max(abs(lowest), abs(highest))
    return highest - lowest + 2 * (largest + sums.cost_rounding * size)


def _slack(relative: float, swing: float, spread: float) -> float:
    """What sums that are off by so much add to the bound by oscillation."""
    return 2 * relative * (swing + 2 * spread)


def _outwards(
    operator: Operator,
    sums: Marginals,
    ends: tuple[float, float],
    cost_errors: float,
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
    rounding = cost_errors + shares + sums.relative_error * epsilon + additions
    return dual - rounding, upper + rounding
