"""Class-to-class distances of several datasets, and of two as their special case.

`class_distances` is the public function of K datasets and `JointClassDistances` its result, the (V,
V) table over all V classes. `measure_classes` returns the `ClassDistances` of two datasets,
`class_block` one rectangular block of a table. `settled_metric`, `drop_small_classes` and
`notice_single_samples` prepare metric and datasets before they are measured.

`pairwise`, `sliced.distances`, `study.measures`, `flows.result` and `flows.modes.feature_driven`
call this module; `otdd`, `flows.run`, `sampling.comparison`, `study.study` and `study.setup` import
its names through `otdd_flash.labels`.

A change must keep three things. A distance has the same bits whatever other pairs are measured
beside it, so that a table can be measured block by block; this is why classes go through
`merge_identical` first. Each pair of classes is measured once. The keys of the npz files must stay,
because users' tables are read by them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import Count, Ground, Index, takes
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.devices import moved
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.files.tensor_file import read_arrays, write_arrays
from otdd_flash.files.written_by import STAMP
from otdd_flash.labels.classes import merge_identical, pool
from otdd_flash.labels.measuring import measure_pairs
from otdd_flash.labels.metrics import (
    Given,
    LabelMetric,
    Labels,
    NoLabels,
    Sinkhorn,
    metric_of,
)
from otdd_flash.labels.metrics.given import measures_nothing
from otdd_flash.labels.pairs import PairDistances, Progress, all_pairs, symmetric_table
from otdd_flash.labels.table import ClassDistances
from otdd_flash.operators.build import points_of
from otdd_flash.operators.float64_rows import squared_distances, weighted_mean
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.host_points import Streaming
from otdd_flash.real_numbers import in_double, real_tensor
from otdd_flash.samples import HOW_TO_LABEL, LabeledSamples, check_squares
from otdd_flash.shown import display, listing
from otdd_flash.solver.term.epsilon import DEFAULT_RELATIVE

UNLABELLED_CLASS = "all"


@dataclass(frozen=True, eq=False)
class JointClassDistances:
    """Squared 2-Wasserstein distances between all classes of K datasets, ground cost ||.||^2.

    Attributes:
        full: (V, V) float64, with V classes in all; symmetric, 0 on the diagonal and between
            classes of equal content.
        datasets: K names, made distinct by numbers where datasets share one.
        class_names: for each dataset the names of its classes, in the order of its rows in the
            table.
        lower: (V, V) lower solver bounds; None if the metric gives none.
        upper: (V, V) upper solver bounds; None if the metric gives none.
    """

    full: Tensor
    datasets: tuple[str, ...]
    class_names: tuple[tuple[str, ...], ...]
    lower: Tensor | None = None
    upper: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("full", "lower", "upper"):
            if (given := getattr(self, name)) is not None:
                what = f"class distances {name}"
                object.__setattr__(self, name, in_double(what, real_tensor(what, given)))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The K + 1 row offsets: dataset k has the rows offsets[k] to offsets[k + 1] - 1."""
        return (0, *accumulate(len(names) for names in self.class_names))

    @computes
    @takes()
    def between(self, first: Index, second: Index) -> ClassDistances:
        """Return the table of two of the datasets, given by their indices in the list.

        Raises:
            InputError: an index is out of range.
        """
        for place in (first, second):
            if not 0 <= place < len(self.datasets):
                raise InputError(
                    f"there is no dataset {place}; the table has {len(self.datasets)}, counted "
                    f"from 0: {', '.join(self.datasets)}"
                )
        rows = torch.cat([torch.arange(*self.offsets[k : k + 2]) for k in (first, second)])
        lower, upper = (
            None if table is None else table[rows][:, rows] for table in (self.lower, self.upper)
        )
        return ClassDistances.from_full(
            self.full[rows][:, rows],
            len(self.class_names[first]),
            self.class_names[first],
            self.class_names[second],
            lower=lower,
            upper=upper,
        )

    def named_for(self, datasets: Sequence[LabeledSamples]) -> JointClassDistances:
        """Return the table of these datasets' classes; rows are matched to classes by name.

        Raises:
            InputError: the number of datasets differs, or a class has no row.
        """
        if len(datasets) != len(self.datasets):
            raise InputError(
                f"the given class distances are about {len(self.datasets)} datasets "
                f"({', '.join(self.datasets)}), but there are {len(datasets)}"
            )
        rows: list[int] = []
        for samples, known, start in zip(datasets, self.class_names, self.offsets, strict=False):
            missing = [name for name in class_names(samples) if name not in known]
            if missing:
                raise InputError(
                    f"the given class distances have no class {', '.join(missing[:12])} of "
                    f"{samples.name}; they have {', '.join(known[:12])}"
                )
            rows += [start + known.index(name) for name in class_names(samples)]
        bounds = (
            None if table is None else table[rows][:, rows] for table in (self.lower, self.upper)
        )
        return _joint(datasets, self.full[rows][:, rows], *bounds)

    @takes()
    def save(self, path: str | Path) -> None:
        """Write an npz file with the keys full, offsets, datasets, class_names and the version.

        The keys lower and upper are added if there are bounds.

        Raises:
            InputError: the file cannot be written.
        """
        parts = {
            "full": self.full,
            "offsets": self.offsets,
            "datasets": self.datasets,
            "class_names": [name for names in self.class_names for name in names],
            "lower": self.lower,
            "upper": self.upper,
        }
        known = {key: part for key, part in parts.items() if part is not None}
        write_arrays(path, {**known, **STAMP})

    @classmethod
    @takes()
    def load(cls, path: str | Path) -> JointClassDistances:
        """Read a file that `save` wrote.

        Raises:
            InputError: the file is missing, unreadable or no such table.
        """
        needed = ("full", "offsets", "datasets", "class_names")
        arrays = read_arrays(path, needed, "JointClassDistances.save")
        names, datasets = (
            tuple(str(name) for name in np.atleast_1d(arrays[key]))
            for key in ("class_names", "datasets")
        )
        offsets = np.atleast_1d(arrays["offsets"]).tolist()
        full, lower, upper = (
            torch.as_tensor(arrays[key]).double() if key in arrays else None
            for key in ("full", "lower", "upper")
        )
        assert full is not None
        if not all(table is None or table.isfinite().all() for table in (full, lower, upper)):
            raise InputError(f"{path}: class distances hold NaN or infinite entries")
        square = (len(names), len(names))
        counted = offsets[-1] == len(names) and len(offsets) == len(datasets) + 1
        if not counted or any(t is not None and t.shape != square for t in (full, lower, upper)):
            raise InputError(
                f"{path}: the tables, names and offsets do not count the same classes; "
                "JointClassDistances.save writes such files"
            )
        groups = tuple(names[start:end] for start, end in pairwise(offsets))
        return cls(full, datasets, groups, lower, upper)


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
        InputError: not a list of datasets, labels are missing, the dimensions differ, or a class is
            too small or too large for the method.
    """
    metric, cost = metric_of(labels), GroundCost(ground=ground)
    cost.check_labels(metric.name)
    kept = [drop_small_classes(one, min_class_size) for one in as_datasets(datasets)]
    check_squares(*kept)
    notice_single_samples(kept, metric)
    seen = [cost.seen(one) for one in kept]
    metric = settled_metric(metric, None, seen)
    return measure_all(seen, metric, cache_dir=cache_dir, progress=progress)


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
    """
    if not isinstance(metric, Sinkhorn) or metric.epsilon is not None:
        return metric
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
        centre = weighted_mean(points, masses)
        centres.append(centre.cpu())
        spreads.append((masses @ squared_distances(points, centre)).cpu())
    mean = shares @ torch.stack(centres)
    between = (torch.stack(centres) - mean).square().sum(1)
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
    if isinstance(metric, NoLabels):
        count = sum(len(class_names(samples)) for samples in datasets)
        return _joint(datasets, torch.zeros(count, count, dtype=torch.float64))
    clouds, _ = pool(datasets)
    distinct, index = merge_identical(clouds)
    # Stays on the points' device: there may be millions of pairs.
    pairs = all_pairs(len(distinct), distinct[0].points.device)
    found = measure_pairs(distinct, pairs, metric, cache_dir=cache_dir, progress=progress)
    tables = [
        moved(symmetric_table(values, pairs, len(distinct))[index][:, index], torch.device("cpu"))
        for values in _bounded(found)
    ]
    return _joint(datasets, *tables)


