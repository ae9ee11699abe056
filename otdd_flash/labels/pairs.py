"""Pairs of classes, and what a method measures on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# progress(done, total): pairs measured, and pairs in all.
Progress = Callable[[int, int], None]


class PairDistances(NamedTuple):
    """Squared distances of P pairs of classes, float64, where the classes' points are.

    Attributes:
        values: (P,) the distances.
        lower: (P,) lower bounds; the values themselves where a method has no iteration to stop.
        upper: (P,) upper bounds.
    """

    values: Tensor
    lower: Tensor
    upper: Tensor

    @classmethod
    def exactly(cls, values: Tensor) -> PairDistances:
        """Distances without an interval."""
        values = values.to(torch.float64)
        return cls(values, values, values)


def all_pairs(count: int, device: torch.device | str = "cpu") -> Tensor:
    """(P, 2) int64: every unordered pair of `count` classes, the larger index first."""
    return torch.tril_indices(count, count, offset=-1, device=device).T.contiguous()


def is_complete(pairs: Tensor, count: int) -> bool:
    """Whether pairs (P, 2) are `all_pairs` of `count` classes."""
    there_are = count * (count - 1) // 2
    return len(pairs) == there_are and torch.equal(pairs, all_pairs(count, pairs.device))


def symmetric_table(values: Tensor, pairs: Tensor, count: int) -> Tensor:
    """(V, V), symmetric and zero on the diagonal, from one number for each of P pairs (P, 2).

    On the values' device and differentiable in them; pairs that are not listed are 0.
    """
    one, two = pairs.to(values.device).unbind(1)
    table = values.new_zeros(count, count)
    return table.index_put_((one, two), values).index_put_((two, one), values)
