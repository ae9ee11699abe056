"""Pairs of classes, the distances measured on them, and the symmetric table that they fill.

The modules of `labels` that measure, `contributions`, `flows.modes.jointly_driven` and
`flows.modes.feature_driven` call it; `otdd`, `pairwise`, `flows.flow` and `flows.objective` only
take the type `Progress`.

In `all_pairs` the larger index comes first, and pairs are measured in that direction. The other
direction would give other last digits, and distances are cached (`labels.classes.merge_identical`).
`labels.by_ranks` sends no list that `is_complete` finds equal to `all_pairs`, because each rank can
make it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# progress(done, total): pairs measured so far, and pairs in all.
Progress = Callable[[int, int], None]


class PairDistances(NamedTuple):
    """Squared distances of P pairs of classes, float64, on the device of the classes' points.

    Attributes:
        values: (P,) the distances.
        lower: (P,) lower bounds, which hold however far an iterative method came; for other
            methods the values themselves.
        upper: (P,) upper bounds.
    """

    values: Tensor
    lower: Tensor
    upper: Tensor

    @classmethod
    def exactly(cls, values: Tensor) -> PairDistances:
        """Return distances whose bounds are the values themselves."""
        values = values.to(torch.float64)
        return cls(values, values, values)


def all_pairs(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return every unordered pair of `count` classes, (P, 2) int64, the larger index first."""
    return torch.tril_indices(count, count, offset=-1, device=device).T.contiguous()


def is_complete(pairs: Tensor, count: int) -> bool:
    """Return whether pairs (P, 2) equal `all_pairs` of `count` classes."""
    there_are = count * (count - 1) // 2
    return len(pairs) == there_are and torch.equal(pairs, all_pairs(count, pairs.device))


def symmetric_table(values: Tensor, pairs: Tensor, count: int) -> Tensor:
    """Fill a symmetric table, zero on the diagonal, from values (P,) of pairs (P, 2).

    The table (`count`, `count`) is on the values' device and differentiable in them; pairs that are
    not listed are 0.
    """
    one, two = pairs.to(values.device).unbind(1)
    table = values.new_zeros(count, count)
    return table.index_put_((one, two), values).index_put_((two, one), values)
