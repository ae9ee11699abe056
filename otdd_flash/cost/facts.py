"""Range, mean and error of a cost, and the names of the terms of a divergence.

`Operator.costs` returns `CostFacts`, from which `solver.solve`, `solver.evidence`,
`solver.certificate`, `solver.penalties` and `solver.small` compute bounds and tolerances;
`cost.points`, `operators.given_costs` and `operators.matrix_kernel` compute a `CostRange`. So
`lowest`, `highest` and `error` must be true bounds.

`TERMS` are the terms of a divergence, as comparisons, `solver`, `derivatives` and results name
them, and `SIDES` the two datasets that each compares, a `Pair`. `below_zero`, `lesser` and `larger`
must give the same for a float, of one problem, and for a tensor, of many
(`tests/cost/test_facts.py` compares the latter two).
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# Indices of two datasets: that of the rows and that of the columns.
Pair = tuple[int, int]

# The terms of a divergence, with the rows' and the columns' side of each.
SIDES: dict[str, Pair] = {"xy": (0, 1), "xx": (0, 0), "yy": (1, 1)}
TERMS = tuple(SIDES)

# A float on the host, or a tensor with one entry per problem.
Number = TypeVar("Number", float, Tensor)


def below_zero(value: Number) -> Number:
    """Return min(value, 0), elementwise."""
    return (value - abs(value)) / 2


def lesser(one: Number, other: Number) -> Number:
    """Return the minimum of two numbers, elementwise; NaN if one of both is."""
    if isinstance(one, Tensor):
        return torch.minimum(one, other)
    return other if math.isnan(other) else min(one, other)


def larger(one: Number, other: Number) -> Number:
    """Return the maximum of two numbers, elementwise; NaN if one of both is."""
    if isinstance(one, Tensor):
        return torch.maximum(one, other)
    return other if math.isnan(other) else max(one, other)


class CostRange(NamedTuple):
    """Bounds on C_ij over pairs with mass, a_i b_j > 0, in units of the cost."""

    lowest: float
    highest: float


class CostFacts(NamedTuple):
    """Mean, range and error bound of a cost C between masses a and b, in units of the cost.

    Attributes:
        dtype: the type of the potentials.
        mean: sum_ij a_i b_j C_ij.
        lowest: no C_ij with a_i b_j > 0 is below it.
        highest: none is above it.
        error: bound on the mean error of the costs of `Operator.marginals` over any plan between a
            and b, without the rounding errors of the potentials.
        forbidden: whether some pairs have the cost +inf; the other facts leave these out.
        rounding: estimated root mean square difference from the costs of `Operator.refined`; 0 for
            a self term, whose refined cost is never iterated on.
    """

    dtype: torch.dtype
    mean: float
    lowest: float
    highest: float
    error: float
    forbidden: bool = False
    rounding: float = 0.0

    @property
    def spread(self) -> float:
        """R >= max C - min C over the support."""
        return self.highest - self.lowest

    @property
    def above_lowest(self) -> float:
        """mean - min(lowest, 0): the mean of a cost that is shifted to be nonnegative."""
        return self.mean - below_zero(self.lowest)

    @property
    def magnitude(self) -> float:
        """Bound on the mean of |C|."""
        return self.mean - 2 * below_zero(self.lowest)

    @property
    def largest(self) -> float:
        """Bound on |C| over the support."""
        return max(abs(self.lowest), abs(self.highest))