def class_names(samples: LabeledSamples) -> tuple[str, ...]:
    """Return the class names; unlabelled samples have the single class `UNLABELLED_CLASS`."""
    return samples.class_names if samples.labels is not None else (UNLABELLED_CLASS,)


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


def _joint(
    datasets: Sequence[LabeledSamples],
    full: Tensor,
    lower: Tensor | None = None,
    upper: Tensor | None = None,
) -> JointClassDistances:
    names = tuple(class_names(samples) for samples in datasets)
    return JointClassDistances(full, distinct_names(datasets), names, lower, upper)


def distinct_names(datasets: Sequence[LabeledSamples]) -> tuple[str, ...]:
    """Return the datasets' names, with the index appended to names that several share."""
    names = [samples.name for samples in datasets]
    return tuple(
        f"{name} ({place})" if names.count(name) > 1 else name for place, name in enumerate(names)
    )


def _bounded(found: PairDistances) -> tuple[Tensor, ...]:
    """Return the values alone where both bounds equal them, else values, lower and upper."""
    if torch.equal(found.lower, found.values) and torch.equal(found.upper, found.values):
        return (found.values,)
    return tuple(found)


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
        statistics: (source, target) datasets that give the points of the classes instead, such as
            the whole datasets of which `source` and `target` are subsets; classes are matched by
            name.
        cache_dir: as for `class_distances`.
        progress: called with the number of pairs of classes done and their total.

    Returns:
        Squared distances with the datasets' class names; symmetric, the diagonals zero.

    Raises:
        InputError: labels are missing, a class is too small or too large for the method, or a given
            table is about other classes.
    """
    if isinstance(metric, NoLabels):
        statistics = None
    else:
        for samples in (source, target):
            if samples.labels is None:
                raise InputError(f"{samples.name} has no labels; {HOW_TO_LABEL}")
    if isinstance(metric, Given):
        return metric.read().named_for(class_names(source), class_names(target))
    if statistics is not None:
        source, target = (
            _matched(whole, samples)
            for whole, samples in zip(statistics, (source, target), strict=True)
        )
    joint = measure_all([source, target], metric, cache_dir=cache_dir, progress=progress)
    return joint.between(0, 1)


def _matched(whole: LabeledSamples, samples: LabeledSamples) -> LabeledSamples:
    """Restrict `whole` to the classes of `samples`, in their order."""
    if whole.labels is None:
        raise InputError(f"{whole.name} has no labels; {HOW_TO_LABEL}")
    if whole.class_names == samples.class_names:
        return whole
    missing = [name for name in samples.class_names if name not in whole.class_names]
    if missing:
        raise InputError(
            f"class statistics come from {whole.name}, which has no class {', '.join(missing)} of "
            f"{samples.name} (it has: {listing(whole.class_names)})"
        )
    return whole.keep_classes([whole.class_names.index(name) for name in samples.class_names])


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
        weighed = samples.labels[samples.masses > 0]
        counted = torch.bincount(weighed, minlength=len(samples.class_names)).tolist()
        names = zip(samples.class_names, counted, strict=True)
        single += [
            f"{display(repr(name))} of {display(samples.name)}"
            for name, count in names
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
    count = len(samples.class_names)
    present = samples.class_counts.tolist()
    counted = torch.bincount(samples.labels[samples.masses > 0], minlength=count).tolist()
    keep = [c for c in range(count) if counted[c] >= needed]
    dropped = [c for c in range(count) if present[c] > 0 and counted[c] < needed]
    listing = ", ".join(f"{display(samples.class_names[c])} ({counted[c]})" for c in dropped)
    if not keep:
        raise InputError(
            f"min_class_size={needed} leaves no class of {samples.name}: all have fewer samples of "
            f"positive weight, {listing}; lower it, or take more samples"
        )
    if dropped:
        warn(
            f"dropped classes of {samples.name} with fewer than {needed} samples of positive "
            f"weight: {listing}",
            DataNotice,
        )
    return samples if len(keep) == count else samples.keep_classes(keep)


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
        InputError: labels are missing, or a class is too small or too large for the method.
    """
    shape = first.class_total, second.class_total
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
