"""Dual values, which are lower bounds of OT, and what the plain update adds to them.

    D(f, g) = <a, f> + <b, g> + epsilon (1 - sum P) <= OT    for any f and g

The plan of a self term has one potential f, both of whose roles are lowered by half of `self_shift`
to give it mass 1: D is 2 <a, f> less the shift.

All arguments and results have shape () or (S,), in units of the cost but for the mass, sum P.
"""

from __future__ import annotations

import math
from typing import Any

from otdd_flash.cost.facts import Number
from otdd_flash.engine.numbers import Numbers, clamp, log, where
from otdd_flash.operators.base import Epsilon

# The masses of a plan that a float64 tells from 0 and infinity.
LEAST_MASS, MOST_MASS = 1e-300, 1e300


def dual_value(paid: Number, mass: Number, epsilon: Any) -> Number:
    """Return D(f, g), where `paid` is <a, f> + <b, g>."""
    value: Number = paid + epsilon * (1 - mass)
    return value


def gain(mean_residual: Numbers, mass: Numbers, epsilon: Epsilon) -> Numbers:
    """What g <- g + r adds to D at the least: <b, r> + epsilon (sum P - 1) = epsilon KL(b || c).

    As r = epsilon log(b / c), with c the column sums (`quasi_newton`); `mean_residual` is <b, r>.
    """
    return mean_residual + epsilon * (mass - 1)


def self_shift(mass: Numbers, epsilon: Epsilon) -> Numbers:
    """Return epsilon log sum P: f less half of it has a plan of mass 1, if a float64 holds it."""
    return epsilon * log(clamp(mass, LEAST_MASS, MOST_MASS))


def self_dual(paid: Numbers, mass: Numbers, shift: Numbers) -> Numbers:
    """Return D of f less half the shift, where `paid` is <a, f>; -inf if the shift is too small."""
    return where(mass <= MOST_MASS, 2 * paid - shift, -math.inf)


def self_gain(mean_residual: Numbers, shift: Numbers) -> Numbers:
    """What the averaged update adds to D at the least, from <a, T(f) - f> before the shift.

    D is concave and symmetric: moving both potentials halfway gains no less than moving one.
    """
    return mean_residual + shift
