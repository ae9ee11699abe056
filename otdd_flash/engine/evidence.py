"""What a look at many problems proves: dual value, bounds, marginal error, and what rounding hides.

Cross terms. A look at g makes the rows of the plan exact and measures the error of its columns, so
the oscillation bound of `solver.certificate` needs no further pass. Self terms have one bound more:
of a plan with row sums r and mass t, ||r / t - a||_1 <= ||r - a||_1 + |t - 1|.

Rounding. A pass sums the exponentials of some perturbed cost, C^, up to a relative error of rho:
`segments.PassErrors` says how far both are off at most, and each kind of segments derives
it. For a cross term let f~ be the potentials of rows as computed and stored, f = T(g) the exact
ones, P the plan of f and g for the cost itself, whose rows are exact, and P~ what the columns' pass
has summed, c~. Both passes enter, as each has errors of its own:

    P~_ij / P_ij = e^((f~_i - f_i + C_ij - C^_ij) / epsilon) (1 + rho),
    e^((f~_i - f_i) / epsilon) = (1 + rho) e^(stored error / epsilon) / M_i,
    M_i = sum_j P_ij / a_i e^((C - C^)_ij / epsilon),    C^ of the rows' pass.

operation                              bound                         enters as
costs of the rows' pass                mean, largest                 f~ - f, and so c~; <a, f~>
sums of the rows' pass                 sums                          f~ - f, and so c~; <a, f~>
f as stored                            stored |f_i|                  f~ - f, and so c~; <a, f~>
costs of the columns' pass             mean, largest                 c~, the mass
sums of the columns' pass              sums                          c~, the mass
float64: exponents, logarithms         TRIFLE (m + R)                f~ - f, c~, the mass
float64: <a, f>, <b, g>, offset        VALUE_TRIFLE (m + R +         the value
                                         |offset| + epsilon)
float64: sums of c~                    sums                          c~, the mass

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

    <a, f> <= <a, f~> + <P^, C - C^> + epsilon sums + <a, |f~|> stored,    P^ of the rows' pass.

A self term shifts by epsilon log of its mass, concave too. So both ends move by `value_rounding`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.segments import Costs, Look

# What float64 loses, relative to the largest of what a number is made of. Of exponents: 32
# roundings of 2^-53 in two passes. Of dual values, sums over up to 2^22 points, in blocks of 256
# and their lanes one after the other or sixteen at a time: at most 2^15 roundings.
TRIFLE, VALUE_TRIFLE = 2.0**-48, 2.0**-38

# The L1 distance of two masses, at the most.
MOST_ERROR = 2.0

# The masses of a plan that a float64 tells from 0 and infinity.
LEAST_MASS, MOST_MASS = 1e-300, 1e300


class Shown(NamedTuple):
    """What a look tells of the plan, (S,) each.

    Attributes:
        dual: dual value.
        gain: what the plain update adds to it at the least.
        noise: the size of marginal errors that rounding makes as a rule.
        floor: the largest that it may make.
        reach: marginal error below which steps may get nowhere; at least `floor`.
        value: certified dual value.
        lower: lower bound.
        upper: upper bound.
        error: bound on the marginal error, floor included.
    """

    dual: Tensor
    gain: Tensor
    noise: Tensor
    floor: Tensor
    reach: Tensor
    value: Tensor
    lower: Tensor
    upper: Tensor
    error: Tensor


# (costs, look, epsilon (S,)): what it tells.
Reading = Callable[[Costs, Look, Tensor], Shown]


class Form(NamedTuple):
    """What tells problems between two clouds from those of one cloud with itself.

    Attributes:
        reading: of a look.
        damping: the plain update is g + damping r.
        symmetric: whether rows are columns.
    """

    reading: Reading
    damping: float
    symmetric: bool


def show_cross(costs: Costs, look: Look, epsilon: Tensor) -> Shown:
    """What a look tells of the plan of f = T(g) and g, whose row sums are exact.

    Upper bounds are those by oscillation, from exact f and the marginal error that they would have.
    """
    size = look.row_size + look.size
    floor, rounding = rounding_of(costs, Plan(look.row_size, size, look.gap), epsilon)
    error = (look.gap + floor).clamp_max(MOST_ERROR)
    # Of exact rows, whose mass is 1.
    exact = look.row_value + look.value
    dual = exact + epsilon * (1 - look.mass)
    value, highest = dual + costs.offset, torch.maximum(exact, dual) + costs.offset
    spread = (look.highest - look.lowest + costs.cost_spread) / 2
    return Shown(
        dual,
        gain=look.mean_residual + epsilon * (look.mass - 1),
        noise=rounding_noise(costs, size, epsilon),
        floor=floor,
        reach=floor + costs.errors.reach / epsilon,
        value=value,
        lower=value - rounding,
        upper=highest + error * spread + rounding,
        error=error,
    )


CROSS = Form(show_cross, damping=1.0, symmetric=False)


def show_self(costs: Costs, look: Look, epsilon: Tensor) -> Shown:
    """What a look tells of the plan of one potential, shifted to mass 1."""
    off = look.gap + (look.mass - 1).abs()
    # A potential a constant away has a mass beyond the range of floats, and gains what it should.
    shift = epsilon * look.mass.clamp(LEAST_MASS, MOST_MASS).log()
    size = 2 * look.size + shift.abs()
    # Potentials are taken as they are stored.
    floor, rounding = rounding_of(costs, Plan(torch.zeros_like(off), size, off), epsilon)
    error = (off + floor).clamp_max(MOST_ERROR)
    dual = torch.where(look.mass <= MOST_MASS, 2 * look.value - shift, -torch.inf)
    value = dual + costs.offset
    return Shown(
        dual,
        gain=look.mean_residual + shift,
        noise=rounding_noise(costs, 2 * look.size, epsilon),
        floor=floor,
        reach=floor + costs.errors.reach / epsilon,
        value=value,
        lower=value - rounding,
        upper=value + error * (look.highest - look.lowest + costs.cost_spread) + rounding,
        error=error,
    )


SELF = Form(show_self, damping=0.5, symmetric=True)


class Rounding(NamedTuple):
    """What rounding may have done to a look, (S,) each.

    Attributes:
        floor: to the marginal error.
        value: to the value and the bounds that follow from it.
    """

    floor: Tensor
    value: Tensor


class Plan(NamedTuple):
    """What rounding depends on, (S,) each.

    Attributes:
        stored: <a, |f|> of potentials that a pass has made and rounded; 0 without any.
        size: <a, |f|> + <b, |g|>.
        off: marginal error as measured.
    """

    stored: Tensor
    size: Tensor
    off: Tensor


def rounding_of(costs: Costs, plan: Plan, epsilon: Tensor | float) -> Rounding:
    """Worst cases, as derived above."""
    errors, spread = costs.errors, costs.cost_spread
    trifles = TRIFLE * (plan.size + spread)
    whole = VALUE_TRIFLE * (plan.size + spread + costs.offset.abs() + epsilon)
    stored = errors.stored * plan.stored
    # The largest |f| is that of the mean and of the spread of the cost.
    most_stored = stored + errors.stored * spread
    theta = (2 * errors.largest + most_stored + trifles) / epsilon + 2 * errors.sums
    growth = (theta + theta * theta.exp()).exp()
    off = (plan.off + 2 * growth * theta).clamp_max(MOST_ERROR)
    mean = torch.minimum(errors.mean * (1 + off * errors.peak), errors.largest)
    moved = 2 * mean + stored + errors.potentials * plan.size + trifles
    floor = growth * (moved / epsilon + 2 * errors.sums)
    sums = epsilon * errors.sums * (1 + plan.off)
    return Rounding(floor, mean + stored + sums + errors.offset + whole)


def rounding_noise(costs: Costs, size: Tensor, epsilon: Tensor | float) -> Tensor:
    """The size of marginal errors that rounding makes as a rule (S,).

    Quasi-Newton steps are judged by it. Nothing that is reported rests on it.
    """
    unit, unit_of_sums = (torch.finfo(dtype).eps / 2 for dtype in (costs.dtype, costs.sum_dtype))
    return unit * (size + 2 * costs.mean_cost) / epsilon + 4 * unit_of_sums
