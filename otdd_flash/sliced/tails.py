"""The tail of positive numbers, and how much longer it makes an interval on the upper side.

The mean of numbers with a heavy tail lies above most of the means of samples: a sample that lacks
the rare large numbers has a mean that is too low and a spread that is too small. Intervals of means
therefore miss on one side. How far the upper end must reach follows from the tail index gamma of
P(X > x) ~ x^(-1/gamma), from gamma = 1/2 on X has no variance. It is estimated from the k = sqrt(n)
largest of n numbers (Hill 1975, A simple general approach to inference about the tail of a
distribution),

    gamma = mean of log x_(1..k) - log x_(k+1),    standard error gamma / sqrt(k),

and one standard error is added, since small samples seldom show their tail. How the excess
lengthens an interval was fitted by simulation (`experiments.interval_coverage`); a change of the
estimate invalidates that fit. `sliced.result`, `sampling.subsampling` and
`study.measures.distances` call it.
"""

from __future__ import annotations

import math

from torch import Tensor

from otdd_flash.operators.float64_rows import extent, squared_distances
from otdd_flash.samples import LabeledSamples

# Lighter tails do no harm; the squared lengths of Gaussian vectors reach this index.
LIGHT = 0.3


def tail_excess(numbers: Tensor) -> Tensor:
    """Return by how much tail indices exceed a light one, (...) of numbers (..., n), n >= 3.

    It is 0 if all numbers are 0, and infinite if all but a few are 0.

    Args:
        numbers: not negative.
    """
    largest = max(2, round(math.sqrt(numbers.shape[-1])))
    logs = numbers.topk(largest + 1, -1).values.log()
    # The log difference of two zeros counts as 0, like that of any equal numbers.
    apart = (logs[..., :largest] - logs[..., largest:]).nan_to_num(0, posinf=math.inf)
    return (apart.mean(-1) * (1 + 1 / math.sqrt(largest)) - LIGHT).clamp_min(0)


def rows_excess(*datasets: LabeledSamples) -> float:
    """Return the largest `tail_excess` of squared distances of rows from their dataset's mean."""
    found = []
    for samples in datasets:
        points, masses = samples.features, samples.masses
        lengths = squared_distances(points, extent(points, masses).mean.double())
        found.append(float(tail_excess(len(samples) * masses * lengths)))
    return max(found)
