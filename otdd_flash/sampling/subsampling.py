"""A confidence interval of the distance from subsamples, and its noise floor from halves.

Let S_n be the distance between n and n' samples, and S_m that between m of the n and, in
proportion, m' of the n', drawn without replacement. Let tau_n be the rate at which S_n fluctuates
about its mean: its deviation times tau_n has a limit in n; here tau_n is sqrt(n), but for the draws
from a finite set. The deviations of K draws of S_m from their mean give the standard error of S_n,

    se = (tau_m / tau_n) sd(S_m),    tau_m / tau_n = sqrt((m / n) / (1 - m / n)).

If the distance is not 0, the divergence S fluctuates as 1 / sqrt(n) about its mean (del Barrio,
Gonzalez-Sanz, Loubes & Niles-Weed 2023, An improved central limit theorem and fast convergence
rates for entropic transportation costs), which is all that subsampling requires (Politis & Romano
1994, Large sample confidence regions based on subsamples under minimal assumptions). The factor 1 -
m / n is that of draws from a finite set, as in the delete-d jackknife (Shao & Wu 1989, A general
theory for jackknife variance estimation): m may be a good part of n. Near distance 0 the divergence
fluctuates as 1 / n, and se is too large.

At the small epsilon of practice S_m exceeds S_n by several of its deviations, a bias that shrinks
at another rate than the deviations. Deviations are therefore taken from the mean of S_m, and the
interval is one for E S_n, the mean distance between so many samples, not for its limit in n.
Quantiles of S_m - S_n would cover neither: the bias would move the interval by several deviations.
A bootstrap draws rows twice, at distance 0 from each other, and biases S.

With relaxed marginals S is as smooth a function of both distributions, at the penalties of the
whole, and its deviations shrink at the same rate.

The interval is [S_n - q se, S_n + q se (1 + 3 excess)], with q Student's quantile of K - 1 degrees
of freedom. S_n is skewed to the right and its spread grows with it: where S_n is low, se is too
small, so intervals that miss lie below the mean. Quantiles of S_n - S_m would be mirrored, too
short above, where the distribution has its long tail. How much longer the upper part must be
depends on the tail of the rows: see `sliced`.

The noise floor is the distance between two disjoint halves of one dataset. With few samples the
divergence between two samples of one distribution is far from 0. A distance between datasets is
meaningful as far as it exceeds that of their halves at equal sizes.

`otdd_flash` exports `subsample_interval` and `noise_floor`. `commands.compare` and
`study.measures.distances` call both, and `ranking.race` the first. `study.measures.base` and
`mixing.mixture` make intervals of their own draws by `deviation_interval` and `sampling_rate`;
`study.measures.distances` also limits the excess by MOST_EXCESS. Entry points check a number of
subsamples by `check_count` before they solve; `commands.compare` also checks by `half_size` that
there are rows for a floor. `subsample_sizes` says how many rows a subsample has.

A change must keep draw k the same for every number of ranks, so that an interval does not depend on
the machine, and must keep the coverage, which `experiments.interval_coverage` simulates. The draws
of a floor must follow from the seed alone, so that it can be computed again.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import t

from otdd_flash.arguments import Count, Finite, Progress, Seed, Share, takes
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.data.subset import stratified_rows
from otdd_flash.distributed.ranks import Ranks, restored, saved
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling.comparison import (
    PER_CLASS,
    SubsetComparison,
    class_labels,
    drawn_classes,
    least_rows,
    notice_rare_labels,
    rank_in_class,
    subsample,
)
from otdd_flash.sliced import rows_excess
from otdd_flash.solver.divergence import Divergence

# The default m / n: small enough to be cheap, large enough for the classes.
DEFAULT_FRACTION = 0.25
FEW_PER_CLASS = 5
# The default confidence level.
LEVEL = 0.95
# From simulations of normal, lognormal and Student's t rows of three degrees of freedom, 20 to 500
# a side. First the excess from which on heavier tails need no further lengthening; then the factor:
# the interval's upper part is 1 + LONGER excess times as long as the lower.
MOST_EXCESS, LONGER = 1.7, 3.0


@dataclass(frozen=True)
class SubsampleInterval:
    """A confidence interval for the mean distance between samples of these sizes.

    Attributes:
        lower: lower end of the interval, in units of the cost; may be below 0.
        upper: upper end of the interval.
        level: the confidence level.
        count: K, the number of subsamples compared.
        size: (m, m'), the rows of each subsample of the source and of the target.
        rate: tau_m / tau_n, the factor by which deviations of the subsamples are scaled.
        values: (K,) the distances between subsamples; on average above that of the whole.
        excess: how heavy the tail of the rows is; the upper part of the interval is 1 + 3 excess
            times as long as the lower. About 0 for many normal rows, above 0.2 where the variance
            of squared distances between rows is infinite.
        identical: whether both datasets are one: nothing was drawn, and both ends are the value.
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


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
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
    """Estimate a confidence interval for the mean distance between samples like these.

    Rows are drawn uniformly, so that class proportions vary as between samples; only two rows of
    every class (one, if it has no more) are always drawn. Weights go with their rows, renormalised.
    The interval covers sampling alone: add the solver bounds of `value` for the error of the solve.
    It is too wide, not too narrow, if the user's samples had fixed class proportions or if both
    datasets come from one distribution. Its upper part is longer if rows have a heavy tail, of
    which a sample contains too little.

    Args:
        source: the n samples that were compared; independent of the target's.
        target: the n' samples they were compared with.
        value: their distance, by `dataset_distance` with the same arguments.
        count: K, the number of subsamples to compare.
        size: m, rows of each subsample of the source; the target's are in proportion. By default a
            quarter, or more if classes need it.
        level: the confidence level, in (0, 1).
        seed: seed of the draws.
        progress: called as progress(distances computed, their total).
        **settings: keywords of `dataset_distance`, with the epsilon of `value` and penalties in
            units of the cost. Settings of a cache or of progress have no effect: nothing of a
            subsample is cached.

    Raises:
        InputError: too few subsamples for the level, a size that is too small for the classes or
            not below n, or as `dataset_distance`.
        ConvergenceError: `solver.require_convergence` is set and a distance stopped early.

    Warns:
        DataNotice: subsamples hold fewer than five rows per class, or may lack rare labels.
        NotConvergedWarning: a distance stopped before the tolerance.
    """
    check_count(count, level)
    source, target = as_samples(source, "source"), as_samples(target, "target")
    comparison = SubsetComparison(source, target, settings)
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
    comparison: SubsetComparison,
    sizes: tuple[int, int],
    wanted: range,
    seed: int,
    progress: Progress | None,
) -> list[float]:
    """Compute the distances of the draws numbered `wanted`.

    Earlier draws advance the generator too, so that a draw depends on its number alone.
    """
    generator, values = np.random.default_rng(seed), list[float]()
    for draw in range(wanted.stop):
        x = subsample(comparison.source, sizes[0], generator)
        y = subsample(comparison.target, sizes[1], generator)
        if draw not in wanted:
            continue
        values.append(comparison.distance(x, y).value)
        if progress is not None:
            progress(len(values), len(wanted))
    return values


