"""Facts of a cost that its bounds are made of: its range, its mean and its error.

Operators, the engine and certificates read them; the formulas here take numbers that the host knows
or tensors of many problems alike.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# Places of two datasets, the rows' and the columns'.
Pair = tuple[int, int]

# The terms of a divergence, with the rows' and the columns' side of each.
SIDES: dict[str, Pair] = {"xy": (0, 1), "xx": (0, 0), "yy": (1, 1)}
TERMS = tuple(SIDES)

# What formulas are for: a number that the host knows, or tensors.
Number = TypeVar("Number", float, Tensor)


def below_zero(value: Number) -> Number:
    """Return min(value, 0), of a number or of each of many."""
    return (value - abs(value)) / 2


def lesser(one: Number, other: Number) -> Number:
    """The lesser of two numbers, or of each two of many."""
    if isinstance(one, Tensor):
        return torch.minimum(one, other)
    return min(one, other)


def larger(one: Number, other: Number) -> Number:
    """The larger of two numbers, or of each two of many."""
    if isinstance(one, Tensor):
        return torch.maximum(one, other)
    return max(one, other)


class CostRange(NamedTuple):
    """Bounds on the cost over the support of both masses, in units of the cost."""

    lowest: float
    highest: float


class CostFacts(NamedTuple):
    """What the host knows of a cost C between masses a and b, in units of the cost.

    Attributes:
        dtype: the type of the potentials.
        mean: sum_ij a_i b_j C_ij.
        lowest: no C_ij with a_i b_j > 0 is below it.
        highest: none is above it.
        error: bound on the mean error of the costs of `Operator.marginals` over any plan between a
            and b, without what the potentials add to it.
        forbidden: whether further pairs have the cost +inf, which none of this counts.
    """

    dtype: torch.dtype
    mean: float
    lowest: float
    highest: float
    error: float
    forbidden: bool = False

    @property
    def spread(self) -> float:
        """R >= max C - min C over the support."""
        return self.highest - self.lowest

    @property
    def above_lowest(self) -> float:
        """The mean cost, above the lowest one where that is negative."""
        return self.mean - below_zero(self.lowest)

    @property
    def magnitude(self) -> float:
        """Bound on the mean of |C|."""
        return self.mean - 2 * below_zero(self.lowest)

    @property
    def largest(self) -> float:
        """Bound on |C| over the support."""
        return max(abs(self.lowest), abs(self.highest))
