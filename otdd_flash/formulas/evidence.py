"""Bounds from an evaluation of the updates: dual values, upper bounds and errors of many plans.

An evaluation leaves the rows of a cross term's plan exact and measures the error of the columns, so
that these bounds take no further pass. Lower bounds are dual values, upper bounds those by
oscillation, and both allow for rounding. `engine` and `kernels.segments` fill an `Evaluation`,
operators the `PassErrors`, and `decision` computes the bounds and decides by them.
`solver.certificate` and `solver.solve` call single formulas. `solver.evidence` has the tighter
bounds of one problem, from a pass over all entries of its plan. A change must leave every bound
valid: `tests/solver/test_certificate_evidence.py` has problems that nearly attain them. The order
of the fields of `Evaluation`, `CostNumbers` and `PassErrors` is that of the numbers in
`kernels.segments`.

**The dual value** is a lower bound of OT for any potentials f and g:

    D(f, g) = <a, f> + <b, g> + epsilon (1 - sum P) <= OT.

The plan of a self term has one potential f, both of whose roles are lowered by half of a shift to
give it mass 1: D is 2 <a, f> less the shift. A plain update g <- g + r adds to D at the least

    <b, r> + epsilon (sum P - 1) = epsilon KL(b || c),    r = epsilon log(b / c),

with c the column sums. In a self term D is concave and symmetric: moving both potentials halfway
gains no less than moving one.

**The upper bound by oscillation** says how far OT is above a dual value whose plan misses its
marginals. A plan P of potentials f, g is optimal between its own marginals r, c. OT is convex in
the marginals, with optimal potentials f*, g* of the problem as subgradients, so that

    OT <= D + <f* - f, a - r> + <g* - g, b - c>.

With r = a, and as g* is a softmin of costs, whose oscillation max - min is at most R,

    OT <= D + ||c - b||_1 (osc g* + osc g) / 2,    osc g* <= R = max C - min C.

A self term moves both marginals by the same, which doubles the last term. Where epsilon is above
the costs or nearly all mass is missing, this is less than the primal value of `solver.evidence`;
elsewhere that is less.

**Rounding.** Each plan is evaluated by two softmins or one. A pass sums the exponentials of some
perturbed cost C^, and its sums are off by a share of at most rho: `PassErrors` has both, derived by
each way to compute scores. For a cross term let f~ be the potentials of rows as computed and stored
and f = T(g) the exact ones. P is the plan of f and g for the cost itself, whose rows are exact; P~
is the plan that the columns' pass has summed, to c~. Both passes enter, each with errors of its
own:

    P~_ij / P_ij = e^((f~_i - f_i + C_ij - C^_ij) / epsilon) (1 + rho),
    e^((f~_i - f_i) / epsilon) = (1 + rho) e^(stored error / epsilon) / M_i,
    M_i = sum_j P_ij / a_i e^((C - C^)_ij / epsilon),    C^ of the rows' pass.

| operation | bound | enters |
|---|---|---|
| costs of the rows' pass | mean, largest | f~ - f, and so c~; <a, f~> |
| sums of the rows' pass | sums | f~ - f, and so c~; <a, f~> |
| f as stored | stored abs f_i | f~ - f, and so c~; <a, f~> |
| costs of the columns' pass | mean, largest | c~, the mass |
| sums of the columns' pass, and of c~ | sums | c~, the mass |
| float64: exponents, logarithms | exponents (m + R) | f~ - f, c~, the mass |
| float64: <a, f>, <b, g>, offset | VALUE_TRIFLE (m + R + abs offset + epsilon) | the value |

Let theta be the sum of all largest ones over epsilon: with |e^x - 1| <= |x| e^|x| twice,

    sum_ij |P~_ij - P_ij| <= growth sum_ij P_ij theta_ij,      growth = e^(theta + theta e^theta),

because e^-theta <= 1 / mean e^x <= mean e^-x. That is the floor: it bounds the difference of the
marginal error that was measured and the true one. The mean over P needs its marginals, of which the
columns' are off by the measured error and the floor; so `mean` counts 1 + t peak times, t at most
2, and never more than `largest`. A self term has one pass and divides by its mass, which doubles
the error of its sums: the same floor, without the error of stored potentials.

Value. The computed value is a dual one for C^, and OT(C^) <= OT(C) + <P*, C^ - C>: the lower bound
moves by `mean`, by epsilon sums times the mass, and by float64's rounding. In the upper bound,
<a, f> + <b, g> + ||c - b||_1 (osc g + R) / 2 with R that of the cost itself, T is concave in the
cost: <a, f> <= <a, f~> + <P^, C - C^> + epsilon sums + <a, |f~|> stored, for P^ of the rows' pass.
A self term shifts by epsilon log of its mass, concave too. So both ends move by `Rounding.value`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from otdd_flash.formulas import operations as ops
from otdd_flash.formulas.operations import Numbers

INFINITY = math.inf

# The range in which a plan's mass can be computed with: apart from 0 and infinity.
LEAST_MASS, MOST_MASS = 1e-300, 1e300

# The largest L1 distance of two marginals of mass 1.
MOST_ERROR = 2.0

# Rounding errors of float64, relative to the largest number that enters. Of exponents: 32 roundings
# of 2^-53 in two passes. Of dual values, sums over up to 2^22 points, in blocks of 256 and their
# lanes one after the other or sixteen at a time: at most 2^15 roundings.
TRIFLE, VALUE_TRIFLE = 2.0**-48, 2.0**-38


class PassErrors(NamedTuple):
    """Bounds on the rounding errors of one pass over the scores of each problem, (S,) float64 each.

    The sums of a pass are those of some perturbed cost C^ times 1 + rho, |rho| <= `sums`, another
    C^ for rows than for columns.

    Attributes:
        mean: bound on sum_ij P_ij |C^_ij - C_ij| over a plan P with the masses as marginals.
        largest: bound on max_ij |C^_ij - C_ij|.
        peak: over a plan whose marginals are t off, the mean is at most (1 + t peak) `mean`.
        sums: relative error of a row's or a column's sum.
        stored: relative error of potentials of rows as they are stored.
        offset: error of `offset`, in units of the cost.
        potentials: relative error of potentials of both sides, where the certificate rounds them.
        reach: in units of the cost, errors that keep iterations from lower marginal errors, but
            leave the measured ones correct.
        exponents: float64 rounding of exponents, relative to potentials and the spread of costs.
    """

    mean: Numbers
    largest: Numbers
    peak: Numbers
    sums: Numbers
    stored: Numbers
    offset: Numbers
    potentials: Numbers
    reach: Numbers
    exponents: Numbers


class CostNumbers(NamedTuple):
    """Facts and error bounds of the costs of S problems, (S,) float64 each.

    Attributes:
        mean_cost: bound on the mean |C'| over a plan.
        spread: R >= max C' - min C' over the support.
        offset: <a, p> + <b, q>.
        errors: bounds on the rounding errors of a pass.
        unit: unit roundoff of potentials, one for all problems.
        unit_of_sums: that of sums of exponentials.
    """

    mean_cost: Numbers
    spread: Numbers
    offset: Numbers
    errors: PassErrors
    unit: Numbers
    unit_of_sums: Numbers


class Products(NamedTuple):
    """Inner products of a vector with stored pairs: (S, memory) each, or lists of one problem."""

    steps: Any
    differences: Any


class Evaluation(NamedTuple):
    """The numbers of an evaluation of the candidates g; (S,) float64 each if not said otherwise.

    The plan is that of g and the update f of the rows, in a self term f = g, and r is the residual
    there. The step s leads from the potential accepted last to g, y is the change of r over it, and
    1 is the constant vector. Inner products are weighted by the masses. Numbers that depend on the
    kind of the marginals are stated for exact ones; `marginals` has those of others.

    Attributes:
        row_value: <a, f>, the rows' part of the dual value.
        row_size: <a, |f|>.
        value: <1, g>, the columns' part of the dual value.
        size: <1, |g|>.
        lowest: min g over the support.
        highest: max g over the support.
        gap: sum_j b_j |exp(-r_j / epsilon) - 1|, the L1 error of the plan's column sums, over the
            mass that moves.
        mass: sum_j b_j exp(-r_j / epsilon), of the whole plan.
        mean_step: <1, s>.
        mean_difference: <1, y>.
        mean_residual: <1, r>.
        step_step: <s, s>.
        step_difference: <s, y>.
        difference_difference: <y, y>.
        step_residual: <s, r>.
        difference_residual: <y, r>.
        remembered_differences: `Products` of y with the stored pairs.
        remembered_residual: `Products` of r with them.
        raised: <1, r>, what the update of the columns adds to the dual value, less epsilon
            (mass - 1).
    """

    row_value: Numbers
    row_size: Numbers
    value: Numbers
    size: Numbers
    lowest: Numbers
    highest: Numbers
    gap: Numbers
    mass: Numbers
    mean_step: Numbers
    mean_difference: Numbers
    mean_residual: Numbers
    step_step: Numbers
    step_difference: Numbers
    difference_difference: Numbers
    step_residual: Numbers
    difference_residual: Numbers
    remembered_differences: Any
    remembered_residual: Any
    raised: Numbers


class Evidence(NamedTuple):
    """Bounds and errors of the plans, (S,) each.

    Attributes:
        dual: dual value.
        gain: the least that the plain update adds to it.
        noise: typical marginal error that rounding causes.
        floor: the largest that it may cause.
        reach: marginal error below which iterations may make no progress; at least `floor`.
        value: certified dual value, with the offset of the problem.
        lower: lower bound.
        upper: upper bound.
        error: bound on the marginal error, floor included.
    """

    dual: Numbers
    gain: Numbers
    noise: Numbers
    floor: Numbers
    reach: Numbers
    value: Numbers
    lower: Numbers
    upper: Numbers
    error: Numbers


def evaluate_cross(costs: CostNumbers, found: Evaluation, epsilon: Numbers) -> Evidence:
    """Bound value and marginal error of cross terms by the plan of f = T(g) and g; epsilon (S,)."""
    size = found.row_size + found.size
    floor, rounding = rounding_of(costs, found.row_size, size, found.gap, epsilon)
    error, exact = total_error(found.gap, floor), found.row_value + found.value
    dual = dual_value(exact, found.mass, epsilon)
    # The upper bound is that of exact rows: mass 1, so that the dual value is <a, f> + <b, g>.
    highest, osc = at_least(dual, exact) + costs.offset, found.highest - found.lowest
    upper = oscillation_bound(highest, error, osc, costs.spread)
    gain = found.raised + epsilon * (found.mass - 1)
    noise, reach = rounding_noise(costs, size, epsilon), floor + costs.errors.reach / epsilon
    value = dual + costs.offset
    lower, upper = value - rounding, upper + rounding
    return Evidence(dual, gain, noise, floor, reach, value, lower, upper, error)


def evaluate_self(costs: CostNumbers, found: Evaluation, epsilon: Numbers) -> Evidence:
    """Bound value and marginal error of self terms by one potential, shifted to mass 1."""
    # f less half of epsilon log(sum P) has a plan of mass 1, if a float64 holds it.
    shift = epsilon * ops.log(at_most(at_least(found.mass, LEAST_MASS), MOST_MASS))
    dual = ops.where(found.mass <= MOST_MASS, 2 * found.value - shift, -INFINITY)
    gap = gap_at_mass_one(found.gap, found.mass)
    # Potentials count as stored, so that storing them is no error.
    floor, rounding = rounding_of(costs, 0.0, 2 * found.size + ops.abs(shift), gap, epsilon)
    error, value, osc = total_error(gap, floor), dual + costs.offset, found.highest - found.lowest
    # Where the mass overflows, nothing is known of the plan.
    highest = ops.where(dual == -INFINITY, INFINITY, value)
    upper = oscillation_bound(highest, 2 * error, osc, costs.spread)
    gain, noise = found.raised + shift, rounding_noise(costs, 2 * found.size, epsilon)
    reach, lower, upper = floor + costs.errors.reach / epsilon, value - rounding, upper + rounding
    return Evidence(dual, gain, noise, floor, reach, value, lower, upper, error)


def dual_value(linear: Any, mass: Any, epsilon: Any) -> Any:
    """Return D(f, g), where `linear` is <a, f> + <b, g> and `mass` is sum P."""
    return linear + epsilon * (1 - mass)


def oscillation_bound(dual: Any, error: Any, osc: Any, spread: Any) -> Any:
    """Return D + ||c - b||_1 (osc g + R) / 2, with R in `spread`; twice the error in self terms."""
    return dual + error * ((osc + spread) / 2)


def gap_at_mass_one(gap: Numbers, mass: Numbers) -> Numbers:
    """Bound ||r / t - a||_1 of a plan with row sums r and mass t: by ||r - a||_1 + |t - 1|."""
    return gap + ops.abs(mass - 1)


def total_error(gap: Numbers, floor: Numbers) -> Numbers:
    """Bound a marginal error: by what was measured, plus what rounding may hide."""
    return at_most(gap + floor, MOST_ERROR)


def rounding_noise(costs: CostNumbers, size: Numbers, epsilon: Numbers) -> Numbers:
    """Estimate the marginal error that rounding typically causes; no bound, steps are judged by it.

    It is the floor to first order, of rounded potentials and sums alone.
    """
    return costs.unit * (size + 2 * costs.mean_cost) / epsilon + 4 * costs.unit_of_sums


class Rounding(NamedTuple):
    """Bounds on the rounding errors, () or (S,), of the marginal error and of the value."""

    floor: Numbers
    value: Numbers


def rounding_of(
    costs: CostNumbers, stored: Numbers, size: Numbers, off: Numbers, epsilon: Numbers
) -> Rounding:
    """Bound the rounding errors of marginal error and value, from numbers (S,).

    `stored` is <a, |f|> of potentials that a pass has computed and rounded, 0 without any, `size`
    is <a, |f|> + <b, |g|>, and `off` the marginal error as measured.
    """
    errors, spread = costs.errors, costs.spread
    trifles = errors.exponents * (size + spread)
    whole = VALUE_TRIFLE * (size + spread + ops.abs(costs.offset) + epsilon)
    kept = errors.stored * stored
    # No |f_i| exceeds <a, |f|> by more than the spread of the cost.
    largest = 2 * errors.largest + (kept + errors.stored * spread + trifles)
    theta = largest / epsilon + 2 * errors.sums
    growth = ops.exp(theta + theta * ops.exp(theta))
    # The mean error of the costs over a plan whose marginals are measured to be `off`.
    most = at_most(off + 2 * growth * theta, MOST_ERROR)
    mean = at_most(errors.mean * (1 + most * errors.peak), errors.largest)
    others = kept + errors.potentials * size + trifles
    floor = growth * ((2 * mean + others) / epsilon + 2 * errors.sums)
    # A sum off by a share rho below 1/2 has a logarithm off by at most rho (1 + rho).
    of_sums = epsilon * errors.sums * (1 + errors.sums) * (1 + off)
    return Rounding(floor, mean + kept + of_sums + errors.offset + whole)


def at_least(value: Numbers, least: Numbers) -> Numbers:
    """Return the larger number; NaN if `value` is."""
    return ops.where(value < least, least, value)


def at_most(value: Numbers, most: Numbers) -> Numbers:
    """Return the lesser number; NaN if `value` is."""
    return ops.where(value > most, most, value)
