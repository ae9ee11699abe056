"""Statistics of tables of ordered pairs: correlations, regrets, intervals, ceilings and p-values.

A table has K tasks, with sources as rows and targets as columns: a measure (K, K), gains (K, K) and
a mask of the pairs that count. Statistics take B measures (B, K, K) and masks (B, K, K) at once, so
that all leave-one-out tables or many permutations are one call. A statistic is NaN if it is not
defined, such as a correlation of fewer than three pairs or of constant numbers.

`study.findings` applies the statistics; `study.result` makes the `PairTable` from `levelled`
numbers, and `report.study.page` shows FEWEST_UNITS. Measures must be oriented before they come
here: a larger value predicts more gain. Numbers that are equal up to rounding are made exactly
equal in `levelled`, so ranks, choices and `PairTable.saturated` compare without tolerances.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice, permutations, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, t

Numbers = NDArray[np.float64]

Mask = NDArray[np.bool_]

# Relative to the largest number of a table, or to the unit of the measure.
ROUNDING = 1e-12


def levelled(
    numbers: Numbers,
    *,
    unit: float = 0.0,
    lower: Numbers | None = None,
    upper: Numbers | None = None,
) -> Numbers:
    """Replace numbers that rounding cannot distinguish by the smallest of them.

    Two numbers are tied if their intervals overlap, and ties are transitive. An interval is the
    number with its rounding, `ROUNDING` times the largest absolute value, and its bounds if it has
    any. This is the only place that decides which numbers are tied.

    Args:
        numbers: any shape; numbers that are not finite are unchanged.
        unit: rounding is relative to at least this size.
        lower: lower solver bounds, NaN for missing ones.
        upper: upper solver bounds.
    """
    finite = np.isfinite(numbers)
    if not finite.any():
        return numbers
    known = numbers[finite]
    half = ROUNDING * max(unit, float(np.abs(known).max())) / 2
    low = np.fmin(known - half, np.inf if lower is None else lower[finite])
    high = np.fmax(known + half, -np.inf if upper is None else upper[finite])
    order = np.argsort(low, kind="stable")
    reach = np.maximum.accumulate(high[order])
    group = np.concatenate(([0], np.cumsum(low[order][1:] > reach[:-1])))
    ordered = known[order]
    # Each group takes its smallest member, so every result is one of the given numbers.
    least = np.minimum.reduceat(ordered, np.flatnonzero(np.diff(group, prepend=-1)))
    found = numbers.astype(np.float64)
    level = np.empty_like(known)
    level[order] = least[group]
    found[finite] = level
    return found


@dataclass(frozen=True, eq=False)
class PairTable:
    """A measure and gains over all ordered pairs; rows are sources and columns targets.

    Args:
        measure: (K, K), the larger the more gain it predicts; NaN for missing values.
        gains: (K, K), NaN for pairs without a gain.
        families: (K,) the family of each task.
    """

    measure: Numbers
    gains: Numbers
    families: Sequence[str]

    def __post_init__(self) -> None:
        for name in ("measure", "gains"):
            object.__setattr__(self, name, levelled(getattr(self, name)))

    @cached_property
    def present(self) -> Mask:
        """(K, K) the pairs of different tasks with measure and gain."""
        off_diagonal = ~np.eye(len(self.gains), dtype=bool)
        return np.isfinite(self.measure) & np.isfinite(self.gains) & off_diagonal

    @cached_property
    def saturated(self) -> bool:
        """Whether the measure is the same for all sources of each target: it chooses none."""
        high = np.where(self.present, self.measure, -np.inf).max(0)
        low = np.where(self.present, self.measure, np.inf).min(0)
        return bool((self.present.sum(0) >= 2).any()) and not (high > low).any()

    @property
    def count(self) -> int:
        return int(self.present.sum())

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The different families of tasks that have a pair, in their order."""
        used = self.present.any(0) | self.present.any(1)
        return tuple(dict.fromkeys(np.asarray(self.families, dtype=object)[used]))

    def without_each_unit(self) -> Mask:
        """Return (G, K, K), the pairs that remain without each of the units."""
        families = np.asarray(self.families, dtype=object)
        kept = families[None] != np.asarray(self.units, dtype=object)[:, None]
        left: Mask = self.present & kept[:, :, None] & kept[:, None, :]
        return left


# statistic(measures, gains, masks) -> (B,)
Statistic = Callable[[Numbers, Numbers, Mask], Numbers]

FEWEST_PAIRS = 3


