"""Class distances of several datasets, known ones from the cache, the others by the metric.

`class_distances` is the public function of K datasets. `measure_all` measures their table,
`measure_classes` that of two datasets, `class_block` one rectangular block, and `measure_pairs`
below them a list of pairs: it reads the cache, measures the missing pairs in parts and writes them
at intervals, so that a killed run loses little. `settled_metric`, `drop_small_classes` and
`notice_single_samples` prepare metric and datasets before they are measured.

`pairwise` and `mixing.sources` call `measure_all`; `flows.modes` and `ranking.bounds` call
`measure_pairs`; `study.measures.distances` and `mixing.sources` call `class_block`; `pairwise` and
`sliced` call `as_datasets`; `gromov.distance` calls `matched`. `otdd`, `flows.run`,
`ranking.index`, `sampling.comparison`, `study.study` and others import the remaining functions from
`otdd_flash.labels`.

A change must keep the following rules. A distance has the same bits whatever other pairs are
measured beside it, with and without a cache, so that a table can be measured block by block; this
is why classes go through `merge_identical` first, which puts them in an order set by content alone,
so that a pair is always measured in the same direction. Each pair of classes is measured once. No
distance of a solve that did not converge is written, because a later run would read it without the
warning.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from otdd_flash.arguments import Count, Ground, Progress, takes
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.host_points import Streaming
from otdd_flash.cost.points import extent, points_of, squared_distances
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.devices import moved
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, NotConvergedWarning, warn
from otdd_flash.labels.metrics import (
    Continuous,
    Given,
    Labels,
    NoLabels,
    Sinkhorn,
    measures_nothing,
    metric_of,
)
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.metrics.tree import Tree
from otdd_flash.labels.pair_cache import PairCache
from otdd_flash.labels.pairs import (
    ClassCloud,
    PairDistances,
    all_pairs,
    merge_identical,
    pool,
    symmetric_table,
)
from otdd_flash.labels.table import ClassDistances, JointClassDistances, class_names, joint_table
from otdd_flash.plugins import blamed_on
from otdd_flash.samples import LabeledSamples, check_squares, needs_classes
from otdd_flash.shown import display, listing
from otdd_flash.solver.term import DEFAULT_RELATIVE


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@takes()
def class_distances(
    datasets: Sequence[Samples],
    labels: Labels = "gaussian",
    *,
    ground: Ground = "sqeuclidean",
    min_class_size: Count | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> JointClassDistances:
    """Measure the distances between all classes of several datasets, every pair once.

    Args:
        datasets: K labelled datasets of one dimension, as samples or as arrays (features, labels).
        labels: how to measure: a name, a metric of `otdd.labels` except `given`, or a function f(x,
            y) of the points of two classes. `sinkhorn` without an epsilon takes 0.01 of the mean
            squared distance between all rows.
        ground: `cosine` measures between features of length 1, as that ground cost needs it;
            `inner` has no distance between classes.
        min_class_size: drop classes with fewer samples, with a notice.
        cache_dir: folder of a database of measured distances, keyed by the content of the classes;
            known distances are read from it. None: no cache.
        progress: called with the number of pairs of classes done and their total.

    Returns:
        The whole table; `between(i, j)` is the table of two of the datasets.

    Raises:
        InputError: `datasets` is not a list, labels are missing or are `continuous`, dimensions
            differ, no class of a dataset is left, or a class is too large for the method.

    Warns:
        DataNotice: classes are dropped, or those of one sample count as points without covariance.
    """
    metric, cost = metric_of(labels), GroundCost(ground=ground)
    if isinstance(metric, Continuous):
        raise InputError(
            "labels=continuous compares the numbers of rows and has no distances between classes; "
            "choose another method, or pass labels=continuous to otdd.dataset_distance"
        )
    cost.check_labels(metric.name)
    kept = [drop_small_classes(one, min_class_size) for one in as_datasets(datasets)]
    check_squares(*kept)
    notice_single_samples(kept, metric)
    transformed = [cost.transform(one) for one in kept]
    metric = settled_metric(metric, None, transformed)
    return measure_all(transformed, metric, cache_dir=cache_dir, progress=progress)


def settled_metric(
    metric: LabelMetric,
    epsilon: float | None,
    datasets: Sequence[LabeledSamples],
    streaming: Streaming | None = None,
) -> LabelMetric:
    """Return the metric, with an epsilon for a `Sinkhorn` metric that has none.

    The epsilon is the one given for the comparison. Without one it is DEFAULT_RELATIVE times the
    mean squared distance between the pooled rows of all datasets, or 1 if that is 0.

    Args:
        metric: any metric; other kinds are returned unchanged.
        epsilon: as given by the user, or None.
        datasets: the samples as transformed by the ground cost.
        streaming: how to read points that do not stay on the device.

    Raises:
        InputError: epsilon is 0.
    """
    if isinstance(metric, Tree) and metric.add is not None:
        settled = settled_metric(metric.measured, epsilon, datasets, streaming)
        with warnings.catch_warnings():
            # The notice of its power came where the tree was made.
            warnings.simplefilter("ignore", DataNotice)
            return replace(metric, add=settled)
    if not isinstance(metric, Sinkhorn) or metric.epsilon is not None:
        return metric
    if epsilon == 0:
        raise InputError(
            "labels=sinkhorn takes the epsilon of the comparison, which is 0; set labels.epsilon "
            "(in Python labels=otdd.labels.Sinkhorn(epsilon=...)), or take labels=exact"
        )
    if epsilon is None:
        epsilon = DEFAULT_RELATIVE * _mean_square(datasets, streaming) or 1.0
    return replace(metric, epsilon=epsilon)


def _mean_square(datasets: Sequence[LabeledSamples], streaming: Streaming | None) -> float:
    """Return the mean of ||x - x'||^2 over the pooled rows of all datasets.

    It is twice the mean squared distance from the pooled mean. A dataset weighs as much as it has
    rows; within it, rows weigh by their masses.
    """
    rows = torch.tensor([len(samples) for samples in datasets], dtype=torch.float64)
    shares = rows / rows.sum()
    centres, spreads = [], []
    for samples in datasets:
        points = points_of(samples, streaming)
        masses = samples.masses.to(points.device)
        centre = extent(points, masses).mean
        centres.append(centre.cpu())
        spreads.append((masses @ squared_distances(points, centre)).cpu())
    # Relative to one of them: equal means are apart by 0 however sums are rounded.
    apart = torch.stack(centres) - centres[0]
    between = (apart - shares @ apart).square().sum(1)
    return 2 * float(shares @ (torch.stack(spreads) + between))


def measure_all(
    datasets: Sequence[LabeledSamples],
    metric: LabelMetric,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> JointClassDistances:
    """Measure all class distances of datasets without empty classes; see `class_distances`.

    The datasets are already transformed by the ground cost, and the metric is settled.

    Raises:
        InputError: as `class_distances`, or a class has no sample of positive weight.
    """
    if isinstance(metric, Given):
        raise measures_nothing()
    names = [name for samples in datasets for name in class_names(samples)]
    if (named := metric.by_names(names)) is not None:
        rest = measure_all(datasets, metric.measured, cache_dir=cache_dir, progress=progress)
        ends = [None if part is None else named + part for part in (rest.lower, rest.upper)]
        return joint_table(datasets, named + rest.full, *ends)
    if isinstance(metric, NoLabels):
        count = len(names)
        return joint_table(datasets, torch.zeros(count, count, dtype=torch.float64))
    clouds, _ = pool(datasets)
    distinct, index = merge_identical(clouds)
    # The pairs stay on the points' device, as there may be millions of them.
    pairs = all_pairs(len(distinct), distinct[0].points.device)
    found = measure_pairs(distinct, pairs, metric, cache_dir=cache_dir, progress=progress)
    # If the metric gives no bounds of its own, only the values are kept.
    exact = torch.equal(found.lower, found.values) and torch.equal(found.upper, found.values)
    tables = [
        moved(symmetric_table(values, pairs, len(distinct))[index][:, index], torch.device("cpu"))
        for values in (found[:1] if exact else found)
    ]
    return joint_table(datasets, *tables)


def as_datasets(datasets: Sequence[Samples], at_least: int = 1) -> list[LabeledSamples]:
    """Convert every dataset of a list by `as_samples`.

    Raises:
        InputError: there are fewer than `at_least`, or one cannot be converted.
    """
    if len(datasets) < at_least:
        raise InputError(
            f"the list holds {len(datasets)} datasets, and at least {at_least} are needed"
        )
    return [as_samples(one, f"datasets[{place}]") for place, one in enumerate(datasets)]


def measure_classes(
    source: LabeledSamples,
    target: LabeledSamples,
    metric: LabelMetric,
    *,
    statistics: tuple[LabeledSamples, LabeledSamples] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ClassDistances:
    """Measure the distances between all classes of two datasets.

    Args:
        source: the dataset of the first Vx classes of the table.
        target: the dataset of the last Vy classes.
        metric: how to measure.
        statistics: (source, target) datasets whose rows are measured instead, such as the whole
            datasets of which `source` and `target` are subsets; classes are matched by name.
        cache_dir: as for `class_distances`.
        progress: called with the number of pairs of classes done and their total.

    Returns:
        Squared distances with the datasets' class names; symmetric, the diagonals zero.

    Raises:
        InputError: labels are missing, a class has no sample of positive weight or is too large for
            the method, or a given table is about other classes.
    """
    if isinstance(metric, NoLabels):
        statistics = None
    else:
        for samples in (source, target):
            if samples.labels is None:
                raise needs_classes(samples)
    if isinstance(metric, Given):
        return metric.read().named_for(class_names(source), class_names(target))
    if statistics is not None:
        source, target = (
            matched(whole, samples)
            for whole, samples in zip(statistics, (source, target), strict=True)
        )
    joint = measure_all([source, target], metric, cache_dir=cache_dir, progress=progress)
    return joint.pair(0, 1)


def matched(whole: LabeledSamples, samples: LabeledSamples) -> LabeledSamples:
    """Restrict `whole` to the classes of `samples`, in their order."""
    if whole.labels is None:
        raise needs_classes(whole)
    names = whole.label_names
    if names == samples.label_names:
        return whole
    missing = [name for name in samples.label_names if name not in names]
    if missing:
        raise InputError(
            f"class statistics come from {whole.name}, which has no class {', '.join(missing)} of "
            f"{samples.name} (it has: {listing(names)})"
        )
    return whole.keep_labels([names.index(name) for name in samples.label_names])


# Number of classes named in a notice.
SHOWN = 8


def notice_single_samples(datasets: Sequence[LabeledSamples], metric: LabelMetric) -> None:
    """Warn of classes of one sample if the metric estimates covariances.

    Warns:
        DataNotice: one notice for all such classes; their covariance is taken as 0.
    """
    if not metric.single_samples_are_points:
        return
    single = []
    for samples in datasets:
        if samples.labels is None:
            continue
        counted = samples.label_counts(samples.masses > 0)
        single += [
            f"{display(repr(name))} of {display(samples.name)}"
            for name, count in zip(samples.label_names, counted, strict=True)
            if count == 1
        ]
    if single:
        shown = ", ".join(single[:SHOWN]) + f" and {len(single) - SHOWN} more" * (
            len(single) > SHOWN
        )
        warn(
            f"classes of one sample are points, with covariance 0: {shown}; min_class_size=2 drops "
            "them",
            DataNotice,
        )


def drop_small_classes(samples: LabeledSamples, minimum: int | None) -> LabeledSamples:
    """Keep the classes with at least `minimum` samples of positive weight (None: at least one).

    Classes without any sample are dropped silently, others with a `DataNotice` that names them.
    Unlabelled samples are returned unchanged.

    Raises:
        InputError: `minimum` is below 1, or no class is left.
    """
    if minimum is not None and minimum < 1:
        raise InputError(f"min_class_size must be at least 1, got {minimum}")
    if samples.labels is None:
        return samples
    needed = minimum or 1
    count, present = len(samples.label_names), samples.label_counts()
    counted = samples.label_counts(samples.masses > 0)
    keep = [c for c in range(count) if counted[c] >= needed]
    dropped = [c for c in range(count) if present[c] > 0 and counted[c] < needed]
    shown = ", ".join(f"{display(samples.label_names[c])} ({counted[c]})" for c in dropped)
    if not keep:
        raise InputError(
            f"min_class_size={needed} leaves no class of {samples.name}: all have fewer samples of "
            f"positive weight, {shown}; lower it, or take more samples"
        )
    if dropped:
        warn(
            f"dropped classes of {samples.name} with fewer than {needed} samples of positive "
            f"weight: {shown}",
            DataNotice,
        )
    if len(keep) < count:
        return samples.keep_labels(keep)
    return samples if samples.label_sets is None else _without_empty_sets(samples)


def _without_empty_sets(samples: LabeledSamples) -> LabeledSamples:
    """Leave out sets of labels that no row has; their labels are in others."""
    present = samples.class_counts.nonzero().squeeze(1).tolist()
    return samples if len(present) == samples.class_total else samples.keep_classes(present)


def class_block(
    first: LabeledSamples,
    second: LabeledSamples,
    metric: LabelMetric,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> PairDistances:
    """Measure the squared distances (V_1, V_2) between the classes of two datasets, on the CPU.

    Args:
        first: a dataset in which every class has samples of positive weight.
        second: another such dataset; the same object for the block of a dataset with itself.
        metric: any metric but `Given`.
        cache_dir: as for `measure_pairs`.

    Returns:
        The block, with solver bounds of the same shape.

    Raises:
        InputError: labels are missing, or a class has no sample of positive weight or is too large
            for the method.
    """
    shape = len(class_names(first)), len(class_names(second))
    named = metric.by_names([*class_names(first), *class_names(second)])
    if named is not None:
        rest = class_block(first, second, metric.measured, cache_dir=cache_dir)
        return PairDistances(*(part.double() + named[: shape[0], shape[0] :] for part in rest))
    if isinstance(metric, NoLabels):
        return PairDistances.exactly(torch.zeros(shape))
    same = first is second
    clouds, _ = pool([first] if same else [first, second])
    distinct, index = merge_identical(clouds)
    rows, columns = index[: shape[0]], index[-shape[1] :]
    wanted = {(max(pair), min(pair)) for pair in product(rows, columns) if pair[0] != pair[1]}
    pairs = torch.tensor(sorted(wanted), dtype=torch.int64).reshape(-1, 2)
    found = measure_pairs(distinct, pairs, metric, cache_dir=cache_dir)
    tables = (symmetric_table(part, pairs, len(distinct)) for part in found)
    return PairDistances(*(table[rows][:, columns].cpu() for table in tables))


# A metric prepares all classes of a part before its first pair. With PAIRS_PER_CLASS pairs per
# class in a part, all parts together take some 5% longer than one run over all pairs, and a killed
# run loses one part. A GPU takes seconds for whole tables and measures them in one part.
PAIRS_PER_CLASS = 4
# A write takes some milliseconds; exact distances may come at hundreds per second.
SECONDS_BETWEEN_WRITES = 1.0


def measure_pairs(
    clouds: Sequence[ClassCloud],
    pairs: Tensor,
    metric: LabelMetric,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> PairDistances:
    """Measure the distances of pairs of classes, reading from and writing to the cache.

    The numbers are the same with and without a cache, to the last bit.

    Args:
        clouds: V classes, in the order of `merge_identical`.
        pairs: (P, 2) int64, indices of two different classes, the larger first, on any device.
        metric: how to measure; any metric but `Given`.
        cache_dir: folder of the cache, used for metrics that have a recipe; None: no cache.
        progress: called with the number of pairs done and their total.

    Returns:
        P distances with bounds, on the points' device.

    Raises:
        InputError: a class is too large for the method.

    Warns:
        NotConvergedWarning: a solve stopped before the tolerance.
    """
    pairs = pairs.to(clouds[0].points.device)
    recipe = metric.recipe(pairs.device) if cache_dir is not None and len(pairs) else None
    cache = None if cache_dir is None or recipe is None else PairCache(cache_dir)
    numbers = torch.empty((3, len(pairs)), dtype=torch.float64, device=pairs.device)
    missing = torch.arange(len(pairs), device=pairs.device)
    at_once, classes = len(pairs), list[bytes]()
    if cache is not None and recipe is not None:
        classes = [cloud.fingerprint for cloud in clouds]
        known, found = cache.find(recipe, classes, pairs)
        numbers[:, known] = torch.stack(found)
        unknown = torch.ones(len(pairs), dtype=torch.bool, device=pairs.device)
        unknown[known] = False
        missing = torch.nonzero(unknown).squeeze(1)
        at_once = len(missing) if pairs.is_cuda else PAIRS_PER_CLASS * len(clouds)
        if progress is not None:
            progress(len(known), len(pairs))
    unwritten: list[Tensor] = []
    written = time.monotonic()

    def write() -> None:
        if cache is not None and recipe is not None and unwritten:
            some = torch.cat(unwritten)
            cache.keep(recipe, classes, pairs[some], PairDistances(*numbers[:, some]))

    try:
        # The generator is closed at once after an interrupt: other processes may be working for the
        # generator.
        with closing(_measured(clouds, pairs, missing, metric, at_once, progress)) as parts:
            for positions, distances, converged in parts:
                for row, values in zip(numbers, distances, strict=True):
                    # A metric of another package may return another dtype or device.
                    row[positions] = values.to(row)
                if converged:
                    unwritten.append(positions)
                if time.monotonic() >= written + SECONDS_BETWEEN_WRITES:
                    write()
                    unwritten, written = [], time.monotonic()
    finally:
        write()
    return PairDistances(*numbers)


def _measured(
    clouds: Sequence[ClassCloud],
    pairs: Tensor,
    positions: Tensor,
    metric: LabelMetric,
    at_once: int,
    progress: Progress | None,
) -> Generator[tuple[Tensor, PairDistances, bool]]:
    """Measure the pairs at some positions of the list, part by part.

    Yields:
        Positions (k,) of measured pairs in the list, their distances, and whether all of them
        reached the metric's tolerance.
    """
    done = len(pairs) - len(positions)
    if not len(positions):
        return

    def heard(within: int, _: int) -> None:
        if progress is not None:
            progress(done + within, len(pairs))

    as_they_come = metric.in_parts(clouds, pairs[positions])
    if as_they_come is not None:
        with closing(as_they_come) as parts:
            for run, values in parts:
                yield positions[run], PairDistances.exactly(values), True
                heard(len(run), len(positions))
                done += len(run)
        return
    for run in torch.split(positions, max(1, at_once)):
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", NotConvergedWarning)
            with blamed_on(metric, f"labels={metric.name}"):
                distances = metric.measure(clouds, pairs[run], heard)
        for warning in said:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        late = any(issubclass(warning.category, NotConvergedWarning) for warning in said)
        yield run, distances, not late
        done += len(run)
        heard(0, len(positions))
