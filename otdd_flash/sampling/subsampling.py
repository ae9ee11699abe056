"""A confidence interval of the distance from subsamples drawn without replacement.

With S_n the distance between n and n' samples and S_m that between m of the n and, in proportion,
m' of the n', drawn without replacement, the deviations of K draws of S_m from their mean give the
standard error of S_n,

    se = (tau_m / tau_n) sd(S_m),    tau_m / tau_n = sqrt((m / n) / (1 - m / n)).

Away from distance 0 the divergence fluctuates as 1 / sqrt(n) about its mean (del Barrio,
Gonzalez-Sanz, Loubes & Niles-Weed 2023, An improved central limit theorem and fast convergence
rates for entropic transportation costs), which is all that subsampling asks for (Politis & Romano
1994, Large sample confidence regions based on subsamples under minimal assumptions). The factor
1 - m / n is that of draws from a finite set, as in the delete-d jackknife (Shao & Wu 1989, A
general theory for jackknife variance estimation): m may be a good part of n. Near distance 0 it
fluctuates as 1 / n, and se is too large.

At the small epsilon of practice S_m lies above S_n by several of its deviations, a bias that
shrinks at another rate. Deviations are therefore taken from the mean of S_m, and the interval is
one for E S_n, the mean distance between so many samples, not for its limit in n. Centred at S_n it
would cover neither. A bootstrap draws rows twice, at distance 0 from each other, and biases S.

The interval is [S_n - q se, S_n + q se (1 + 3 excess)], q Student's quantile of K - 1 degrees of
freedom. S_n is skewed to the right and its spread grows with it: where S_n is low se is too small,
and all that an interval misses it misses below the mean. Quantiles of S_n - S_m would be mirrored
besides, short above where the law is long. How much longer the upper part has to be depends on the
tail of the rows: see `sliced.tails`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import t

from otdd_flash.arguments import Count, Finite, Seed, Share, takes
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.distributed.ranks import Ranks, restored, saved
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.labels import LabelMetric
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling.comparison import Comparison, drawable, least_rows, subsample
from otdd_flash.sliced.tails import rows_excess
from otdd_flash.solver.divergence import Divergence

# progress(distances computed, their total).
Progress = Callable[[int, int], None]

# Of n: small enough to be cheap, large enough for the classes.
DEFAULT_FRACTION = 0.25
FEW_PER_CLASS = 5
LEVEL = 0.95
# By simulation of normal, lognormal and Student's t rows of three degrees of freedom, 20 to 500 a
# side: the excess beyond which another tail needs no longer interval, and how much longer each is.
MOST_EXCESS, LONGER = 1.7, 3.0


@dataclass(frozen=True)
class SubsampleInterval:
    """A confidence interval for the mean distance between as many samples.

    Attributes:
        lower: its lower end, in units of the cost; may be below 0.
        upper: its upper end.
        level: the confidence level.
        count: K, how many subsamples were compared.
        size: (m, m'), the rows of each subsample of the source and of the target.
        rate: tau_m / tau_n, by which deviations of subsamples were multiplied.
        values: (K,) the distances between subsamples; in the mean above the whole's.
        excess: how heavy the tail of the rows is; the upper part of the interval is 1 + 3 excess
            times as long as the lower. About 0 for many normal rows, above 0.2 where squared
            distances between rows have no variance.
        identical: both datasets are one: the distance is 0 and nothing was drawn.
    """

    lower: float
    upper: float
    level: float
    count: int
    size: tuple[int, int]
    rate: float
    values: tuple[float, ...]
    excess: float = 0.0
    identical: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of result.json."""
        return asdict(self)


@computes
@takes()
def subsample_interval(
    source: Samples,
    target: Samples,
    value: Finite,
    *,
    count: Count = 50,
    size: Count | None = None,
    level: Share = LEVEL,
    seed: Seed = 0,
    progress: Progress | None = None,
    **settings: Any,
) -> SubsampleInterval:
    """Bound how far a distance between samples may be from its mean over samples like them.

    Rows are drawn uniformly, so that class proportions vary as between samples; only two rows of
    every class (one, if it has no more) are always there. Weights go with their rows, renormalised.
    The interval is about sampling alone: add the solver bounds of `value` for the error of the
    solve. It is too wide, not too narrow, where samples had their class proportions fixed and where
    both datasets come from one distribution. Its upper part is the longer one where rows have a
    heavy tail, of which a sample shows too little.

    Args:
        source: the n samples that were compared; independent of the target's.
        target: the n' samples they were compared with.
        value: their distance, by `dataset_distance` with the same arguments.
        count: K, how many subsamples to compare.
        size: m, rows of each subsample of the source; the target's are in proportion. By default a
            quarter, or more where classes need it.
        level: the confidence level, in (0, 1).
        seed: of the draws.
        progress: called as progress(distances computed, their total).
        **settings: those of `dataset_distance`, the epsilon of `value` among them. What concerns a
            cache or progress has no effect: nothing of a subsample is kept.

    Raises:
        InputError: too few subsamples for the level, a size that is too small for the classes or
            not below n, or as `dataset_distance`.
        ConvergenceError: `solver.require_convergence` is set and a distance stopped early.

    Warns:
        DataNotice: subsamples hold fewer than five rows per class.
        NotConvergedWarning: a distance stopped before the tolerance.
    """
    check_count(count, level)
    source, target = as_samples(source, "source"), as_samples(target, "target")
    comparison = Comparison(source, target, settings)
    sizes = subsample_sizes(comparison.source, comparison.target, size)
    _notice_few_per_class(comparison, sizes)
    fraction = sum(sizes) / (len(comparison.source) + len(comparison.target))
    rate = sampling_rate(fraction)
    if source.fingerprint == target.fingerprint:
        return SubsampleInterval(value, value, level, 0, sizes, rate, (), identical=True)
    ranks = comparison.ranks
    if ranks is None:
        values = _values(comparison, sizes, range(count), seed, progress)
    else:
        ranks.report_to(progress, count)
        values, comparison.unconverged = ranks.order(
            _values_of_ranks, saved(comparison), sizes, count, seed
        )
    comparison.warn_unconverged(count)
    excess = min(rows_excess(*comparison.sides_of_cost()), MOST_EXCESS)
    lower, upper = map(float, deviation_interval(value, values, rate, level, excess))
    return SubsampleInterval(lower, upper, level, count, sizes, rate, tuple(values), excess)


def _values(
    comparison: Comparison,
    sizes: tuple[int, int],
    wanted: range,
    seed: int,
    progress: Progress | None,
) -> list[float]:
    """Distances of some of the draws from a seed."""
    generator, values = np.random.default_rng(seed), list[float]()
    for draw in range(wanted.stop):
        x = subsample(comparison.source, sizes[0], generator)
        y = subsample(comparison.target, sizes[1], generator)
        if draw not in wanted:
            continue
        values.append(comparison.between(x, y).value)
        if progress is not None:
            progress(len(values), len(wanted))
    return values


def _values_of_ranks(
    ranks: Ranks, content: bytes, sizes: tuple[int, int], count: int, seed: int
) -> tuple[list[float], list[Divergence]]:
    """The distances of all draws, and those that stopped early; each rank compares some draws."""
    comparison: Comparison = restored(content)

    def own() -> list[float]:
        wanted = range(ranks.rank, count, ranks.size)
        return _values(comparison, sizes, wanted, seed, ranks.progress) if len(wanted) else []

    everyone = ranks.all_gathered_objects((ranks.together(own), saved(comparison.unconverged)))
    values = [0.0] * count
    for rank, (found, _) in enumerate(everyone):
        values[rank :: ranks.size] = found
    return values, [late for _, content in everyone for late in restored(content)]


def check_count(count: int, level: float) -> None:
    """Raise an `InputError` where subsamples are too few for that level.

    There are as many as a tail needs to hold one of them.
    """
    if not 0 < level < 1:
        raise InputError(f"the confidence level must lie in (0, 1), got {level}")
    least = math.ceil(2 / (1 - level) - 1e-9) - 1
    if count < least:
        raise InputError(
            f"an interval at level {level:g} needs at least {least} subsamples, got {count}"
        )


def check_subsamples(
    source: LabeledSamples,
    target: LabeledSamples,
    size: int | None,
    metric: LabelMetric,
    min_class_size: int | None,
) -> None:
    """Raise an `InputError` where subsamples of that size cannot be drawn."""
    subsample_sizes(
        drawable(source, metric, min_class_size), drawable(target, metric, min_class_size), size
    )


def subsample_sizes(
    source: LabeledSamples, target: LabeledSamples, size: int | None
) -> tuple[int, int]:
    """How many rows to draw from each side, the same fraction of both."""
    sides = (source, target)
    fraction = DEFAULT_FRACTION if size is None else size / len(source)
    if size is None:
        fraction = max(fraction, *(least_rows(side) / len(side) for side in sides))
    sizes = [round(fraction * len(side)) for side in sides]
    for side, rows in zip(sides, sizes, strict=True):
        least = max(2, least_rows(side))
        if not least <= rows < len(side):
            asked = "" if size is None else f"size {size} of the source makes "
            raise InputError(
                f"subsamples of {side.name} need at least {least} rows, two of each of its "
                f"{side.class_total} classes, and fewer than its {len(side)}: {asked}{rows} "
                "do not do; choose another size, or drop small classes with min_class_size"
            )
    return sizes[0], sizes[1]


def _notice_few_per_class(comparison: Comparison, sizes: tuple[int, int]) -> None:
    for samples, rows in zip((comparison.source, comparison.target), sizes, strict=True):
        if rows < FEW_PER_CLASS * samples.class_total:
            warn(
                f"subsamples of {samples.name} hold {rows} rows for {samples.class_total} classes: "
                "class distances between them are crude, and so is the interval",
                DataNotice,
            )


def sampling_rate(fraction: float) -> float:
    """The factor tau_m / tau_n, for deviations between draws of so large a part."""
    return math.sqrt(fraction / (1 - fraction))


def deviation_interval(
    value: Any, values: Any, rate: float, level: float = LEVEL, excess: Any = 0.0
) -> tuple[Any, Any]:
    """Return the value less and plus some standard errors, more of them above by `excess`.

    Args:
        value: of all rows; a number, or (R,) numbers.
        values: of subsamples, (K,) or (R, K).
        rate: of `sampling_rate`.
        level: the confidence level.
        excess: of the tail of the rows, for distances; 0 for what has no tail of theirs.
    """
    errors = rate * np.std(values, axis=-1, ddof=1)
    reach = t.ppf((1 + level) / 2, np.shape(values)[-1] - 1) * errors
    return value - reach, value + (1 + LONGER * excess) * reach