def _values_of_ranks(
    ranks: Ranks, content: bytes, sizes: tuple[int, int], count: int, seed: int
) -> tuple[list[float], list[Divergence]]:
    """Compute the distances of all draws, each rank some of them; run by every rank.

    Returns:
        The distances in the order of the draws, and the divergences that stopped early.
    """
    comparison: SubsetComparison = restored(content)

    def own() -> list[float]:
        wanted = range(ranks.rank, count, ranks.size)
        return _values(comparison, sizes, wanted, seed, ranks.progress) if len(wanted) else []

    everyone = ranks.all_gathered_objects((ranks.together(own), saved(comparison.unconverged)))
    values = [0.0] * count
    for rank, (found, _) in enumerate(everyone):
        values[rank :: ranks.size] = found
    return values, [late for _, content in everyone for late in restored(content)]


def check_count(count: int, level: float) -> None:
    """Refuse a number of subsamples that is too small for a level.

    1 / (count + 1), the share that is expected beyond the largest of them, may not exceed one tail
    of the level, (1 - level) / 2.

    Raises:
        InputError: there are too few, or the level is not in (0, 1).
    """
    if not 0 < level < 1:
        raise InputError(f"the confidence level must lie in (0, 1), got {level}")
    least = math.ceil(2 / (1 - level) - 1e-9) - 1
    if count < least:
        raise InputError(
            f"an interval at level {level:g} needs at least {least} subsamples, got {count}"
        )


