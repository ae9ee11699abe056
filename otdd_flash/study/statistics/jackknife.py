"""Intervals of statistics of pairs by the jackknife over datasets.

Pairs share datasets, so that they are not independent draws; datasets, or families of tasks that
come from one, are. With z_(-g) the statistic without all pairs of unit g, of G units,

    se^2 = (G - 1) / G sum_g (z_(-g) - mean of z_(-g))^2

and the interval is z +- t se with the t distribution of G - 1 degrees of freedom. For correlations
z is Fisher's, atanh(rho), with |rho| clipped to 1 - 1 / pairs; for other numbers it is the number.
The factor (K - 2) / (2 K) of independent dyads, in place of (G - 1) / G, covers too seldom where
datasets have effects of their own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.stats import t

from otdd_flash.study.statistics.pairs import Numbers, PairTable
from otdd_flash.study.statistics.statistics import Statistic

LEVEL = 0.95
# With fewer units the deviation is hardly known.
FEWEST_UNITS = 5


class Interval(NamedTuple):
    """A number with its interval, which is None where there is none.

    Attributes:
        value: the statistic of all pairs, NaN where it is not defined.
        lower: the lower end.
        upper: the upper end.
    """

    value: float
    lower: float | None
    upper: float | None


class Replicates(NamedTuple):
    """A statistic of all pairs, and without each unit.

    Attributes:
        value: of all pairs.
        left: (G,) without each unit.
        pairs: how many pairs there are.
        left_pairs: (G,) how many without each unit.
    """

    value: float
    left: Numbers
    pairs: int
    left_pairs: Numbers


def replicates(table: PairTable, statistic: Statistic) -> Replicates:
    """A statistic of a table and of what is left of it without each unit."""
    masks = np.concatenate((table.present[None], table.without_each_unit()))
    measures = np.broadcast_to(table.measure, masks.shape)
    found = statistic(measures, table.gains, masks)
    counts = masks.sum((1, 2)).astype(np.float64)
    return Replicates(float(found[0]), found[1:], int(counts[0]), counts[1:])


def correlation_interval(found: Replicates, least: int = FEWEST_UNITS) -> Interval:
    """The interval of a correlation, made on Fisher's scale; none below `least` units."""
    z = fisher(np.array(found.value), np.array(found.pairs, dtype=np.float64))
    lower, upper = _ends(float(z), fisher(found.left, found.left_pairs), least)
    if lower is None or upper is None:
        return Interval(found.value, None, None)
    return Interval(found.value, math.tanh(lower), math.tanh(upper))


def number_interval(found: Replicates, least: int = FEWEST_UNITS) -> Interval:
    """The interval of any other number; none below `least` units."""
    return Interval(found.value, *_ends(found.value, found.left, least))


def difference_interval(
    one: Replicates, other: Replicates, *, correlations: bool, least: int = FEWEST_UNITS
) -> Interval:
    """The interval of a difference of two statistics over the same units, by the paired jackknife.

    For correlations the difference is of Fisher's z, whose sign is that of the difference.
    """
    if not correlations:
        difference = one.value - other.value
        return Interval(difference, *_ends(difference, one.left - other.left, least))
    sides = [
        (
            float(fisher(np.array(side.value), np.array(side.pairs, dtype=np.float64))),
            fisher(side.left, side.left_pairs),
        )
        for side in (one, other)
    ]
    difference = sides[0][0] - sides[1][0]
    return Interval(difference, *_ends(difference, sides[0][1] - sides[1][1], least))


def fisher(rho: Numbers, pairs: Numbers) -> Numbers:
    """Fisher's z of correlations, clipped to what so many pairs can tell from 1."""
    most = 1 - 1 / np.maximum(pairs, 2)
    found: Numbers = np.arctanh(np.clip(rho, -most, most))
    return found


def _ends(value: float, left: Numbers, least: int) -> tuple[float | None, float | None]:
    units = len(left)
    if units < max(least, 2) or not math.isfinite(value) or not np.isfinite(left).all():
        return None, None
    error = math.sqrt((units - 1) / units * float(np.square(left - left.mean()).sum()))
    reach = float(t.ppf((1 + LEVEL) / 2, units - 1)) * error
    return value - reach, value + reach
