"""What a `Look` at the potentials of many problems proves, and what it tells the steps that follow.

A look leaves the rows of a cross term's plan exact and measures the error of the columns, so that
to certify takes no further pass. Upper bounds are those by oscillation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.segments import Look, Segments
from otdd_flash.solver.evidence import oscillation
from otdd_flash.solver.evidence.dual import dual_value, gain, self_dual, self_gain, self_shift
from otdd_flash.solver.evidence.scale import rounding_noise
from otdd_flash.solver.evidence.two_passes import rounding_of


class Evidence(NamedTuple):
    """What is known of the plans, (S,) each.

    Attributes:
        dual: dual value.
        gain: what the plain update adds to it at the least.
        noise: the size of marginal errors that rounding makes as a rule.
        floor: the largest that it may make.
        value: certified dual value, with the offset of the problem.
        lower: lower bound.
        upper: upper bound.
        error: bound on the marginal error, floor included.
    """

    dual: Tensor
    gain: Tensor
    noise: Tensor
    floor: Tensor
    value: Tensor
    lower: Tensor
    upper: Tensor
    error: Tensor


def evaluate_cross(segments: Segments, look: Look, epsilon: Tensor) -> Evidence:
    """Of the plan of f = T(g) and g; epsilon (S,). The upper bound is that of exact f and rows."""
    size = look.row_size + look.size
    floor, rounding = rounding_of(segments, look.row_size, size, look.gap, epsilon)
    error, exact = oscillation.total_error(look.gap, floor), look.row_value + look.value
    dual = dual_value(exact, look.mass, epsilon)
    value, highest = dual + segments.offset, torch.maximum(exact, dual) + segments.offset
    upper = oscillation.bound(highest, error, look.highest - look.lowest, segments.cost_spread)
    step = gain(look.mean_residual, look.mass, epsilon)
    noise = rounding_noise(segments, size, epsilon)
    return Evidence(dual, step, noise, floor, value, value - rounding, upper + rounding, error)


def evaluate_self(segments: Segments, look: Look, epsilon: Tensor) -> Evidence:
    """Of the plan of one potential, shifted to mass 1; epsilon (S,)."""
    shift, off = self_shift(look.mass, epsilon), oscillation.gap_at_mass_one(look.gap, look.mass)
    # Potentials are taken as they are stored.
    stored, size = torch.zeros_like(off), 2 * look.size + shift.abs()
    floor, rounding = rounding_of(segments, stored, size, off, epsilon)
    error, dual = oscillation.total_error(off, floor), self_dual(look.value, shift)
    value = dual + segments.offset
    upper = oscillation.self_bound(value, error, look.highest - look.lowest, segments.cost_spread)
    step = self_gain(look.mean_residual, shift)
    noise = rounding_noise(segments, 2 * look.size, epsilon)
    return Evidence(dual, step, noise, floor, value, value - rounding, upper + rounding, error)