def pearson(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
    """Return Pearson's correlation over the pairs of each mask."""
    return correlation(_flat(measures), _flat(np.broadcast_to(gains, masks.shape)), _flat(masks))


def spearman(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
    """Return Spearman's rank correlation over the pairs of each mask; ties get mean ranks."""
    flat, other = _flat(masks), np.broadcast_to(gains, masks.shape)
    return correlation(ranks(_flat(measures), flat), ranks(_flat(other), flat), flat)


def spearman_over_sources(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
    """Return the mean over targets of Spearman's correlation over their sources."""
    by_target = np.swapaxes(masks, 1, 2)
    x, y = (np.swapaxes(np.broadcast_to(side, masks.shape), 1, 2) for side in (measures, gains))
    return _mean_of_known(correlation(ranks(x, by_target), ranks(y, by_target), by_target))


def regret(picking: Numbers, scoring: Numbers) -> Statistic:
    """Return the statistic: mean over targets of the best source's gain minus the chosen source's.

    The chosen source has the largest value of the measure; if several are tied, the statistic is
    the expectation of a random choice among them. A constant measure has the regret of a random
    choice. Targets with fewer than two sources are left out. The statistic estimates, without bias,
    the loss of the chosen source against the one that half of the runs rank first; it may be
    negative.

    Args:
        picking: (D, K, K) gains by some runs, by which the best source is picked.
        scoring: (D, K, K) gains by other runs, which give its gain. On the same runs the
            luckiest source would look better than it is.
    """

    def of(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
        # Permutations of complete tables keep all pairs, so one evaluation serves all.
        same = len(masks) > 1 and bool((masks == masks[:1]).all())
        best = best_gains(masks[:1] if same else masks, picking, scoring)
        return _mean_of_known(best - chosen_gains(measures, gains, masks))

    return of


def best_gains(masks: Mask, picking: Numbers, scoring: Numbers) -> Numbers:
    """Return the gain (B, K) of each target's best source, by other runs than those that pick it.

    Arguments are those of `regret`; NaN if a target has fewer than two sources.
    """
    scores = np.zeros((len(masks), masks.shape[-1]))
    for picked, scored in zip(picking, scoring, strict=True):
        scores += _mean_of_largest(picked, scored, masks)
    return np.where(masks.sum(1) >= 2, scores / len(picking), np.nan)


def chosen_gains(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
    """Return the gain (B, K) of the source with the largest measure, as a mean over ties."""
    return np.where(masks.sum(1) >= 2, _mean_of_largest(measures, gains, masks), np.nan)


def correlation(x: Numbers, y: Numbers, mask: Mask) -> Numbers:
    """Return Pearson's correlation along the last axis, over the entries of a mask."""
    count = np.maximum(mask.sum(-1, keepdims=True), 1)
    x, y = (_centred(side, mask, count) for side in (x, y))
    product, xx, yy = ((a * b).sum(-1) for a, b in ((x, y), (x, x), (y, y)))
    defined = (mask.sum(-1) >= FEWEST_PAIRS) & (xx > 0) & (yy > 0)
    scale = np.sqrt(np.where(defined, xx * yy, 1.0))
    found: Numbers = np.where(defined, np.clip(product / scale, -1.0, 1.0), np.nan)
    return found


def ranks(numbers: Numbers, mask: Mask) -> Numbers:
    """Return ranks along the last axis among the entries of a mask; ties get their mean rank."""
    # Entries outside the mask rank last, so they change no rank before them.
    found: Numbers = rankdata(np.where(mask, numbers, np.inf), axis=-1)
    return found


def _centred(side: Numbers, mask: Mask, count: Numbers) -> Numbers:
    """Subtract the mean, and set 0 outside the mask; the result is exactly 0 if all are equal."""
    known = np.where(mask, side, 0.0)
    centred = np.where(mask, side - known.sum(-1, keepdims=True) / count, 0.0)
    scale = np.abs(known).max(-1, keepdims=True, initial=0.0)
    varies = np.abs(centred).max(-1, keepdims=True, initial=0.0) > ROUNDING * scale
    return np.where(varies, centred, 0.0)


def _mean_of_largest(scores: Numbers, gains: Numbers, masks: Mask) -> Numbers:
    """Return for each target (B, K) the mean gain of the sources with the largest score."""
    known = np.where(masks, scores, -np.inf)
    taken = masks & (known == known.max(1, keepdims=True))
    found: Numbers = np.where(taken, gains, 0.0).sum(1) / np.maximum(taken.sum(1), 1)
    return found


def _mean_of_known(numbers: Numbers) -> Numbers:
    """Return means along the last axis without NaN; NaN if all entries are."""
    found: Numbers = np.ma.masked_invalid(numbers).mean(-1).filled(np.nan)
    return found


def _flat(tables: NDArray[Any]) -> NDArray[Any]:
    return tables.reshape(len(tables), -1)


FEWEST_SEEDS = 4

Pair = tuple[int, int]


def ceiling(gains_of: Callable[[Pair], Numbers], seeds: int, statistic: Statistic) -> float | None:
    """Return sqrt(R), the largest correlation with the gains that their noise allows.

    Gains from one pair of seeds are correlated with gains from another pair. With r the mean over
    all ways to draw two disjoint pairs of seeds, the reliability of the mean over all S seeds is,
    by Spearman and Brown,

        R = k r / (1 + (k - 1) r),    k = S / 2

    and a measure computed without these runs cannot be expected to correlate by more than sqrt(R).

    Args:
        gains_of: the gains (K, K) by the runs of two seeds, of transfer and baseline alike.
        seeds: S.
        statistic: the correlation that is bounded, Spearman's or Pearson's.

    Returns:
        sqrt(R), or None with fewer than 4 seeds or if gains do not repeat at all, r <= 0.
    """
    if seeds < FEWEST_SEEDS:
        return None
    found = []
    for one, other in combinations(combinations(range(seeds), 2), 2):
        if {*one} & {*other}:
            continue
        first, second = gains_of(one), gains_of(other)
        mask = np.isfinite(first) & np.isfinite(second) & ~np.eye(len(first), dtype=bool)
        found.append(float(statistic(first[None], second, mask[None])[0]))
    r = float(np.mean(found))
    if not r > 0:
        return None
    k = seeds / 2
    return math.sqrt(k * r / (1 + (k - 1) * r))


LEVEL = 0.95

# With fewer units the standard error is hardly known.
FEWEST_UNITS = 5


class Interval(NamedTuple):
    """A number with its interval.

    Attributes:
        value: the statistic of all pairs, NaN if it is not defined.
        lower: the lower end; None if there is no interval.
        upper: the upper end; None if there is no interval.
    """

    value: float
    lower: float | None
    upper: float | None


class Replicates(NamedTuple):
    """The values of a statistic for the jackknife: over all pairs, and without each unit.

    Attributes:
        value: over all pairs.
        left: (G,) without each unit.
        pairs: the number of pairs.
        left_pairs: (G,) the number of pairs without each unit.
    """

    value: float
    left: Numbers
    pairs: int
    left_pairs: Numbers

    def fisher(self) -> Replicates:
        """Return the correlations on Fisher's scale."""
        z = fisher(np.array(self.value), np.array(self.pairs, dtype=np.float64))
        return self._replace(value=float(z), left=fisher(self.left, self.left_pairs))


def replicates(table: PairTable, statistic: Statistic) -> Replicates:
    """Return a statistic of a table, and of the table without each unit."""
    masks = np.concatenate((table.present[None], table.without_each_unit()))
    measures = np.broadcast_to(table.measure, masks.shape)
    found = statistic(measures, table.gains, masks)
    counts = masks.sum((1, 2)).astype(np.float64)
    return Replicates(float(found[0]), found[1:], int(counts[0]), counts[1:])


def correlation_interval(found: Replicates, least: int = FEWEST_UNITS) -> Interval:
    """Return the interval of a correlation, on Fisher's scale; none below `least` units."""
    z = found.fisher()
    ends = _ends(z.value, z.left, least)
    return Interval(found.value, *(None if end is None else math.tanh(end) for end in ends))


def number_interval(found: Replicates) -> Interval:
    """Return the interval of another statistic; none below FEWEST_UNITS units."""
    return Interval(found.value, *_ends(found.value, found.left))


def difference_interval(one: Replicates, other: Replicates, *, correlations: bool) -> Interval:
    """Return the interval of a difference of two statistics, by the paired jackknife over units.

    For correlations the difference is of Fisher's z, whose sign is that of the difference.
    """
    if correlations:
        one, other = one.fisher(), other.fisher()
    difference = one.value - other.value
    return Interval(difference, *_ends(difference, one.left - other.left))


def fisher(rho: Numbers, pairs: Numbers) -> Numbers:
    """Return Fisher's z = atanh(rho) of correlations clipped to 1 - 1 / pairs in size."""
    most = 1 - 1 / np.maximum(pairs, 2)
    found: Numbers = np.arctanh(np.clip(rho, -most, most))
    return found


def _ends(
    value: float, left: Numbers, least: int = FEWEST_UNITS
) -> tuple[float | None, float | None]:
    """Return the ends of a jackknife interval, or None with too few units.

    Pairs share datasets, so they are not independent draws; datasets, or families of related tasks,
    are. With z_(-g) the statistic without all pairs of unit g, of G units,

        se^2 = (G - 1) / G sum_g (z_(-g) - mean of z_(-g))^2

    and the interval is z +- t se with the t distribution of G - 1 degrees of freedom. The factor
    (K - 2) / (2 K) for independent dyads, instead of (G - 1) / G, covers too rarely if datasets
    have effects of their own.
    """
    units = len(left)
    if units < max(least, 2) or not math.isfinite(value) or not np.isfinite(left).all():
        return None, None
    error = math.sqrt((units - 1) / units * float(np.square(left - left.mean()).sum()))
    reach = float(t.ppf((1 + LEVEL) / 2, units - 1)) * error
    return value - reach, value + reach


def partial_spearman(sizes: Sequence[int]) -> Statistic:
    """Return the statistic of Spearman's correlation given the sizes of both datasets.

    The ranks of measure and gains are regressed on log n of source and target by least squares, and
    the residuals are correlated. If a measure only follows the sizes, its residual is only the part
    of its ranks that is not linear in log n.
    """
    logs = np.log(np.asarray(sizes, dtype=np.float64))

    def of(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
        found = []
        for measure, mask in zip(measures, masks, strict=True):
            design = _design(logs, mask)
            everywhere = np.ones(len(design), dtype=bool)
            x, y = (_left(side[mask], design) for side in (measure, gains))
            found.append(float(correlation(x, y, everywhere)))
        return np.array(found)

    return of


def freed_of_sizes(table: PairTable, sizes: Sequence[int]) -> PairTable:
    """Return the table of the residuals of the ranks given sizes, for permutation."""
    mask = table.present
    design = _design(np.log(np.asarray(sizes, dtype=np.float64)), mask)
    sides = []
    for side in (table.measure, table.gains):
        left = np.full(side.shape, np.nan)
        left[mask] = _left(side[mask], design)
        sides.append(left)
    return replace(table, measure=sides[0], gains=sides[1])


def _design(logs: Numbers, mask: Mask) -> Numbers:
    """Return (P, 3): 1, log n of the source and log n of the target, for each pair."""
    sources, targets = np.nonzero(mask)
    return np.stack((np.ones(len(sources)), logs[sources], logs[targets]), 1)


def _left(numbers: Numbers, design: Numbers) -> Numbers:
    """Return the residuals (P,) of the ranks on the design; 0 if only rounding remains."""
    ranked = ranks(numbers, np.ones(len(numbers), dtype=bool))
    fitted = design @ np.linalg.lstsq(design, ranked, rcond=None)[0]
    left = ranked - fitted
    if np.abs(left).max(initial=0.0) <= 1e-9 * len(ranked):
        return np.zeros_like(left)
    return np.asarray(left, dtype=np.float64)


MOST_TRIED = math.factorial(7)

RANDOM = 9_999

AT_ONCE = 1_000

# Tolerance for equal statistics that were summed in another order.
TIES = 1e-12

Orders = NDArray[np.int64]


def p_value(table: PairTable, statistic: Statistic, seed: int, *, small: bool = False) -> float:
    """Return the share of permutations whose statistic is as far from 0 as that of the table.

    Rows and columns of the measure are permuted together, and gains are not. A task is exchanged
    with tasks of its own family if families have several tasks, otherwise with all tasks. All
    permutations are tried up to `MOST_TRIED`, which is the number for 7 tasks; beyond it 9,999
    random ones, and then p = (1 + hits) / 10,000. A statistic uses the pairs present before and
    after the permutation.

    Args:
        table: the table that is permuted.
        statistic: the statistic that is tested.
        seed: of random permutations.
        small: count statistics that are as small instead, as for regrets.

    Returns:
        p, or NaN if the statistic is not defined.
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
        # A permutation that leaves too few pairs has no statistic and is not counted.
        found = found[~np.isnan(found)]
        far = -found if small else np.abs(found)
        hit = far >= (-observed if small else abs(observed)) - TIES
        hits, tried = hits + int(hit.sum()), tried + len(found)
    return hits / tried if exhaustive else (1 + hits) / (1 + tried)


def orders_of(families: Sequence[str], seed: int) -> tuple[Iterator[Orders], bool]:
    """Return permutations of the tasks within their families, and whether these are all."""
    places = [np.flatnonzero([one == family for one in families]) for family in Counter(families)]
    if all(len(group) == 1 for group in places):
        places = [np.arange(len(families))]
    total = math.prod(math.factorial(len(group)) for group in places)
    if total <= MOST_TRIED:
        drawn = product(*(permutations(group) for group in places))
        return (_order(places, chosen) for chosen in drawn), True
    generator = np.random.default_rng(seed)
    some = (list(map(generator.permutation, places)) for _ in range(RANDOM))
    return (_order(places, chosen) for chosen in some), False


def _order(places: list[Orders], chosen: Sequence[Any]) -> Orders:
    """Return the order of all tasks that puts the chosen ones at the places of their groups."""
    order = np.empty(sum(map(len, places)), dtype=np.int64)
    order[np.concatenate(places)] = np.concatenate(chosen)
    return order
