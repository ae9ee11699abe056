"""Class-to-class distances W of two datasets, by the method of one's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from otdd_flash.errors import InputError, choose
from otdd_flash.labels.classes import ClassCloud, merge_identical, pool
from otdd_flash.labels.exact import exact_distances
from otdd_flash.labels.gaussian import Progress, diagonal_gaussian_distances, gaussian_distances
from otdd_flash.labels.moments import class_means, squared_distances, total_variances
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances
from otdd_flash.labels.table import ClassDistances
from otdd_flash.samples import HOW_TO_LABEL, LabeledSamples

METHODS = ("gaussian", "sinkhorn", "exact", "means", "upper_bound", "none", "given")
UNLABELLED_CLASS = "all"


@dataclass(frozen=True)
class LabelMetric:
    """How distances between classes are measured.

    Args:
        method: one of `METHODS`.
            gaussian: squared Bures-Wasserstein distance of class means and covariances;
            sinkhorn: debiased entropic transport between the classes' points;
            exact: unregularised squared 2-Wasserstein distance between the classes' points;
            means: ||m_i - m_j||^2 (squared);
            upper_bound: ||m_i - m_j||^2 + tr S_i + tr S_j, 0 for identical classes;
            none: 0, plain feature transport, for unlabelled data too;
            given: the table in `given`.
        unbiased: covariances divide by n - 1, else by n (gaussian, upper_bound).
        diagonal: covariances between features are taken as zero (gaussian).
        epsilon: entropic regularisation, in units of ||.||^2 (sinkhorn).
        tolerance: L1 marginal error at which solves stop (sinkhorn).
        given: a table, or the path of its npz (given).

    Raises:
        InputError: an unknown method, or one that lacks its parameter.
    """

    method: str = "gaussian"
    unbiased: bool = True
    diagonal: bool = False
    epsilon: float | None = None
    tolerance: float = 1e-3
    given: ClassDistances | str | Path | None = None

    def __post_init__(self) -> None:
        choose("labels method", self.method, METHODS)
        if self.method == "sinkhorn":
            if self.epsilon is None:
                raise InputError(
                    "labels=sinkhorn needs labels.epsilon, in units of squared distance"
                )
            if not self.epsilon > 0:
                raise InputError(f"labels.epsilon must be positive, got {self.epsilon}")
            if not self.tolerance > 0:
                raise InputError(f"the tolerance must be positive, got {self.tolerance}")
        if self.method == "given" and self.given is None:
            raise InputError(
                "labels=given needs a table: labels.path=W.npz with arrays xx, xy and yy, or "
                "class_distances= in Python"
            )


def measure_classes(
    source: LabeledSamples,
    target: LabeledSamples,
    metric: LabelMetric,
    *,
    statistics: tuple[LabeledSamples, LabeledSamples] | None = None,
    progress: Progress | None = None,
) -> ClassDistances:
    """Distances between all classes of two datasets.

    Args:
        source: the dataset whose classes are the table's first Vx.
        target: the dataset whose classes are its last Vy.
        metric: how to measure.
        statistics: take the points of the classes from these (source, target) instead, such as the
            whole datasets of which `source` and `target` are subsets; classes are matched by name.
        progress: called with the number of class pairs done and their total.

    Returns:
        Squared distances with the datasets' class names; symmetric, the diagonals zero.

    Raises:
        InputError: labels are missing, a class is too small or too large for the method, or the
            given table is about other classes.
    """
    names_x, names_y = class_names(source), class_names(target)
    if metric.method == "none":
        count = len(names_x) + len(names_y)
        zeros = torch.zeros(count, count, dtype=torch.float64)
        return ClassDistances.from_full(zeros, len(names_x), names_x, names_y)
    for samples in (source, target):
        if samples.labels is None:
            raise InputError(f"{samples.name} has no labels; {HOW_TO_LABEL}")
    if metric.method == "given":
        return _given_table(metric).named_for(names_x, names_y)
    if statistics is not None:
        source, target = (
            _matched(whole, samples)
            for whole, samples in zip(statistics, (source, target), strict=True)
        )
    full, (_, size_x, _) = table_of((source, target), metric, progress=progress)
    return ClassDistances.from_full(full, size_x, names_x, names_y)


def table_of(
    datasets: Sequence[LabeledSamples], metric: LabelMetric, *, progress: Progress | None = None
) -> tuple[Tensor, tuple[int, ...]]:
    """One table over the classes of all datasets.

    Returns:
        (V, V) float64 on the CPU, V the number of classes in all, symmetric, zero on the diagonal
        and between classes of equal content; and K + 1 offsets: dataset k has rows offsets[k] to
        offsets[k + 1].

    Raises:
        InputError: as `measure_classes`.
    """
    clouds, offsets = pool(datasets)
    distinct, index = merge_identical(clouds)
    table = _distances(distinct, metric, progress).cpu()
    return table[index][:, index], offsets


def class_names(samples: LabeledSamples) -> tuple[str, ...]:
    """The class names, of which unlabelled samples have one."""
    return samples.class_names if samples.labels is not None else (UNLABELLED_CLASS,)


def _distances(
    clouds: Sequence[ClassCloud], metric: LabelMetric, progress: Progress | None
) -> Tensor:
    match metric.method:
        case "gaussian" if metric.diagonal:
            return diagonal_gaussian_distances(clouds, unbiased=metric.unbiased)
        case "gaussian":
            return gaussian_distances(clouds, unbiased=metric.unbiased, progress=progress)
        case "means":
            return squared_distances(class_means(clouds))
        case "upper_bound":
            traces = total_variances(clouds, metric.unbiased)
            table = squared_distances(class_means(clouds)) + (traces.unsqueeze(1) + traces)
            return table.fill_diagonal_(0)
        case "exact":
            return exact_distances(clouds, progress=progress)
        case "sinkhorn":
            assert metric.epsilon is not None
            return sinkhorn_distances(clouds, metric.epsilon, metric.tolerance, progress=progress)
        case "none":
            return torch.zeros(len(clouds), len(clouds), dtype=torch.float64)
    raise InputError(f"labels={metric.method} does not measure classes; it is a table of its own")


def _given_table(metric: LabelMetric) -> ClassDistances:
    if isinstance(metric.given, ClassDistances):
        return metric.given
    assert metric.given is not None
    return ClassDistances.load(metric.given)


def _matched(whole: LabeledSamples, samples: LabeledSamples) -> LabeledSamples:
    """`whole` with the classes of `samples` only, in their order."""
    if whole.labels is None:
        raise InputError(f"{whole.name} has no labels; {HOW_TO_LABEL}")
    if whole.class_names == samples.class_names:
        return whole
    missing = [name for name in samples.class_names if name not in whole.class_names]
    if missing:
        raise InputError(
            f"class statistics come from {whole.name}, which has no class {', '.join(missing)} of "
            f"{samples.name} (it has: {', '.join(whole.class_names)})"
        )
    return whole.keep_classes([whole.class_names.index(name) for name in samples.class_names])
