"""Spearman's correlation of a measure with gains, given the sizes of both datasets.

Ranks of both are freed of log n of the source and of the target by least squares, and what is left
is correlated. A measure that only follows how many rows there are has little left: what of its
ranks is curved in log n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from otdd_flash.study.statistics.pairs import Mask, Numbers, PairTable
from otdd_flash.study.statistics.statistics import Statistic, correlation, ranks


def partial_spearman(sizes: Sequence[int]) -> Statistic:
    """The statistic for tasks of these numbers of rows."""
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
    """The table of what is left of the ranks of measure and gains, to be permuted."""
    mask = table.present
    design = _design(np.log(np.asarray(sizes, dtype=np.float64)), mask)
    sides = []
    for side in (table.measure, table.gains):
        left = np.full(side.shape, np.nan)
        left[mask] = _left(side[mask], design)
        sides.append(left)
    return replace(table, measure=sides[0], gains=sides[1])


def _design(logs: Numbers, mask: Mask) -> Numbers:
    """1, log n of the source and of the target of every pair, (P, 3)."""
    sources, targets = np.nonzero(mask)
    return np.stack((np.ones(len(sources)), logs[sources], logs[targets]), 1)


def _left(numbers: Numbers, design: Numbers) -> Numbers:
    """Ranks (P,) less their projection on the design; 0 where nothing but rounding is left."""
    ranked = ranks(numbers, np.ones(len(numbers), dtype=bool))
    fitted = design @ np.linalg.lstsq(design, ranked, rcond=None)[0]
    left = ranked - fitted
    if np.abs(left).max(initial=0.0) <= 1e-9 * len(ranked):
        return np.zeros_like(left)
    return np.asarray(left, dtype=np.float64)
