"""The size of a shift: how much more transport between the sides costs than within them.

A large sample makes any difference significant, so a p-value needs a size beside it. The test's
statistic T is no such size: its mean is positive even for two samples of one law. Under a shift
that mean depends on each side's own law and number of rows. Permutations of the pooled rows, which
mix both laws, do not show it: if one side has few rows of wide spread, T less the mean over
permutations is several times too large. So both sides are halved, x into x1, x2 and y into y1, y2,
and with OT between different rows alone

    effect = mean of (OT(x1, y1) - OT(x1, x2) / 2 - OT(y1, y2) / 2) / mean cost

over random halves. For one law and equal sides its mean is 0, whatever the number of rows. For few
rows in many dimensions, where OT of samples is far above that of their laws, the effect is below
that of the laws.

Its interval is by subsampling, as in `sampling.subsampling`: T(x1, y1) deviates from its mean over
halves as the effect does from its own, at rate sqrt((m / n) / (1 - m / n)), which is 1 for halves,
m = n / 2. All halves are masses on the pooled rows of the test. Class distances and epsilon are
held at those of all rows.

Near 0 the statistic fluctuates as 1 / n instead, and no such interval covers: there is none unless
the test rejects, the lower end is above 0 and each side has FEWEST units. The interval is
asymptotic, not exact as the p-value is.

`shift.joint` calls `measure_effect`, and `shift.result` writes the fields of its `ShiftEffect` to
result.json, so their names must stay. Halves must be drawn by the seed alone, so that a test can be
repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import t
from torch import Tensor

from otdd_flash.shift.pooled import PermutationTest, PooledCost, Until, rejects
from otdd_flash.shift.rows import PooledRows

# Random halves; width of bounds over a value; units of a side from which on there is an interval.
SUBSAMPLES, WIDTH, FEWEST = 39, 1e-3, 20


@dataclass(frozen=True)
class ShiftEffect:
    """The cost of transport between the sides less that within, over the mean cost of all rows.

    Attributes:
        value: about 0 without a shift.
        lower: lower end of the 95% interval, a one-sided limit of 97.5%; None near 0, or with less
            than 20 rows or groups on a side, where no interval covers.
        upper: its upper end, a limit of 97.5% too; None where `lower` is. Too low, as the value is,
            for few rows in many dimensions.
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
    of_x, of_y = _halves(pooled, rows, seed)
    across = of_x[0], of_y[0]
    xy, xx, yy = (pooled.transport(*pair, WIDTH) for pair in (across, of_x, of_y))
    value = float((xy - xx / 2 - yy / 2).mean()) / unit
    if not rejects(test.p_value, alpha) or min(rows.sizes) < FEWEST:
        return ShiftEffect(value)
    spread = float(pooled.statistics(*across, Until(width=WIDTH)).value.std())
    reach = float(t.ppf(0.975, SUBSAMPLES - 1)) * spread / unit
    return ShiftEffect(value, value - reach, value + reach) if value > reach else ShiftEffect(value)


def _halves(pooled: PooledCost, rows: PooledRows, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return masses (N, K) of a half of the units and of the other half, of each side."""
    generator, found = np.random.default_rng((seed, SUBSAMPLES)), []
    for units in (rows.unit_in_reference, ~rows.unit_in_reference):
        first = np.zeros((len(units), SUBSAMPLES), dtype=bool)
        for k in range(SUBSAMPLES):
            half = generator.permutation(np.flatnonzero(units))[: int(units.sum()) // 2]
            first[half, k] = True
        device = pooled.cost.device
        found.append((rows.masses(first, device), rows.masses(units[:, None] & ~first, device)))
    return found
