"""What a `Look` at the potentials of many problems proves, and what it tells the steps that follow.

A look leaves the rows of a cross term's plan exact and measures the error of the columns, so that
to certify takes no further pass. Upper bounds are those by oscillation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence import oscillation
from otdd_flash.engine.evidence.dual import dual_value, gain, self_dual, self_gain, self_shift
from otdd_flash.engine.evidence.scale import rounding_noise
from otdd_flash.engine.evidence.two_passes import rounding_of
from otdd_flash.engine.segments import Costs, Look


class Evidence(NamedTuple):
    """What is known of the plans, (S,) each.

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

    dual: Tensor
    gain: Tensor
    noise: Tensor
    floor: Tensor
    reach: Tensor
    value: Tensor
    lower: Tensor
    upper: Tensor
    error: Tensor


def evaluate_cross(costs: Costs, look: Look, epsilon: Tensor) -> Evidence:
    """Of the plan of f = T(g) and g; epsilon (S,). The upper bound is that of exact f and rows."""
    size = look.row_size + look.size
    floor, rounding = rounding_of(costs, look.row_size, size, look.gap, epsilon)
    error, exact = oscillation.total_error(look.gap, floor), look.row_value + look.value
    dual = dual_value(exact, look.mass, epsilon)
    value, highest = dual + costs.offset, torch.maximum(exact, dual) + costs.offset
    upper = oscillation.bound(highest, error, look.highest - look.lowest, costs.cost_spread)
    step = gain(look.mean_residual, look.mass, epsilon)
    noise = rounding_noise(costs, size, epsilon)
    reach, ends = floor + costs.errors.reach / epsilon, (value - rounding, upper + rounding)
    return Evidence(dual, step, noise, floor, reach, value, *ends, error)


def evaluate_self(costs: Costs, look: Look, epsilon: Tensor) -> Evidence:
    """Of the plan of one potential, shifted to mass 1; epsilon (S,)."""
    shift, off = self_shift(look.mass, epsilon), oscillation.gap_at_mass_one(look.gap, look.mass)
    # Potentials are taken as they are stored.
    stored, size = torch.zeros_like(off), 2 * look.size + shift.abs()
    floor, rounding = rounding_of(costs, stored, size, off, epsilon)
    error, dual = oscillation.total_error(off, floor), self_dual(look.value, look.mass, shift)
    value = dual + costs.offset
    # Nothing is known of a plan whose mass is not.
    highest = torch.where(dual == -torch.inf, torch.inf, value)
    upper = oscillation.self_bound(highest, error, look.highest - look.lowest, costs.cost_spread)
    step = self_gain(look.mean_residual, shift)
    noise = rounding_noise(costs, 2 * look.size, epsilon)
    reach, ends = floor + costs.errors.reach / epsilon, (value - rounding, upper + rounding)
    return Evidence(dual, step, noise, floor, reach, value, *ends, error)


# (costs, look, epsilon (S,)): what it tells.
Reading = Callable[[Costs, Look, Tensor], Evidence]


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


CROSS = Form(evaluate_cross, damping=1.0, symmetric=False)
SELF = Form(evaluate_self, damping=0.5, symmetric=True)
