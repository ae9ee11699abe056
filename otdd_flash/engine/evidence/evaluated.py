"""The certificate of an `Evaluation` of many problems, and the numbers that the next steps need.

An evaluation leaves the rows of a cross term's plan exact and measures the error of the columns, so
that to certify takes no further pass. Upper bounds are those by oscillation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from otdd_flash.engine.evidence import oscillation
from otdd_flash.engine.evidence.dual import dual_value, gain, self_dual, self_gain, self_shift
from otdd_flash.engine.evidence.scale import rounding_noise
from otdd_flash.engine.evidence.two_passes import rounding_of
from otdd_flash.engine.numbers import Numbers, constant, maximum, where
from otdd_flash.engine.segments import Costs, Evaluation


class Evidence(NamedTuple):
    """Bounds and errors of the plans, (S,) each.

    Attributes:
        dual: dual value.
        gain: what the plain update adds to it at the least.
        noise: the size of marginal errors that rounding makes as a rule.
        floor: the largest that it may make.
        reach: marginal error below which steps may get nowhere; at least `floor`.
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


def evaluate_cross(costs: Costs, found: Evaluation, epsilon: Numbers) -> Evidence:
    """Bound the plan of f = T(g) and g, epsilon (S,); the upper bound takes exact f and rows."""
    size = found.row_size + found.size
    floor, rounding = rounding_of(costs, found.row_size, size, found.gap, epsilon)
    error, exact = oscillation.total_error(found.gap, floor), found.row_value + found.value
    dual = dual_value(exact, found.mass, epsilon)
    value, highest = dual + costs.offset, maximum(exact, dual) + costs.offset
    upper = oscillation.bound(highest, error, found.highest - found.lowest, costs.cost_spread)
    step = gain(found.mean_residual, found.mass, epsilon)
    noise = rounding_noise(costs, size, epsilon)
    reach, ends = floor + costs.errors.reach / epsilon, (value - rounding, upper + rounding)
    return Evidence(dual, step, noise, floor, reach, value, *ends, error)


def evaluate_self(costs: Costs, found: Evaluation, epsilon: Numbers) -> Evidence:
    """Bound the plan of one potential, shifted to mass 1; epsilon (S,)."""
    shift, off = self_shift(found.mass, epsilon), oscillation.gap_at_mass_one(found.gap, found.mass)
    # Potentials are taken as they are stored.
    stored, size = constant(off, 0.0), 2 * found.size + abs(shift)
    floor, rounding = rounding_of(costs, stored, size, off, epsilon)
    error, dual = oscillation.total_error(off, floor), self_dual(found.value, found.mass, shift)
    value = dual + costs.offset
    # Nothing is known of a plan whose mass is not.
    highest = where(dual == -math.inf, math.inf, value)
    upper = oscillation.self_bound(highest, error, found.highest - found.lowest, costs.cost_spread)
    step = self_gain(found.mean_residual, shift)
    noise = rounding_noise(costs, 2 * found.size, epsilon)
    reach, ends = floor + costs.errors.reach / epsilon, (value - rounding, upper + rounding)
    return Evidence(dual, step, noise, floor, reach, value, *ends, error)


# (costs, found, epsilon (S,)): what it tells.
Reading = Callable[[Costs, Evaluation, Numbers], Evidence]


class Form(NamedTuple):
    """What differs between cross terms and self terms.

    Attributes:
        reading: of an evaluation.
        damping: the plain update is g + damping r.
        symmetric: whether rows are columns.
    """

    reading: Reading
    damping: float
    symmetric: bool


CROSS = Form(evaluate_cross, damping=1.0, symmetric=False)
SELF = Form(evaluate_self, damping=0.5, symmetric=True)
