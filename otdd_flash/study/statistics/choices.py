"""Which source a measure chooses for every target, and what that costs beside other choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from otdd_flash.study.statistics.pairs import Mask, Numbers, PairTable
from otdd_flash.study.statistics.statistics import best_gains, chosen_gains


class Choice(NamedTuple):
    """The source that a measure chooses for a target, and its regret, in points of gain.

    A regret is the gain of the best source less that of another one. It is below 0 where that one
    did better than the source that half of the seeds put first.

    Attributes:
        target: its name.
        own_family: whether sources of the target's own family take part.
        sources: how many sources with a gain and a number of the measure there are.
        best: the source with the largest gain over all seeds.
        tied: the other sources whose gain is within `gain_error` of that.
        gain: what the best source gains, picked on half of the seeds and scored on the others, the
            mean over `halved_gains`; of one seed picked and scored on the same runs.
        gain_error: the standard error over seeds of the gain of `best`; None of one seed.
        measure: its name.
        chosen: the source that it puts first; several where it does not tell them apart, and
            `regret` is then the mean of theirs.
        regret: of the chosen source.
        random_regret: the mean over all sources, that of a random one.
        largest: the source with the most training rows; several of as many.
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
    """One row for every target with two sources or more.

    Args:
        measure: its name.
        table: the measure, oriented, and gains over all seeds.
        halves: (D, K, K) gains that pick the best source, and gains that score it.
        gain_errors: (K, K) standard errors of the gains; NaN where there is none.
        names: of the tasks.
        sizes: training rows of the tasks.
        own_family: whether sources of a target's own family take part.
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
    """Return a measure (K, K), a constant one and the sizes of sources, by their regrets' names.

    The constant one chooses at random. All have a number where the measure has one.
    """
    rows = np.broadcast_to(np.asarray(sizes, dtype=np.float64)[:, None], table.gains.shape)
    known = np.isfinite(table.measure)
    return {
        "regret": table.measure,
        "random_regret": np.where(known, 0.0, np.nan),
        "largest_regret": np.where(known, rows, np.nan),
    }


def same_family(table: PairTable) -> Mask:
    """(K, K): whether two tasks are of one family."""
    families = np.asarray(table.families, dtype=object)
    return np.asarray(families[:, None] == families[None, :], dtype=bool)
