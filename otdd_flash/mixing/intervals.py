"""Intervals of mixture weights from subsamples drawn without replacement.

As `sampling.subsampling` for distances: the deviations of weights of subsamples of m of n rows,
times sqrt((m / n) / (1 - m / n)), give their standard errors at all rows. Rows are drawn from every
source and from the target; classes are measured anew, unless a table is given; epsilon is that of
the whole. Intervals are cut at 0 and 1: at a border weights are not normal, and an interval there
is rough. `mixing.mixture` calls `weight_intervals`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np

from otdd_flash.errors import DataNotice, InputError, NotConvergedWarning
from otdd_flash.mixing.mixture import searched
from otdd_flash.mixing.result import WeightInterval
from otdd_flash.mixing.sources import Sources
from otdd_flash.mixing.weights import Allowed, Vector
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling.comparison import least_rows, subsample
from otdd_flash.sampling.subsampling import (
    LEVEL,
    check_count,
    deviation_interval,
    sampling_rate,
)

# The part of the rows that a subsample has: of a quarter, deviations of weights were a fifth less
# than those of new samples.
FRACTION = 0.5


def weight_intervals(
    compare: Callable[[list[LabeledSamples]], tuple[Sources, Comparison]],
    given: Sequence[LabeledSamples],
    allowed: Allowed,
    width: float,
    w: Vector,
    count: int,
    seed: int,
) -> list[WeightInterval]:
    """Estimate 95% intervals of the weights w (K,) from `count` subsamples.

    `compare` compares parts of the K sources and the target `given`, at the epsilon of the whole.

    Raises:
        InputError: there are too few subsamples, or rows.
    """
    check_count(count, LEVEL)
    fraction = max(FRACTION, *(least_rows(one) / len(one) for one in given))
    if fraction > 0.9:
        raise InputError(
            "subsamples take two rows of every class, and some dataset has few more; leave out "
            "subsample, or drop small classes with min_class_size"
        )
    generator, drawn = np.random.default_rng(seed), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        warnings.simplefilter("ignore", DataNotice)
        for _ in range(count):
            some = [subsample(one, max(2, round(fraction * len(one))), generator) for one in given]
            sources, comparison = compare(some)
            drawn.append(searched(comparison, sources, allowed, width)[0].w)
    ends = deviation_interval(w, np.array(drawn).T, sampling_rate(fraction))
    lower, upper = (np.clip(end, 0.0, 1.0) for end in ends)
    return [WeightInterval(*pair) for pair in zip(lower.tolist(), upper.tolist(), strict=True)]
