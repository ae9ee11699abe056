"""The dataset distance as a function of the rows drawn, and the draws themselves.

`SubsetComparison` compares drawn rows of two datasets, with epsilon, metric, ground cost and device
of the whole datasets; `sampling.subsampling` and `study.measures.distances` make one. `subsample`
draws rows without replacement: both of these and `mixing.mixture` call it, and
`study.measures.network` calls `subsample_rows`. `commands.compare` and `shift.rows` call
`drawable`, which returns the rows that may be drawn.

A change must keep the draws a function of the generator and of the labels alone, so that every
process draws the same rows from a seed. All draws are compared at the epsilon of the whole
datasets, which the caller must give: the entropic distance S_epsilon at another epsilon is another
number. Notices that the distance of the whole datasets has already given are not repeated for
draws.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.distributed.ranks import ranks_of
from otdd_flash.errors import DataNotice, InputError, NotConvergedWarning, warn
from otdd_flash.labels import (
    ClassDistances,
    Continuous,
    Given,
    LabelMetric,
    NoLabels,
    Sinkhorn,
    drop_small_classes,
    measure_classes,
    metric_of,
)
from otdd_flash.labels.metrics import with_numbers
from otdd_flash.operators.comparison import Comparison
from otdd_flash.otdd import dataset_distance
from otdd_flash.result import DistanceResult
from otdd_flash.samples import LabeledSamples, check_squares
from otdd_flash.shown import listing
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.schedules import Exact, schedule_of
from otdd_flash.solver.shortfall import joint_shortfall


class SubsetComparison:
    """`dataset_distance` between parts of two datasets, all at one epsilon.

    Class distances are measured on the rows that are compared, as they are part of the statistic. A
    table that is given, or measured once on `class_statistics` (datasets whose classes stand for
    those of all parts), is fixed.

    Args:
        source: the whole source.
        target: the whole target.
        arguments: those of `dataset_distance`; settings of a cache or of progress have no effect.

    Attributes:
        source: the rows to draw from. They have positive weight and classes that are not too small;
            where labels do not count they have none.
        target: the same of the target.
        unconverged: the divergences that stopped before the tolerance.
        ranks: the processes that share the work, if there are several.

    Raises:
        InputError: `epsilon` is not among the arguments, nor a solver that has it 0, or
            `epsilon_relative` or `unbalanced_relative` is; the epsilon of `sinkhorn` is missing; or
            features are not finite.
    """

    def __init__(
        self, source: LabeledSamples, target: LabeledSamples, arguments: dict[str, Any]
    ) -> None:
        self._settings = dict(arguments)
        relative = self._settings.pop("epsilon_relative", None)
        if isinstance(self._settings.get("solver"), Exact) and not relative:
            relative, given = None, self._settings.get("epsilon")
            self._settings["epsilon"] = 0.0 if given is None else given
        if relative is not None or self._settings.get("epsilon") is None:
            instead = "" if relative is None else ", instead of epsilon_relative"
            raise InputError(
                "parts of the data are compared at the epsilon of the whole: give the result's, "
                f"epsilon=result.epsilon{instead}"
            )
        if self._settings.get("unbalanced_relative") is not None:
            raise InputError(
                "parts of the data are compared at the penalty of the whole: give it in units of "
                "the cost, unbalanced=rho * result.mean_cost, instead of unbalanced_relative"
            )
        check_squares(source, target)
        for key in ("cache_dir", "class_progress", "progress"):
            self._settings.pop(key, None)
        given = self._settings.pop("class_distances", None)
        labels = self._settings.get("labels", "gaussian")
        metric = metric_of(labels) if given is None else Given(given)
        # One scale for all parts.
        metric, (source, target) = with_numbers(metric, (source, target))
        if isinstance(metric, Continuous):
            self._settings["labels"] = metric
        measured = metric.measured
        if isinstance(measured, Sinkhorn) and measured.epsilon is None:
            place = "labels" if measured is metric else "add"
            raise InputError(
                "class distances between parts are measured at the epsilon of the whole: give the "
                f"result's, {place}=otdd.labels.Sinkhorn(epsilon=result.labels_epsilon)"
            )
        minimum = self._settings.pop("min_class_size", None)
        sides = drawable(source, metric, minimum), drawable(target, metric, minimum)
        self._cost = cost = GroundCost(ground=self._settings.get("ground", "sqeuclidean"))
        compute = ComputeOptions.of(self._settings.get("compute"))
        self.ranks = None if compute.group is None else ranks_of(compute.group)
        # Rows are drawn on the device on which they are compared.
        prepared = Comparison.prepare(sides, cost, compute, pairs=())
        self.source, self.target = prepared.given
        self._table = self._fixed_table(metric, prepared)
        self.unconverged: list[Divergence] = []

    def __getstate__(self) -> dict[str, Any]:
        # The group belongs to this process.
        return {**self.__dict__, "ranks": None}

    def sides_of_cost(self) -> tuple[LabeledSamples, LabeledSamples]:
        """Return both datasets as transformed by the ground cost."""
        return self._cost.transform(self.source), self._cost.transform(self.target)

    def distance(
        self, source: LabeledSamples, target: LabeledSamples, block: str = "xy"
    ) -> DistanceResult:
        """Compute the distance between two sets of drawn rows.

        Args:
            source: rows of the source, or of the target for `block="yy"`.
            target: rows of the target, or of the source for `block="xx"`.
            block: which block of a fixed table of class distances lies between both sets of rows:
                "xx" if both are of the source, "yy" if both are of the target.
        """
        table = self._table
        if table is not None and block != "xy":
            within: Tensor = getattr(table, block)
            table = ClassDistances(within, within, within)
        with warnings.catch_warnings():
            # `warn_unconverged` reports once for all; the whole distance has reported on its
            # classes.
            warnings.simplefilter("ignore", NotConvergedWarning)
            warnings.simplefilter("ignore", DataNotice)
            result = dataset_distance(source, target, class_distances=table, **self._settings)
        if not result.converged:
            self.unconverged.append(result.divergence)
        return result

    def warn_unconverged(self, count: int) -> None:
        """Warn if some of `count` distances stopped before the tolerance."""
        if self.unconverged:
            message = joint_shortfall(
                dict(enumerate(self.unconverged)),
                schedule_of(self._settings.get("solver"), self._settings["epsilon"], None)[0],
                lambda some: f"{len(some)} of {count} distances between parts of the data",
                self.unconverged[0].xy.f.dtype,
            )
            warn(message, NotConvergedWarning)

    def _fixed_table(self, metric: LabelMetric, prepared: Comparison) -> ClassDistances | None:
        statistics = self._settings.pop("class_statistics", None)
        if isinstance(metric, NoLabels) or (statistics is None and not metric.fixed):
            return None
        if statistics is not None:
            one, other = statistics
            statistics = prepared.transform(one), prepared.transform(other)
        source, target = prepared.transformed
        return measure_classes(source, target, metric, statistics=statistics)


def drawable(
    samples: LabeledSamples, metric: LabelMetric, min_class_size: int | None
) -> LabeledSamples:
    """Return the rows that count in a distance.

    Small classes are left out silently, as the distance itself has reported them.
    """
    if isinstance(metric, NoLabels):
        samples = replace(samples, labels=None, class_names=(), label_sets=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataNotice)
        samples = drop_small_classes(samples, min_class_size)
    positive = samples.masses > 0
    return samples if bool(positive.all()) else samples.take(positive.nonzero().squeeze(1))


# A covariance needs two points.
PER_CLASS = 2

Rows = NDArray[np.int64]


def subsample(samples: LabeledSamples, size: int, generator: np.random.Generator) -> LabeledSamples:
    """Draw `size` rows uniformly without replacement; class proportions vary as in sampling.

    If fewer than two rows of a class (or not its only one) are among the first `size` drawn, its
    next rows take the places of the last ones.

    Args:
        samples: n rows; n >= size >= `least_rows(samples)`.
        size: rows to draw.
        generator: the only source of randomness.
    """
    return samples.take(subsample_rows(samples, size, generator))


def subsample_rows(samples: LabeledSamples, size: int, generator: np.random.Generator) -> Tensor:
    """Return the row numbers of `subsample`, ascending."""
    order = generator.permutation(len(samples))
    needed = rank_in_class(class_labels(samples)[order]) < PER_CLASS
    # The needed rows first, then the others as drawn.
    chosen = order[np.argsort(~needed, kind="stable")[:size]]
    return torch.from_numpy(np.sort(chosen))


def least_rows(samples: LabeledSamples) -> int:
    """Return the fewest rows that hold two of every class, or one of a class that has no more."""
    sizes = np.bincount(class_labels(samples))
    return int(np.minimum(sizes, PER_CLASS).sum())


def class_labels(samples: LabeledSamples) -> Rows:
    """Return the labels (n,), all 0 where there are none, or several in a row."""
    if samples.labels is None or samples.label_sets is not None:
        return np.zeros(len(samples), dtype=np.int64)
    labels: Rows = samples.labels.cpu().numpy()
    return labels


def drawn_classes(samples: LabeledSamples) -> int:
    """Return the number of classes of which rows are drawn."""
    return 1 if samples.label_sets is not None else samples.class_total


def notice_rare_labels(samples: LabeledSamples, rows: int) -> None:
    """Warn of labels that parts of `rows` rows may lack, as rows with several labels are drawn.

    Warns:
        DataNotice: of some labels a part has fewer than two rows on average.
    """
    if samples.label_sets is None:
        return
    needed = math.ceil(PER_CLASS * len(samples) / rows)
    counted = zip(samples.label_names, samples.label_counts(), strict=True)
    rare = [f"{name} ({count})" for name, count in counted if 0 < count < needed]
    if rare:
        warn(
            f"parts of {rows} of the {len(samples)} rows of {samples.name} may lack labels of few "
            f"rows, as they are drawn whatever their labels: {listing(rare, 10)}; "
            f"min_class_size={needed} drops such labels",
            DataNotice,
        )


def rank_in_class(labels: Rows) -> Rows:
    """Return for every entry how many earlier entries equal it."""
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rank
