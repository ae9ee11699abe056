"""What rounding may do to the plans of many problems, each evaluated by two softmins or one.

A pass sums the exponentials of some perturbed cost C^, and its sums are off by a share of at most
rho: `engine.segments.PassErrors` has both, and each kind of segments derives them. For a cross
term let f~ be the potentials of rows as computed and stored and f = T(g) the exact ones. P is the
plan of f and g for the cost itself, whose rows are exact; P~ is what the columns' pass has summed,
to c~. Both passes enter, each with errors of its own:

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

because e^-theta <= 1 / mean e^x <= mean e^-x. That is the floor: what is between the marginal error
that was measured and the true one. The mean over P needs its marginals, of which the columns' are
off by the measured error and the floor; so `mean` counts 1 + t peak times, t at most 2, and never
more than `largest`. A self term has one pass and divides by its mass, which doubles what its sums
are off: the same floor, without what is stored.

Value. What is computed is a dual value for C^, and OT(C^) <= OT(C) + <P*, C^ - C>: the lower bound
moves by `mean`, by epsilon sums times the mass, and by the trifles. In the upper bound, <a, f> +
<b, g> + ||c - b||_1 (osc g + R) / 2 with R that of the cost itself, T is concave in the cost:
<a, f> <= <a, f~> + <P^, C - C^> + epsilon sums + <a, |f~|> stored, for P^ of the rows' pass. A self
term shifts by epsilon log of its mass, concave too. So both ends move by `value`.
"""

from __future__ import annotations

from typing import NamedTuple

from otdd_flash.engine.evidence.oscillation import MOST_ERROR
from otdd_flash.engine.numbers import Numbers, clamp, exp, minimum
from otdd_flash.engine.segments import Costs, PassErrors
from otdd_flash.operators.base import Epsilon

# What float64 loses, relative to the largest of what a number is made of. Of exponents: 32
# roundings of 2^-53 in two passes. Of dual values, sums over up to 2^22 points, in blocks of 256
# and their lanes one after the other or sixteen at a time: at most 2^15 roundings.
TRIFLE, VALUE_TRIFLE = 2.0**-48, 2.0**-38


class Rounding(NamedTuple):
    """What rounding may have done, () or (S,): to the marginal error, and to the value."""

    floor: Numbers
    value: Numbers


def rounding_of(
    costs: Costs, stored: Numbers, size: Numbers, off: Numbers, epsilon: Epsilon
) -> Rounding:
    """Both bounds, from numbers (S,): the marginal error as measured is `off`.

    `stored` is <a, |f|> of potentials that a pass has made and rounded, 0 without any, and `size`
    is <a, |f|> + <b, |g|>.
    """
    errors, spread = costs.errors, costs.cost_spread
    trifles = errors.exponents * (size + spread)
    whole = VALUE_TRIFLE * (size + spread + abs(costs.offset) + epsilon)
    kept = errors.stored * stored
    # The largest |f| is that of the mean and of the spread of the cost.
    theta = exponent_error(errors, kept + errors.stored * spread + trifles, epsilon)
    mean = mean_error(errors, off, theta)
    others = kept + errors.potentials * size + trifles
    floor = hidden_floor(errors, mean, others, theta, epsilon)
    return Rounding(floor, value_rounding(errors, mean, kept, off, epsilon) + whole)


def exponent_error(errors: PassErrors, others: Numbers, epsilon: Epsilon) -> Numbers:
    """Return theta, the largest error of an exponent of two passes; `others` in cost units."""
    return (2 * errors.largest + others) / epsilon + 2 * errors.sums


def growth_of(theta: Numbers) -> Numbers:
    """Return e^(theta + theta e^theta), which turns first-order terms in theta into bounds."""
    return exp(theta + theta * exp(theta))


def mean_error(errors: PassErrors, off: Numbers, theta: Numbers) -> Numbers:
    """Mean error of the costs over a plan whose marginals are `off`, as measured."""
    most = clamp(off + 2 * growth_of(theta) * theta, most=MOST_ERROR)
    return minimum(errors.mean * (1 + most * errors.peak), errors.largest)


def hidden_floor(
    errors: PassErrors, mean: Numbers, others: Numbers, theta: Numbers, epsilon: Epsilon
) -> Numbers:
    """Bound on ||P~ - P||_1, from mean errors: of costs, and `others`, in units of the cost."""
    return growth_of(theta) * ((2 * mean + others) / epsilon + 2 * errors.sums)


def value_rounding(
    errors: PassErrors, mean: Numbers, kept: Numbers, off: Numbers, epsilon: Epsilon
) -> Numbers:
    """What errors of passes and of the offset may do to either end of the interval."""
    # A sum off by a share rho below 1/2 has a logarithm off by at most rho (1 + rho).
    of_sums = epsilon * errors.sums * (1 + errors.sums) * (1 + off)
    return mean + kept + of_sums + errors.offset