def subsample_sizes(
    source: LabeledSamples, target: LabeledSamples, size: int | None
) -> tuple[int, int]:
    """Return how many rows to draw from each side, the same fraction of both.

    Raises:
        InputError: they are too few for the classes, or not fewer than all rows.
    """
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
                f"{drawn_classes(side)} classes, and fewer than its {len(side)}: {asked}{rows} "
                "do not do; choose another size, or drop small classes with min_class_size"
            )
    return sizes[0], sizes[1]


def _notice_few_per_class(comparison: SubsetComparison, sizes: tuple[int, int]) -> None:
    for samples, rows in zip((comparison.source, comparison.target), sizes, strict=True):
        notice_rare_labels(samples, rows)
        classes = drawn_classes(samples)
        if rows < FEW_PER_CLASS * classes:
            warn(
                f"subsamples of {samples.name} hold {rows} rows for {classes} classes: "
                "class distances between them are crude, and so is the interval",
                DataNotice,
            )


def sampling_rate(fraction: float) -> float:
    """Return tau_m / tau_n for subsamples that are a fraction m / n of the rows."""
    return math.sqrt(fraction / (1 - fraction))


def deviation_interval(
    value: Any, values: Any, rate: float, level: float = LEVEL, excess: Any = 0.0
) -> tuple[Any, Any]:
    """Return the value minus and plus a multiple of its standard error, longer above by `excess`.

    Args:
        value: statistic of all rows; a number, or (R,) numbers.
        values: statistics of subsamples, (K,) or (R, K).
        rate: result of `sampling_rate`.
        level: the confidence level.
        excess: tail excess of the rows, for distances; 0 for statistics without such a tail.
    """
    errors = rate * np.std(values, axis=-1, ddof=1)
    reach = t.ppf((1 + level) / 2, np.shape(values)[-1] - 1) * errors
    return value - reach, value + (1 + LONGER * excess) * reach


@dataclass(frozen=True)
class BoundedValue:
    """A distance in units of the cost, with its solver bounds."""

    value: float
    lower: float
    upper: float


