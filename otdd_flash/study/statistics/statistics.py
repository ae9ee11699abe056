"""Numbers of many tables of pairs at once: B measures (B, K, K), gains (K, K), masks (B, K, K).

Rows are sources, columns targets; measures are oriented and ties are equal, see `pairs`. A
statistic is NaN where it is not defined: a correlation of fewer than three pairs or of constant
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from otdd_flash.study.statistics.pairs import ROUNDING, Mask, Numbers

# statistic(measures, gains, masks) -> (B,)
Statistic = Callable[[Numbers, Numbers, Mask], Numbers]

FEWEST_PAIRS = 3


def pearson(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
    """Pearson's correlation over the pairs of each mask."""
    return correlation(_flat(measures), _flat(np.broadcast_to(gains, masks.shape)), _flat(masks))


def spearman(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
    """Spearman's rank correlation over the pairs of each mask; equal numbers share ranks."""
    flat, other = _flat(masks), np.broadcast_to(gains, masks.shape)
    return correlation(ranks(_flat(measures), flat), ranks(_flat(other), flat), flat)


def spearman_over_sources(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
    """The mean over targets of Spearman's correlation over their sources."""
    by_target = np.swapaxes(masks, 1, 2)
    x, y = (np.swapaxes(np.broadcast_to(side, masks.shape), 1, 2) for side in (measures, gains))
    return _mean_of_known(correlation(ranks(x, by_target), ranks(y, by_target), by_target))


def regret(picking: Numbers, scoring: Numbers) -> Statistic:
    """The mean over targets of the gain of the best source less that of the chosen one.

    Chosen is the source of which the measure is largest; of several, one at random, and the number
    is the expected one. A constant measure has the regret of a random choice. Targets with fewer
    than two sources have no part. The number estimates, without bias, what the chosen source gives
    away to the one that half of the runs put first; it may be negative.

    Args:
        picking: (D, K, K) gains by some runs, by which the best source is picked.
        scoring: (D, K, K) gains by other runs, which say what it is worth. By the same runs the
            luckiest source would look better than it is.
    """

    def of(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
        # Permutations of complete tables leave the pairs as they are.
        same = len(masks) > 1 and bool((masks == masks[:1]).all())
        best = best_gains(masks[:1] if same else masks, picking, scoring)
        return _mean_of_known(best - chosen_gains(measures, gains, masks))

    return of


def best_gains(masks: Mask, picking: Numbers, scoring: Numbers) -> Numbers:
    """What the best source of every target gains (B, K), by other runs than those that pick it.

    Arguments as for `regret`; NaN where a target has fewer than two sources.
    """
    scores = np.zeros((len(masks), masks.shape[-1]))
    for picked, scored in zip(picking, scoring, strict=True):
        scores += _mean_of_largest(picked, scored, masks)
    return np.where(masks.sum(1) >= 2, scores / len(picking), np.nan)


def chosen_gains(measures: Numbers, gains: Numbers, masks: Mask) -> Numbers:
    """What the source gains of which the measure is largest (B, K), a mean over ties."""
    return np.where(masks.sum(1) >= 2, _mean_of_largest(measures, gains, masks), np.nan)


def correlation(x: Numbers, y: Numbers, mask: Mask) -> Numbers:
    """Pearson's correlation along the last axis, over the entries of a mask."""
    count = np.maximum(mask.sum(-1, keepdims=True), 1)
    x, y = (_centred(side, mask, count) for side in (x, y))
    product, xx, yy = ((a * b).sum(-1) for a, b in ((x, y), (x, x), (y, y)))
    defined = (mask.sum(-1) >= FEWEST_PAIRS) & (xx > 0) & (yy > 0)
    scale = np.sqrt(np.where(defined, xx * yy, 1.0))
    found: Numbers = np.where(defined, np.clip(product / scale, -1.0, 1.0), np.nan)
    return found


def ranks(numbers: Numbers, mask: Mask) -> Numbers:
    """Ranks along the last axis among the entries of a mask, means of places where equal."""
    # What is left out comes last, and changes no rank before it.
    found: Numbers = rankdata(np.where(mask, numbers, np.inf), axis=-1)
    return found


def _centred(side: Numbers, mask: Mask, count: Numbers) -> Numbers:
    """Subtract the mean, and set 0 outside of the mask; exactly 0 where all are equal."""
    known = np.where(mask, side, 0.0)
    centred = np.where(mask, side - known.sum(-1, keepdims=True) / count, 0.0)
    scale = np.abs(known).max(-1, keepdims=True, initial=0.0)
    varies = np.abs(centred).max(-1, keepdims=True, initial=0.0) > ROUNDING * scale
    return np.where(varies, centred, 0.0)


def _mean_of_largest(scores: Numbers, gains: Numbers, masks: Mask) -> Numbers:
    """Per target (B, K), the mean gain of the sources with the largest score."""
    known = np.where(masks, scores, -np.inf)
    taken = masks & (known == known.max(1, keepdims=True))
    found: Numbers = np.where(taken, gains, 0.0).sum(1) / np.maximum(taken.sum(1), 1)
    return found


def _mean_of_known(numbers: Numbers) -> Numbers:
    """Means along the last axis of what is not NaN; NaN where all is."""
    known = ~np.isnan(numbers)
    count = known.sum(-1)
    total = np.where(known, numbers, 0.0).sum(-1)
    found: Numbers = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return found


def _flat(tables: NDArray[Any]) -> NDArray[Any]:
    """One row for every table."""
    return tables.reshape(len(tables), -1)
