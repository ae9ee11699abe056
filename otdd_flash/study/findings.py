"""All statistics of all measures of a study, and the source that a measure chooses per target.

A measure says of each ordered pair of tasks how much training on the first, the source, should help
on the second, the target. The gain is how much it did, in percent of errors
(`study.training.gains`). `findings` makes the rows of correlations.csv and `choices` those of
choices.csv.

`study.result` calls both; `report.study.writing` and `report.study.page` read the rows. The fields
of `Finding` and `Choice` are the columns of these files, so their names and order must stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from otdd_flash.study.statistics import (
    FEWEST_PAIRS,
    FEWEST_UNITS,
    Interval,
    Mask,
    Numbers,
    Pair,
    PairTable,
    Statistic,
    best_gains,
    ceiling,
    chosen_gains,
    correlation_interval,
    difference_interval,
    freed_of_sizes,
    number_interval,
    p_value,
    partial_spearman,
    pearson,
    regret,
    replicates,
    spearman,
    spearman_over_sources,
)

# The statistics that are correlations; a regret is not one.
CORRELATIONS: dict[str, Statistic] = {
    "spearman": spearman,
    "pearson": pearson,
    "spearman_over_sources": spearman_over_sources,
}


class Finding(NamedTuple):
    """One statistic of one measure, or of the difference of two.

    Attributes:
        measure: its name; `one - other` for a difference, `gains` for a statistic of gains alone.
        statistic: `spearman` and `pearson` over ordered pairs; `spearman_over_sources`, the mean
            over targets; `regret` in points of gain, `random_regret` of a random choice, and
            `largest_regret` of the source with the most rows, each with the best source picked on
            half of the seeds and scored on the others; `partial_spearman` given sizes;
            `ceiling_spearman` and `ceiling_pearson`.
        value: the statistic; None if it is not defined. Measures for which smaller is better
            have their sign changed first, so that every correlation is positive if the measure
            predicts gain. A difference of correlations is that of Fisher's z. A regret is
            better the smaller it is, also in differences.
        lower: lower end of the 95% interval, or None.
        upper: upper end, or None.
        p: by permutation of tasks, or None.
        datasets: the number of independent datasets behind the interval; tasks of one family count
            as one.
        pairs: the number of ordered pairs with both measure and gain.
        note: why there is no interval or no value; empty if there are both, and for a ceiling that
            has a value, which never has an interval.
    """

    measure: str
    statistic: str
    value: float | None
    lower: float | None
    upper: float | None
    p: float | None
    datasets: int
    pairs: int
    note: str = ""


def findings(
    tables: Mapping[str, PairTable],
    *,
    sizes: Sequence[int],
    halves: tuple[Numbers, Numbers],
    gains_of: Callable[[Pair], Numbers],
    seeds: int,
    seed: int,
) -> tuple[Finding, ...]:
    """Return every statistic of every measure.

    Args:
        tables: by the measure's name, all with the same gains.
        sizes: rows of each task, for the largest source and, if they differ, the partial
            correlation.
        halves: from `halved_gains`, for regrets.
        gains_of: function that returns the gains (K, K) by the runs of two given seeds, for the
            ceiling.
        seeds: the number of seeds.
        seed: of random permutations.
    """
    rows: list[Finding] = []
    lost = regret(*halves)
    for name, table in tables.items():
        for key, statistic in CORRELATIONS.items():
            found = correlation_interval(replicates(table, statistic))
            rows.append(_row(name, key, table, found, p_value(table, statistic, seed)))
        for key, measure in comparisons(table, sizes).items():
            found = number_interval(replicates(replace(table, measure=measure), lost))
            p = p_value(table, lost, seed, small=True) if key == "regret" else None
            rows.append(_row(name, key, table, found, p))
        if len({*sizes}) > 1:
            found = correlation_interval(replicates(table, partial_spearman(sizes)))
            p = p_value(freed_of_sizes(table, sizes), pearson, seed)
            rows.append(_row(name, "partial_spearman", table, found, p))
    for one, other in combinations(tables, 2):
        rows += _differences(f"{one} - {other}", tables[one], tables[other], lost)
    some = next(iter(tables.values()))
    for key in ("spearman", "pearson"):
        most = ceiling(gains_of, seeds, CORRELATIONS[key])
        note = "" if most is not None else "needs four seeds and gains that repeat"
        counts = len(some.units), some.count
        rows.append(Finding("gains", f"ceiling_{key}", most, None, None, None, *counts, note))
    return tuple(rows)


def _differences(name: str, one: PairTable, other: PairTable, lost: Statistic) -> list[Finding]:
    """Compare two measures over the pairs that both have.

    If one of them is saturated, which is the same for all sources of each target, differences of
    correlations are not defined; those of regrets are.
    """
    shared = one.present & other.present
    both = [
        replace(table, measure=np.where(shared, table.measure, np.nan)) for table in (one, other)
    ]
    # The note of a row is then about the saturated measure.
    some = next((table for table in both if table.saturated), both[0])
    rows = []
    for key, statistic in {**CORRELATIONS, "regret": lost}.items():
        sides = (replicates(table, statistic) for table in both)
        found = difference_interval(*sides, correlations=key != "regret")
        rows.append(_row(name, key, some, found, None))
    return rows


def _row(name: str, statistic: str, table: PairTable, found: Interval, p: float | None) -> Finding:
    units = len(table.units)
    if table.saturated and "regret" not in statistic:
        found, p = Interval(math.nan, None, None), None
    value = None if math.isnan(found.value) else found.value
    note = ""
    if value is None:
        note = _why_undefined(statistic, table)
    elif found.lower is None and units < FEWEST_UNITS:
        note = f"no interval: {units} independent datasets, and {FEWEST_UNITS} are needed"
    elif found.lower is None:
        note = "no interval: without one of the datasets it is not defined"
    p = None if p is None or math.isnan(p) else p
    return Finding(name, statistic, value, found.lower, found.upper, p, units, table.count, note)


def _why_undefined(statistic: str, table: PairTable) -> str:
    """Return why a statistic of a table is not defined."""
    known, gains = table.measure[table.present], table.gains[table.present]
    if table.count < FEWEST_PAIRS:
        return f"not defined: {table.count} pairs, and {FEWEST_PAIRS} are needed"
    if table.saturated:
        if known.min() == known.max():
            return "the measure is the same for all pairs up to rounding"
        return "the measure is the same for all sources of a target up to rounding"
    if gains.min() == gains.max():
        return "not defined: the gains of all pairs are the same"
    if statistic == "spearman_over_sources":
        return "not defined: no target has three sources that differ in measure and in gain"
    if statistic == "partial_spearman":
        return "not defined: given the sizes nothing of the ranks is left"
    return "not defined: no target has two sources"


class Choice(NamedTuple):
    """The source that a measure chooses for a target, and its regret, in points of gain.

    A regret is the gain of the best source minus that of another source. It is negative if that
    source did better than the one that half of the seeds rank first.

    Attributes:
        target: its name.
        own_family: whether sources of the target's own family are included.
        sources: the number of sources with a gain and a value of the measure.
        best: the source with the largest gain over all seeds.
        tied: the other sources whose gain is within `gain_error` of the largest.
        gain: the gain of a best source that half of the seeds pick and the others score, as a mean
            over `halved_gains`; that source is not always `best`. With one seed, it is picked and
            scored on the same runs.
        gain_error: the standard error over seeds of the gain of `best`; None for one seed.
        measure: its name.
        chosen: the source that the measure ranks first; several if they are tied, and `regret` is
            then the mean of theirs.
        regret: of the chosen source.
        random_regret: the mean over all sources, which is that of a random choice.
        largest: the source with the most training rows; several if they are tied.
        largest_regret: of the largest source.
    """

    target: str
    own_family: bool
    sources: int
    best: str
    tied: tuple[str, ...]
    gain: float
    gain_error: float | None
    measure: str
    chosen: tuple[str, ...]
    regret: float
    random_regret: float
    largest: tuple[str, ...]
    largest_regret: float


def choices(
    measure: str,
    table: PairTable,
    halves: tuple[Numbers, Numbers],
    gain_errors: Numbers,
    *,
    names: Sequence[str],
    sizes: Sequence[int],
    own_family: bool,
) -> tuple[Choice, ...]:
    """Return one row for each target with two sources or more.

    Args:
        measure: its name.
        table: the oriented measure, and gains over all seeds.
        halves: gains (D, K, K) of K tasks from `halved_gains`: those of the half of the seeds that
            picks the best source, and those of the half that scores it, in D ways.
        gain_errors: (K, K) standard errors of the gains; NaN for missing ones.
        names: of the tasks.
        sizes: training rows of the tasks.
        own_family: whether sources of a target's own family are included.
    """
    mask = table.present if own_family else table.present & ~same_family(table)
    measures = comparisons(replace(table, measure=np.where(mask, table.measure, np.nan)), sizes)
    best = best_gains(mask[None], *halves)[0]
    taken = [chosen_gains(scores[None], table.gains, mask[None])[0] for scores in measures.values()]
    rows = []
    for j in np.flatnonzero(mask.sum(0) >= 2).tolist():
        sources = np.flatnonzero(mask[:, j])
        gains = table.gains[sources, j]
        first = int(sources[np.argmax(gains)])
        error = gain_errors[first, j]
        near = gains >= gains.max() - np.nan_to_num(error)
        regrets = [float(best[j] - one[j]) for one in taken]
        chosen, largest = (
            tuple(names[i] for i in sources.tolist() if scores[i, j] == scores[sources, j].max())
            for scores in (measures["regret"], measures["largest_regret"])
        )
        rows.append(
            Choice(
                names[j],
                own_family,
                len(sources),
                names[first],
                tuple(names[i] for i in sources[near].tolist() if i != first),
                float(best[j]),
                float(error) if np.isfinite(error) else None,
                measure,
                chosen,
                regrets[0],
                regrets[1],
                largest,
                regrets[2],
            )
        )
    return tuple(rows)


def comparisons(table: PairTable, sizes: Sequence[int]) -> dict[str, Numbers]:
    """Return the measure, a constant and the sizes of sources, (K, K), by their regrets' names.

    The constant measure is a random choice. All have values where the given measure has one.
    `choices` reads them in this order, and `_row` knows a regret by `regret` in its name.
    """
    rows = np.broadcast_to(np.asarray(sizes, dtype=np.float64)[:, None], table.gains.shape)
    known = np.isfinite(table.measure)
    return {
        "regret": table.measure,
        "random_regret": np.where(known, 0.0, np.nan),
        "largest_regret": np.where(known, rows, np.nan),
    }


def same_family(table: PairTable) -> Mask:
    """Return (K, K) whether two tasks are of the same family."""
    families = np.asarray(table.families, dtype=object)
    return np.asarray(families[:, None] == families[None, :], dtype=bool)
