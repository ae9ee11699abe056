"""The correlation with gains that their own noise allows.

Gains from one half of the seeds are correlated with gains from the other half. With r the mean over
all ways to draw two disjoint pairs of seeds, the reliability of the mean of all S seeds is, after
Spearman and Brown,

    R = k r / (1 + (k - 1) r),    k = S / 2

and no measure without a view of these runs can be expected to correlate by more than sqrt(R).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from otdd_flash.study.statistics.pairs import Numbers
from otdd_flash.study.statistics.statistics import Statistic

FEWEST_SEEDS = 4

Pair = tuple[int, int]


def ceiling(gains_of: Callable[[Pair], Numbers], seeds: int, statistic: Statistic) -> float | None:
    """sqrt(R), or None with fewer than 4 seeds or where gains do not repeat at all, r <= 0.

    Args:
        gains_of: the gains (K, K) by the runs of two seeds, transferred and baseline alike.
        seeds: S.
        statistic: the correlation that is bounded, Spearman's or Pearson's.
    """
    if seeds < FEWEST_SEEDS:
        return None
    found = []
    for one, other in disjoint_pairs(seeds):
        first, second = gains_of(one), gains_of(other)
        mask = np.isfinite(first) & np.isfinite(second) & ~np.eye(len(first), dtype=bool)
        found.append(float(statistic(first[None], second, mask[None])[0]))
    r = float(np.mean(found))
    if not r > 0:
        return None
    k = seeds / 2
    return math.sqrt(k * r / (1 + (k - 1) * r))


def disjoint_pairs(seeds: int) -> Iterator[tuple[Pair, Pair]]:
    """All ways to draw two pairs of seeds that share none, 15 of 5 seeds."""
    pairs = list(combinations(range(seeds), 2))
    for one, other in combinations(pairs, 2):
        if not {*one} & {*other}:
            yield one, other
