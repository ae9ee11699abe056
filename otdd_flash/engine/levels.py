"""Levels of epsilon on the way down to a small one, of S problems side by side.

A small epsilon is approached through levels, each ended at a coarse marginal error and started from
the potentials of those before (Schmitzer 2019, Stabilized sparse scaling algorithms for entropy
regularized transport problems). Levels are epsilon 2^k: no rounding makes two problems differ.

Well separated points are solved at once at any epsilon. So a solve first tries the final one, and
gives up when the first marginal error is large, or its decrease since the last evaluation forecasts
more iterations than a descent would take.

Between two levels the potential is taken for a linear function of epsilon,

    g(epsilon / 2) = g(epsilon) + (g(epsilon) - g(2 epsilon)) / 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.numbers import (
    Numbers,
    clamp,
    constant,
    is_finite,
    log,
    negation,
    ratio,
    where,
)
from otdd_flash.operators.base import Epsilon

# The first level over the mean cost, about. Above it a solve takes a few steps from anywhere.
TOP = 0.1

# The marginal error that ends a level, and the iterations that this takes, about.
LEVEL_TOLERANCE = 0.02
ITERATIONS_PER_LEVEL = 4

# The marginal error after the first evaluation of a try from which on it is given up at once.
FAR = 0.5

# The most levels: a float64 has no more.
MOST_LEVELS = 62


def first_level(epsilon: Epsilon, mean_cost: Tensor, share: float = TOP) -> Tensor:
    """The level epsilon 2^k, k >= 0, within a factor of 2 below a share of the mean cost (S,)."""
    _, exponent = torch.frexp(share * mean_cost / epsilon)
    exponent = (exponent - 1).clamp(0, MOST_LEVELS).to(torch.int64)
    return epsilon * (torch.ones_like(exponent) << exponent).double()


class Levels(NamedTuple):
    """Where problems are on their way down, (S,) float64 each.

    Attributes:
        level: epsilon to evaluate at.
        top: the first level of a descent.
        allowed: iterations that a try at the final epsilon may take; 0 if none is under way.
        error: the marginal error of its last evaluation; inf before.
        descended: 1 once there are potentials of a level above, else 0.
    """

    level: Numbers
    top: Numbers
    allowed: Numbers
    error: Numbers
    descended: Numbers

    @classmethod
    def trying(cls, epsilon: Epsilon, top: Tensor) -> Levels:
        """A try at the final epsilon, before the levels (S,) from `top` on if there are any."""
        _, ratio = torch.frexp(top / epsilon)
        allowed = ITERATIONS_PER_LEVEL * (ratio - 1).double()
        zero = torch.zeros_like(top)
        return cls(zero + epsilon, top, allowed, torch.full_like(top, torch.inf), zero)

    @classmethod
    def descending(cls, top: Numbers) -> Levels:
        """A descent from `top` (S,)."""
        zero = constant(top, 0.0)
        return cls(top, top, zero, constant(top, math.inf), zero)

    def hopeless(self, iterations: Numbers, error: Numbers, tolerance: Numbers) -> Numbers:
        """Whether a try, after so many iterations at a marginal error (S,), should give up."""
        decrease = log(ratio(self.error, error))
        forecast = iterations + ratio(log(error / tolerance), decrease)
        late = negation((error > 0) & (decrease > 0)) | (forecast > self.allowed)
        return (self.allowed > 0) & where(is_finite(self.error), late, error > FAR)

    def after(self, error: Numbers, ends: Numbers, gives_up: Numbers, epsilon: float) -> Levels:
        """After an evaluation: where its level ends (S,), or a try gives up (S,)."""
        below = clamp(where(ends, self.level / 2, self.level), epsilon)
        return Levels(
            where(gives_up, self.top, below),
            self.top,
            where(gives_up, 0.0, self.allowed),
            error,
            where(ends, 1.0, where(gives_up, 0.0, self.descended)),
        )