@dataclass(frozen=True)
class NoiseFloor:
    """Distances between halves of each dataset, and between both datasets at that size.

    Attributes:
        source: between two halves of the source.
        target: between two halves of the target.
        between: from a half of the source to a half of the target.
        size: rows of every half.
    """

    source: BoundedValue
    target: BoundedValue
    between: BoundedValue
    size: int

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of result.json."""
        return asdict(self)


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@takes()
def noise_floor(
    source: Samples,
    target: Samples,
    *,
    seed: Seed = 0,
    progress: Progress | None = None,
    **settings: Any,
) -> NoiseFloor:
    """Compare disjoint halves of each dataset, and the datasets at the size of these halves.

    All halves have one size, about half of the smaller dataset. The two halves of a dataset have
    equally many rows of every class. Class distances are measured between the halves.

    Args:
        source: samples without repeated rows.
        target: samples without repeated rows.
        seed: seed of the split.
        progress: called as progress(distances computed, their total).
        **settings: keywords of `dataset_distance`, with epsilon and penalties in units of the cost,
            as in the result for the whole datasets. Settings of a cache or of progress have no
            effect.

    Raises:
        InputError: a class has fewer than four samples, halves of the smaller dataset have too few
            rows for the classes of the other, or as `dataset_distance`.
        ConvergenceError: `solver.require_convergence` is set and a distance stopped early.

    Warns:
        NotConvergedWarning: a distance stopped before the tolerance.
        DataNotice: rows have several labels, and halves may lack rare ones.
    """
    source, target = as_samples(source, "source"), as_samples(target, "target")
    comparison = SubsetComparison(source, target, settings)
    size = half_size(comparison.source, comparison.target)
    for side in (comparison.source, comparison.target):
        notice_rare_labels(side, size)
    generator = np.random.default_rng(seed)
    x, other_x = two_halves(comparison.source, size, generator)
    y, other_y = two_halves(comparison.target, size, generator)
    distances: list[BoundedValue] = []
    for block, one, other in (("xx", x, other_x), ("yy", y, other_y), ("xy", x, y)):
        result = comparison.distance(one, other, block)
        distances.append(BoundedValue(result.value, *result.bounds))
        if progress is not None:
            progress(len(distances), 3)
    comparison.warn_unconverged(3)
    within_source, within_target, between = distances
    return NoiseFloor(within_source, within_target, between, size)


def half_size(source: LabeledSamples, target: LabeledSamples) -> int:
    """Return the rows of every half: the most that both datasets have for two halves.

    Raises:
        InputError: a class has too few samples, or one dataset too few for the other's classes.
    """
    size = min(most_per_half(source), most_per_half(target))
    for samples, other in ((source, target), (target, source)):
        if size < PER_CLASS * drawn_classes(samples):
            raise InputError(
                f"halves of {size} rows, half of what {other.name} has, cannot hold two of each of "
                f"the {drawn_classes(samples)} classes of {samples.name}; take more samples, or "
                "fewer classes"
            )
    return size


def two_halves(
    samples: LabeledSamples, size: int, generator: np.random.Generator
) -> tuple[LabeledSamples, LabeledSamples]:
    """Draw two disjoint sets of `size` rows each, with equally many rows of every class.

    Rows are paired at random within their class, `size` pairs are drawn in proportion to the
    classes, at least two of each, and each half gets one row of every pair.

    Args:
        samples: rows in at least `size` pairs.
        size: rows of each half; at least two per class.
        generator: the only source of randomness.
    """
    order = generator.permutation(len(samples))
    labels = class_labels(samples)[order]
    by_class = order[np.argsort(labels, kind="stable")]
    rank = rank_in_class(np.sort(labels))
    # Ranks 0 and 1, 2 and 3, ... of a class are pairs. A row of even rank has a partner if the next
    # row has a rank above 0: then it is of the same class.
    first = np.flatnonzero(rank % 2 == 0)
    first = first[np.append(rank, 0)[first + 1] > 0]
    pairs = np.stack((by_class[first], by_class[first + 1]), 1)
    kinds = class_labels(samples)[pairs[:, 0]]
    drawn = stratified_rows(kinds, size, generator, at_least=PER_CLASS)
    one, other = (samples.take(torch.from_numpy(np.sort(half))) for half in pairs[drawn].T)
    return one, other


def most_per_half(samples: LabeledSamples) -> int:
    """Return how many rows each of two halves with equal classes can have.

    Raises:
        InputError: a class has fewer than two rows for each half.
    """
    sizes = np.bincount(class_labels(samples))
    short = np.flatnonzero(sizes < 2 * PER_CLASS)
    if short.size:
        name = samples.class_names[short[0]] if samples.class_names else "of all rows"
        raise InputError(
            f"two halves of {samples.name} need {2 * PER_CLASS} samples of every class, and class "
            f"{name} has {sizes[short[0]]}; min_class_size={2 * PER_CLASS} drops such classes"
        )
    return int((sizes // 2).sum())
