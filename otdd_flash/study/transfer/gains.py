"""Gains of transfer: by how many percent fewer errors a source leaves on a target's test rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

# A baseline with fewer leaves nothing to gain that could be told from chance.
FEWEST_ERRORS = 5


def gains(transferred: Numbers, alone: Numbers, seeds: Sequence[int] | None = None) -> Numbers:
    """100 (e0 - e1) / e0 with e0, e1 the mean errors alone and transferred, (K, K).

    Args:
        transferred: (K, K, S) test errors of transfer runs, rows sources; NaN where there is none.
        alone: (K, S) test errors of runs on the targets alone.
        seeds: which of the S repetitions to take the means over; None takes all.

    Returns:
        NaN where a baseline has fewer than 5 errors in the mean over all its repetitions, and
        where a run is missing.
    """
    if not alone.shape[-1]:
        return np.full(transferred.shape[:2], np.nan)
    chosen = slice(None) if seeds is None else list(seeds)
    # Sums are exact, and so equal ratios of them are equal numbers; ratios of means need not be.
    e0, e1 = alone[:, chosen].sum(-1), transferred[:, :, chosen].sum(-1)
    # Of all repetitions, so that halves of them have the pairs that the whole has.
    enough = alone.mean(-1) >= FEWEST_ERRORS
    base = np.where(enough & (e0 > 0), e0, np.nan)
    found: Numbers = 100 * (base - e1) / base
    return found


def halved_gains(transferred: Numbers, alone: Numbers) -> tuple[Numbers, Numbers]:
    """Gains by one half of the seeds and by the other, (D, K, K) each, in D = 2 S directions.

    A source that is picked by the first and scored by the second is no better for its luck. Halves
    are the rotations of the seeds, S // 2 and the others, in both directions, and baselines those
    of all seeds, so that the mean over directions of either is `gains`. With one seed there are no
    halves, and both are the gains of that seed.

    Args:
        transferred: (K, K, S) as for `gains`.
        alone: (K, S) as for `gains`.
    """
    count = alone.shape[-1]
    if count < 2:
        whole = gains(transferred, alone)[None]
        return whole, whole
    enough = alone.mean(-1) >= FEWEST_ERRORS
    base = np.where(enough, alone.mean(-1), np.nan)
    sides: tuple[list[Numbers], list[Numbers]] = ([], [])
    for first in range(count):
        turned = np.roll(transferred, -first, axis=-1)
        halves = (turned[..., : count // 2], turned[..., count // 2 :])
        one, other = (100 * (base - half.mean(-1)) / base for half in halves)
        sides[0].extend((one, other))
        sides[1].extend((other, one))
    return np.stack(sides[0]), np.stack(sides[1])


def gain_errors(transferred: Numbers, alone: Numbers) -> Numbers:
    """Standard errors of the gains over seeds (K, K), by the jackknife; NaN of one seed."""
    count = alone.shape[-1]
    if count < 2:
        return np.full(transferred.shape[:2], np.nan)
    left = np.stack(
        [
            gains(transferred, alone, [seed for seed in range(count) if seed != out])
            for out in range(count)
        ]
    )
    spread = np.square(left - left.mean(0)).sum(0)
    found: Numbers = np.sqrt((count - 1) / count * spread)
    return found
