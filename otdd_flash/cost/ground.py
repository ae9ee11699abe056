"""The ground cost c(x, y), and how each choice of it becomes a squared distance.

    C_ij = lambda_x c(x_i, y_j) + lambda_y W[l_i, l_j]

    ground         c(x, y)                      transformed point   share, and separable terms
    sqeuclidean    ||x - y||^2                  x                   1
    cosine         1 - <x, y> / (||x|| ||y||)   x / ||x||           1/2
    inner          -<x, y>                      x                   1/2, p_i = -lambda_x ||x_i||^2/2

Between the transformed points z and w each is a share of the squared distance and, for `inner`,
separable terms, which depend on one side alone:

    lambda_x c(x_i, y_j) = share lambda_x ||z_i - w_j||^2 + p_i + q_j.

Entry points (`otdd`, `flows.run`, `derivatives.loss`, ...) make a `GroundCost`.
`operators.comparison` calls `transform` for the datasets that it compares, `labels.measuring`,
`ranking.index`, `shift.rows`, `sampling.comparison` and `study.study` for those that they measure
themselves. Operators and solvers know squared distances only, weighted by `GroundCost.squared`, so
no points may be transformed twice. `derivatives.gradient` and `flows.space` take gradients by
transformed points back to the given ones by `pull_back`.

Separable terms do not change the plan, add <a, p> + <b, q> to OT_epsilon and cancel in the debiased
divergence. A further ground cost needs its name in the choices of `arguments`, a share in `SHARES`
and a case in the methods of `GroundCost`; `tests/solver/test_ground_costs.py` compares every ground
cost with dense formulas.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.arguments import Ground, NotNegative, check_fields
from otdd_flash.cost.points import DOUBLE_UNIT, UNDERFLOW, in_float64, squared_norms
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples

# c(x, y) over the squared distance between the transformed points.
SHARES = {"sqeuclidean": 1.0, "cosine": 0.5, "inner": 0.5}


class Offset(NamedTuple):
    """The sum <a, p> + <b, q> of the separable terms in OT_epsilon, and a bound on its error."""

    value: float
    error: float


NO_OFFSET = Offset(0.0, 0.0)


@dataclass(frozen=True)
class GroundCost:
    """The ground cost C_ij = lambda_x c(x_i, y_j) + lambda_y W[l_i, l_j].

    Args:
        lambda_x: weight of the cost between features.
        lambda_y: weight of the squared distance between classes.
        ground: the cost c between features. `sqeuclidean`: ||x - y||^2. `cosine`: 1 - <x, y> /
            (||x|| ||y||); class distances are then measured between points of length 1. `inner`:
            -<x, y>, which defines no class distances.

    Raises:
        InputError: a weight is negative, both are 0, or the ground cost is unknown.
    """

    lambda_x: NotNegative = 0.5
    lambda_y: NotNegative = 0.5
    ground: Ground = "sqeuclidean"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lambda_x == self.lambda_y == 0:
            raise InputError("lambda_x and lambda_y are both 0, so every cost is 0; raise one")

    @property
    def squared(self) -> GroundCost:
        """The same cost as squared distances of transformed points, with their weight."""
        if self.ground == "sqeuclidean":
            return self
        return GroundCost(SHARES[self.ground] * self.lambda_x, self.lambda_y)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    def transform(self, samples: LabeledSamples) -> LabeledSamples:
        """Transform the samples: for `cosine` rows are divided by their lengths, in float64.

        Raises:
            InputError: a row is 0.
        """
        if self.ground != "cosine":
            return samples
        return replace(samples, features=directions(samples.features, samples.name))

    def pull_back(self, points: Tensor, gradient: Tensor) -> Tensor:
        """Pull the gradient (n, d) by the transformed points back to the given points."""
        if self.ground != "cosine":
            return gradient
        # d(x / |x|) = (I - z z^T) / |x| dx.
        out = torch.empty_like(points)
        for part, rows in in_float64(points):
            # As for `directions`.
            largest = rows.abs().amax(1, keepdim=True)
            scaled = rows.div_(largest)
            lengths = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
            units, by_units = scaled / lengths, gradient[part].double()
            along = (by_units * units).sum(1, keepdim=True)
            out[part] = (by_units - along * units) / lengths / largest
        return out

    def one_side(self, points: Tensor) -> Tensor | None:
        """Return the separable terms p (n,), float64, of points (n, d); None without any."""
        if self.ground != "inner":
            return None
        # Half of lambda_x may underflow.
        return squared_norms(points) / 2 * -self.lambda_x

    def offset(self, source: LabeledSamples, target: LabeledSamples) -> Offset:
        """Return <a, p> + <b, q>, which OT_epsilon contains, with a bound on its rounding error."""
        of_rows, of_columns = (self.one_side(side.features) for side in (source, target))
        if of_rows is None or of_columns is None:
            return NO_OFFSET
        value = float(
            source.masses.to(of_rows.device) @ of_rows
            + target.masses.to(of_columns.device) @ of_columns
        )
        # All summands have one sign. Some products of each may underflow.
        additions = len(source) + len(target) + source.dim + 8
        lost = additions * UNDERFLOW * max(1.0, self.lambda_x)
        return Offset(value, additions * DOUBLE_UNIT * abs(value) + lost)

    def error(self, dim: int) -> float:
        """Bound the float64 error of the cost between transformed points, in units of the cost.

        A direction has an error of at most delta = (d / 2 + 8) u, its squared distance from another
        one of 8 delta + 4 delta^2.
        """
        if self.ground != "cosine":
            return 0.0
        return SHARES[self.ground] * self.lambda_x * 9 * (dim / 2 + 8) * DOUBLE_UNIT

    def size(self, source: LabeledSamples, target: LabeledSamples) -> float | None:
        """Return the feature part of the unit of `epsilon_relative`; None if it is the mean cost.

        It is lambda_x times the mean of ||x_i|| ||y_j|| for `inner`, whose mean may have any sign.
        """
        if self.ground != "inner":
            return None
        lengths = (
            float(side.masses @ squared_norms(side.features).sqrt()) for side in (source, target)
        )
        first, second = lengths
        return self.lambda_x * first * second

    def standardized(self, dim: int) -> float:
        """Estimate the mean cost between standardized features; inf but for `sqeuclidean`."""
        if self.ground != "sqeuclidean":
            return math.inf
        return 2 * dim * (self.lambda_x + self.lambda_y)

    def check_labels(self, method: str) -> None:
        """Raise if this cost does not define the class distances of a method.

        Raises:
            InputError: `inner` with a method that measures squared distances.
        """
        if self.ground == "inner" and method not in ("none", "given"):
            raise InputError(
                f"labels={method} measures squared distances between classes, which ground=inner "
                "has none of; set labels=none, or give a table (labels=given labels.path=W.npz, "
                "class_distances= in Python)"
            )


def directions(points: Tensor, name: str) -> Tensor:
    """Return x_i / ||x_i|| (n, d), float64.

    Raises:
        InputError: a row is 0.
    """
    out = torch.empty(points.shape, dtype=torch.float64, device=points.device)
    for part, rows in in_float64(points):
        # Divided by its largest entry, no row has squares that under- or overflow.
        largest = rows.abs().amax(1, keepdim=True)
        if bool((largest == 0).any()):
            row = part.start + int((largest == 0).squeeze(1).nonzero()[0])
            raise InputError(
                f"row {row} of {name} is 0, which has no direction for ground=cosine; leave such "
                "rows out or set ground=sqeuclidean"
            )
        units = rows.div_(largest)
        out[part] = units / torch.linalg.vector_norm(units, dim=1, keepdim=True)
    return out
