"""The operations that formulas call, on tensors or on Python floats.

The numbers of many problems are tensors (S,). Those of one problem on a CPU are Python floats, as
an operation of PyTorch takes thirty times as long as its arithmetic there. Both follow IEEE 754:
nothing here raises, and NaN passes through. Names and arguments are those of `triton.language`,
which takes the place of this module where formulas are compiled for a kernel. `formulas.decision`,
`formulas.differences` and `formulas.evidence` call it, and `operators.score_pool`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# One number or flag per problem: a tensor (S,), or for a single problem a float or bool.
Numbers = Any


def where(flag: Any, one: Any, other: Any) -> Any:
    """Return `one` where the flag is set, else `other`; not both are constants."""
    if isinstance(flag, Tensor):
        return torch.where(flag, one, other)
    return one if flag else other


def abs(value: Any) -> Any:
    """Return the absolute value."""
    return value.abs() if isinstance(value, Tensor) else math.fabs(value)


def log(value: Any) -> Any:
    """Return the natural logarithm; -inf of 0, NaN of less."""
    if isinstance(value, Tensor):
        return value.log()
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan


def exp(value: Any) -> Any:
    """Return the exponential, infinite where it overflows."""
    if isinstance(value, Tensor):
        return value.exp()
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def sqrt(value: Any) -> Any:
    """Return the square root; NaN of numbers below 0."""
    if isinstance(value, Tensor):
        return value.sqrt()
    return math.sqrt(value) if value >= 0 else math.nan


def sum(values: Tensor, axis: int) -> Tensor:
    """Sum a tensor over an axis."""
    # The bits of a sum over the last axis of a contiguous tensor do not depend on the other axes.
    return values.movedim(axis, -1).contiguous().sum(-1)


def constant(like: Any, value: float) -> Any:
    """Return a constant for as many problems as `like` has; compiled formulas do not call it."""
    return torch.full_like(like, value) if isinstance(like, Tensor) else value
