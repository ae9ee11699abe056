"""How numbers of rows change under a plan: their coupling as a histogram, and their mean change.

`result.DistanceResult` calls both; `report.distance` writes and draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.labels.numbers import targets_of
from otdd_flash.operators.base import Applied
from otdd_flash.samples import LabeledSamples

# Groups of neighbouring target numbers whose moves are told apart. Within one, numbers on both
# sides of that of a row cancel.
GROUPS = 512

# The plan applied to values (m, k), with the product (n, k).
Apply = Callable[[Tensor], Applied]


class TargetHistogram(NamedTuple):
    """The mass that moves between intervals of numbers.

    Attributes:
        masses: (bins, bins), from intervals of the source (rows) to those of the target; sums to 1.
        edges: (bins + 1,) the ends of all intervals, the same for both sides.
    """

    masses: Tensor
    edges: Tensor


def mean_changes(apply: Apply, source: LabeledSamples, target: LabeledSamples) -> Tensor:
    """Return sum_ij P_ij |t_i - s_j| over the mass of the plan, for each column (q,), float64."""
    found = []
    for t, s in zip(targets_of(source).cpu().T, targets_of(target).cpu().T, strict=True):
        distinct, places = torch.unique(s, return_inverse=True)
        groups = places * min(GROUPS, len(distinct)) // len(distinct)
        within = torch.nn.functional.one_hot(groups).double()
        # Relative to one of them, so that sums do not cancel.
        origin = distinct[len(distinct) // 2]
        values = torch.cat((within, within * (s - origin)[:, None]), 1)
        masses, sums = apply(values).values.cpu().double().chunk(2, 1)
        changes = ((t - origin)[:, None] * masses - sums).abs().sum()
        found.append(changes / masses.sum())
    return torch.stack(found)


def histogram(
    apply: Apply, source: LabeledSamples, target: LabeledSamples, column: int, bins: int
) -> TargetHistogram:
    """Return how much mass moves between intervals of one column of numbers."""
    sides = [targets_of(side)[:, column].cpu().contiguous() for side in (source, target)]
    ends = torch.stack((torch.cat(sides).min(), torch.cat(sides).max())).tolist()
    edges = torch.linspace(ends[0], ends[1], bins + 1, dtype=torch.float64)
    rows, columns = (torch.bucketize(side, edges[1:-1], right=True) for side in sides)
    moved = apply(torch.nn.functional.one_hot(columns, bins).double()).values.cpu().double()
    masses = moved.new_zeros(bins, bins).index_add_(0, rows, moved)
    return TargetHistogram(masses / masses.sum(), edges)
