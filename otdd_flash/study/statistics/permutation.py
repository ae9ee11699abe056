"""p-values by exchanging tasks: rows and columns of a measure are permuted together.

Gains stay where they are. A permutation is of tasks within their families where families hold
several tasks, else of all tasks. All permutations are tried up to `MOST_TRIED`, which are those of
7 tasks; else 9,999 random ones, and p = (1 + hits) / 10,000.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, permutations, product

import numpy as np
from numpy.typing import NDArray

from otdd_flash.study.statistics.pairs import PairTable
from otdd_flash.study.statistics.statistics import Statistic

MOST_TRIED = math.factorial(7)
RANDOM = 9_999
AT_ONCE = 1_000
# Equal statistics that were summed in another order.
ROUNDING = 1e-12

Orders = NDArray[np.int64]


def p_value(table: PairTable, statistic: Statistic, seed: int, *, small: bool = False) -> float:
    """The share of permutations whose statistic is as far from 0 as that of the table.

    Every statistic is that of the pairs that are present before and after the permutation.

    Args:
        table: what is permuted.
        statistic: of which the p-value is.
        seed: of random permutations.
        small: compare how small statistics are instead, as of regrets.

    Returns:
        p, NaN where the statistic is not defined.
    """
    present = table.present
    observed = float(statistic(table.measure[None], table.gains, present[None])[0])
    if math.isnan(observed):
        return math.nan
    hits = tried = 0
    orders, exhaustive = orders_of(table.families, seed)
    while len(some := np.array(list(islice(orders, AT_ONCE)), dtype=np.int64)):
        rows, columns = some[:, :, None], some[:, None, :]
        found = statistic(
            table.measure[rows, columns], table.gains, present & present[rows, columns]
        )
        # A permutation that leaves too few pairs says nothing, and is not counted.
        found = found[~np.isnan(found)]
        far = -found if small else np.abs(found)
        hit = far >= (-observed if small else abs(observed)) - ROUNDING
        hits, tried = hits + int(hit.sum()), tried + len(found)
    return hits / tried if exhaustive else (1 + hits) / (1 + tried)


def orders_of(families: Sequence[str], seed: int) -> tuple[Iterator[Sequence[int]], bool]:
    """Permutations of the tasks within their families, and whether these are all."""
    places = [np.flatnonzero([one == family for one in families]) for family in Counter(families)]
    if all(len(group) == 1 for group in places):
        places = [np.arange(len(families))]
    total = math.prod(math.factorial(len(group)) for group in places)
    if total <= MOST_TRIED:
        return _all(places, len(families)), True
    return _random(places, len(families), np.random.default_rng(seed)), False


def _all(places: list[Orders], count: int) -> Iterator[Sequence[int]]:
    for chosen in product(*(permutations(group.tolist()) for group in places)):
        order = np.empty(count, dtype=np.int64)
        for group, permuted in zip(places, chosen, strict=True):
            order[group] = permuted
        yield order.tolist()


def _random(
    places: list[Orders], count: int, generator: np.random.Generator
) -> Iterator[Sequence[int]]:
    for _ in range(RANDOM):
        order = np.empty(count, dtype=np.int64)
        for group in places:
            order[group] = generator.permutation(group)
        yield order.tolist()
