"""Operations of formulas that are computed for S problems at once, or for one.

The numbers of many problems are tensors (S,), those of one problem on a processor Python floats:
there an operation of PyTorch takes thirty times as long as the arithmetic in it. The formulas of
`engine` and `engine.evidence` are written once, with these functions in place of methods of
tensors, and follow IEEE 754 with either: nothing here raises, and NaN passes through.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# A number of every problem, or a flag: a tensor (S,), or the float, or bool, of one.
Numbers = Any


def where(flag: Any, one: Any, other: Any) -> Any:
    """Return `one` where the flag is set, else `other`."""
    if isinstance(flag, Tensor):
        return torch.where(flag, one, other)
    return one if flag else other


def negation(flag: Any) -> Any:
    """Return whether the flag is not set."""
    return ~flag if isinstance(flag, Tensor) else not flag


def clamp(value: Any, least: Any = None, most: Any = None) -> Any:
    """Return the nearest number in [least, most]."""
    if isinstance(value, Tensor):
        return torch.clamp(value, least, most)
    if least is not None and value < least:
        return least
    return most if most is not None and value > most else value


def maximum(one: Any, other: Any) -> Any:
    """Return the larger number."""
    if isinstance(one, Tensor):
        return torch.maximum(one, other)
    return one if one >= other or math.isnan(one) else other


def minimum(one: Any, other: Any) -> Any:
    """Return the smaller number."""
    if isinstance(one, Tensor):
        return torch.minimum(one, other)
    return one if one <= other or math.isnan(one) else other


def ratio(one: Any, other: Any) -> Any:
    """Return one / other, infinite or NaN where `other` is 0."""
    if isinstance(one, Tensor) or isinstance(other, Tensor) or other:
        return one / other
    if one == 0 or math.isnan(one):
        return math.nan
    return math.copysign(math.inf, one) * math.copysign(1.0, other)


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


def is_finite(value: Any) -> Any:
    """Return whether a number is neither infinite nor NaN."""
    return value.isfinite() if isinstance(value, Tensor) else math.isfinite(value)


def constant(like: Any, value: float) -> Any:
    """Return a number, for as many problems as another one is of."""
    return torch.full_like(like, value) if isinstance(like, Tensor) else value
