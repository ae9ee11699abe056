"""Bounds that hold with nothing to spare: a tenth less of them would be wrong."""

from __future__ import annotations

from torch import Tensor


def assert_nearly_attained(
    true: float | Tensor, bound: float | Tensor, share: float = 0.95
) -> None:
    """Whether a bound holds, of which at least that share is needed; both are positive."""
    assert share * float(bound) < float(true) <= float(bound) * (1 + 1e-9)
