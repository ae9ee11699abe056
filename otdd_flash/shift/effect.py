"""The size of a shift: the distance less its null mean, in units of the mean cost.

A large sample makes any difference significant, so a p-value needs a size beside it. T is positive
for two samples of one law, by its null mean; the effect is what exceeds that. Its interval is by
subsampling, as in `sampling.subsampling`: K times a half of the units of each side is drawn without
replacement, and its T, less the null mean at its own size (each subsample is permuted a few times),
deviates from the mean of the K as the effect of all rows does from its own, at rate sqrt((m / n) /
(1 - m / n)) = 1. All of them are masses on the pooled rows of the test. Class distances and epsilon
are held at those of all rows.

Near 0 the statistic fluctuates as 1 / n instead, and no such interval covers: there is none unless
the test rejects and the lower end is above 0. The interval is asymptotic, not exact as the p-value
is. `shift.joint` calls `measure_effect`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import t
from torch import Tensor

from otdd_flash.shift.permutation import PermutationTest
from otdd_flash.shift.pooled import PooledCost, Until
from otdd_flash.shift.rows import PooledRows

# Subsamples, and permutations of each that estimate its null mean; width of bounds over T.
SUBSAMPLES, NULLS, WIDTH = 39, 5, 0.01


@dataclass(frozen=True)
class ShiftEffect:
    """How much the distance exceeds its null mean, in units of the mean cost of all rows.

    Attributes:
        value: the excess; about 0 without a shift.
        lower: lower end of the 95% interval, a one-sided limit of 97.5%; None near 0, where no
            interval covers.
        upper: its upper end, likewise.
    """

    value: float
    lower: float | None = None
    upper: float | None = None


def measure_effect(
    pooled: PooledCost, rows: PooledRows, test: PermutationTest, *, alpha: float, seed: int
) -> ShiftEffect:
    """Estimate the effect, with an interval where the test rejects at `alpha`.

    Args:
        pooled: the costs of the joint test.
        rows: all rows.
        test: its result.
        alpha: level of the joint test.
        seed: of the subsamples.
    """
    unit = pooled.mean or 1.0
    value = (test.statistic - float(test.null.mean())) / unit
    if test.p_value > alpha or min(rows.sizes) < 4:
        return ShiftEffect(value)
    reach = float(t.ppf(0.975, SUBSAMPLES - 1) * _subsampled(pooled, rows, seed).std()) / unit
    return ShiftEffect(value, value - reach, value + reach) if value > reach else ShiftEffect(value)


def _subsampled(pooled: PooledCost, rows: PooledRows, seed: int) -> Tensor:
    """Return T of each subsample less its null mean (K,)."""
    generator = np.random.default_rng((seed, SUBSAMPLES))
    ours = np.flatnonzero(rows.unit_in_reference)
    others = np.flatnonzero(~rows.unit_in_reference)
    size = len(ours) // 2
    chosen = np.zeros((2, len(rows.unit_in_reference), SUBSAMPLES * (1 + NULLS)), dtype=bool)
    for k in range(chosen.shape[2]):
        if k % (1 + NULLS) == 0:
            halves = generator.permutation(ours)[:size], generator.permutation(others)
            order = np.concatenate((halves[0], halves[1][: len(others) // 2]))
        else:
            order = generator.permutation(order)
        chosen[0, order[:size], k] = chosen[1, order[size:], k] = True
    a, b = (rows.masses(side, pooled.cost.device) for side in chosen)
    values = pooled.statistics(a, b, Until(width=WIDTH)).value.reshape(SUBSAMPLES, 1 + NULLS)
    return values[:, 0] - values[:, 1:].mean(1)
