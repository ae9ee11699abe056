"""How numbers of rows change under a plan: their coupling as a histogram, and their mean change.

`result.DistanceResult` calls both; `report.distance` writes and draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.labels.metrics import targets_of
from otdd_flash.operators.base import Applied
from otdd_flash.samples import LabeledSamples

# Groups of neighbouring target numbers whose moves are told apart. Within one, numbers on both
# sides of that of a row cancel.
GROUPS = 512

# Numbers that a product with the plan takes and returns at most, for memory's sake: 512 MiB.
ENTRIES = 1 << 26

# The plan applied to values (m, k), with the product (n, k).
Apply = Callable[[Tensor], Applied]


class TargetHistogram(NamedTuple):
    """The mass that moves between intervals of numbers.

    Attributes:
        masses: (bins, bins), from intervals of the source (rows) to those of the target; the sum is
            1, or the mass that moves where marginals are relaxed.
        edges: (bins + 1,) the ends of all intervals, the same for both sides.
    """

    masses: Tensor
    edges: Tensor


def mean_changes(apply: Apply, source: LabeledSamples, target: LabeledSamples) -> Tensor:
    """Return sum_ij P_ij |t_i - s_j| over the mass of the plan, for each column (q,), float64."""
    found = []
    # Two columns a group, of both sides.
    at_once = max(1, ENTRIES // (2 * (len(source) + len(target))))
    for t, s in zip(targets_of(source).cpu().T, targets_of(target).cpu().T, strict=True):
        distinct, places = torch.unique(s, return_inverse=True)
        count = min(GROUPS, len(distinct))
        groups = places * count // len(distinct)
        # Relative to one of them, so that sums do not cancel.
        origin = distinct[len(distinct) // 2]
        changes = mass = torch.zeros((), dtype=torch.float64)
        for first in range(0, count, at_once):
            some = torch.arange(first, min(first + at_once, count))
            within = (groups[:, None] == some).double()
            values = torch.cat((within, within * (s - origin)[:, None]), 1)
            masses, sums = apply(values).values.cpu().double().chunk(2, 1)
            changes = changes + ((t - origin)[:, None] * masses - sums).abs().sum()
            mass = mass + masses.sum()
        found.append(changes / mass)
    return torch.stack(found)


def histogram(
    apply: Apply,
    source: LabeledSamples,
    target: LabeledSamples,
    column: int,
    bins: int,
    *,
    exact: bool,
) -> TargetHistogram:
    """Return how much mass moves between intervals of one column of numbers.

    With exact marginals (`exact`) the rounding error of its sum, which is 1, is divided out.
    """
    sides = [targets_of(side)[:, column].cpu().contiguous() for side in (source, target)]
    ends = torch.stack((torch.cat(sides).min(), torch.cat(sides).max())).tolist()
    edges = torch.linspace(ends[0], ends[1], bins + 1, dtype=torch.float64)
    rows, columns = (torch.bucketize(side, edges[1:-1], right=True) for side in sides)
    moved = apply(torch.nn.functional.one_hot(columns, bins).double()).values.cpu().double()
    masses = moved.new_zeros(bins, bins).index_add_(0, rows, moved)
    return TargetHistogram(masses / masses.sum() if exact else masses, edges)
