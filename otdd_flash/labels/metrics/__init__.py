"""The metrics between labels, the registry `METRICS` of their names, and numbers for classes.

`gaussian`: Bures-Wasserstein distance of class means and covariances; `exact`: unregularised
transport between points; `sinkhorn`: debiased entropic transport between points; `means`: squared
distance of means; `upper_bound`: squared distance of means plus both variances; `none`: zero, plain
feature transport; `given`: a table of the user's, which its readers (`labels.measuring`,
`gromov.distance`, `shift.rows`) never measure with. `labels.metrics.tree` has `tree`: paths between
the names of classes. `PairFunction` calls a function of the points of two classes; `study.study`
checks by its `probe` that a resumed run has the same function. Each is a frozen dataclass of its
parameters that extends `LabelMetric` of `labels.metrics.base`. The numerical work is in
`labels.gaussian`, `labels.exact` and `labels.sinkhorn_pairs`.

`continuous` compares rows by lambda_y ||(t_i - s_j) / scale||^2 instead. `with_numbers` finds the
targets and one scale of all datasets, and puts it into the metric. `otdd`, `pairwise`, `flows.run`,
`mixing.sources`, `ranking.index`, `sampling.comparison`, `shift.rows` and `study.study` call it for
every metric, before anything is measured. A `Comparison` takes the scale (`scale_of`), by which
`operators.label_costs` embeds its labels.

`metric_of` turns the `labels=` argument of the public functions into a metric, `metric_named` the
`labels` group of a configuration. `labels.measuring` imports the metrics from here; `otdd`,
`pairwise`, `flows.run`, `study.study`, `commands.settings` and others do through
`otdd_flash.labels`.

Names of methods and of their fields are keys of configurations and results, so they must stay;
other packages add to them by entry points (`plugins`). The text of a recipe is a key of the pair
cache: after a change of it, the metric's cached distances are not found any more.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otdd_flash.arguments import Positive, Progress
from otdd_flash.checks import shown
from otdd_flash.errors import InputError, placed
from otdd_flash.label_sets import named_numbers
from otdd_flash.labels.exact import exact_distances, exact_parts
from otdd_flash.labels.gaussian import (
    diagonal_gaussian_table,
    gaussian_table,
    mean_table,
    upper_bound_table,
)
from otdd_flash.labels.metrics.base import LabelMetric, Measured
from otdd_flash.labels.metrics.tree import Tree
from otdd_flash.labels.pairs import ClassCloud, PairDistances
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances
from otdd_flash.labels.table import ClassDistances
from otdd_flash.plugins import Registry, blamed_on, user_code
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import display


@dataclass(frozen=True)
class Gaussian(LabelMetric):
    """Bures-Wasserstein, ||m_i - m_j||^2 + tr S_i + tr S_j - 2 tr (S_i^1/2 S_j S_i^1/2)^1/2.

    Args:
        unbiased: covariances S divide by n - 1, else by n.
        diagonal: covariances between features are taken as zero.

    Raises:
        InputError: an argument is neither true nor false.
    """

    name = "gaussian"

    unbiased: bool = True
    diagonal: bool = False

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        if self.diagonal:
            return PairDistances.exactly(diagonal_gaussian_table(clouds, pairs, self.unbiased))
        return PairDistances.exactly(gaussian_table(clouds, pairs, self.unbiased, progress))

    def recipe(self, device: torch.device) -> str | None:
        """Return the cache key, with the device; None for diagonal covariances: no cache."""
        return None if self.diagonal else f"gaussian unbiased={self.unbiased} on {device.type}"

    @property
    def single_samples_are_points(self) -> bool:
        """Whether covariances divide by n - 1."""
        return self.unbiased


@dataclass(frozen=True)
class Exact(LabelMetric):
    """The squared 2-Wasserstein distance of the points themselves, min_P <||x_k - y_l||^2, P>."""

    name = "exact"

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        return exact_distances(clouds, pairs, progress=progress)

    def in_parts(self, clouds: Sequence[ClassCloud], pairs: Tensor) -> Measured:
        """Yield distances as they are computed; classes need no preparation."""
        return exact_parts(clouds, pairs)

    def recipe(self, device: torch.device) -> str:
        """Return the cache key; distances are always computed on the CPU."""
        return "exact"


@dataclass(frozen=True)
class Sinkhorn(LabelMetric):
    """Debiased entropic distance, OT_epsilon(i, j) - OT_epsilon(i, i) / 2 - OT_epsilon(j, j) / 2.

    Args:
        epsilon: entropic regularisation, in units of ||.||^2. None: the `epsilon` of the comparison
            if one is given, else 0.01 of the mean squared distance between all rows compared.
        tolerance: L1 marginal error at which solves stop.

    Raises:
        InputError: an argument is not positive and finite.
    """

    name = "sinkhorn"

    epsilon: Positive | None = None
    tolerance: Positive = 1e-3

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        assert self.epsilon is not None
        return sinkhorn_distances(clouds, pairs, self.epsilon, self.tolerance, progress=progress)

    def recipe(self, device: torch.device) -> str:
        """Return the cache key, with the device, as devices round differently."""
        return f"sinkhorn epsilon={self.epsilon!r} tolerance={self.tolerance!r} on {device.type}"


@dataclass(frozen=True)
class Means(LabelMetric):
    """Squared distance of means ||m_i - m_j||^2, a lower bound of the 2-Wasserstein one."""

    name = "means"

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        return PairDistances.exactly(mean_table(clouds, pairs))


@dataclass(frozen=True)
class UpperBound(LabelMetric):
    """||m_i - m_j||^2 + tr S_i + tr S_j, the cost of the independent coupling; 0 if identical.

    Args:
        unbiased: covariances S divide by n - 1, else by n.

    Raises:
        InputError: `unbiased` is neither true nor false.
    """

    name = "upper_bound"

    unbiased: bool = True

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure pairs of classes; see `LabelMetric.measure`."""
        return PairDistances.exactly(upper_bound_table(clouds, pairs, self.unbiased))

    @property
    def single_samples_are_points(self) -> bool:
        """Whether covariances divide by n - 1."""
        return self.unbiased


@dataclass(frozen=True)
class NoLabels(LabelMetric):
    """No class distances: 0 between any two classes; datasets need no labels."""

    name = "none"
    fixed = True

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Return zeros for all pairs of classes."""
        return PairDistances.exactly(torch.zeros(len(pairs), device=clouds[0].points.device))


# The scale that `with_numbers` finds.
POOLED = "pooled"


@dataclass(frozen=True)
class Continuous(NoLabels):
    """||(t_i - s_j) / scale||^2 between the numbers of two rows, in place of class distances.

    Args:
        scale: the divisor of each column of numbers. `pooled`: its standard deviation over all
            datasets that are compared. None keeps the units. Or one number per column; a single
            column may have it without a tuple.

    Raises:
        InputError: `scale` is none of these.
    """

    name = "continuous"

    scale: str | float | tuple[float, ...] | None = POOLED

    def __post_init__(self) -> None:
        super().__post_init__()
        scale = self.scale
        if scale is None or scale == POOLED:
            return
        # Arrays and tensors.
        given = scale.tolist() if hasattr(scale, "tolist") else scale
        each = given if isinstance(given, list | tuple) else [given]
        if each and all(map(_is_positive, each)):
            object.__setattr__(self, "scale", tuple(map(float, each)))
            return
        raise InputError(
            f"labels.scale must be {POOLED}, null, or a positive number for each column of "
            f"numbers, got {shown(scale)}"
        )


def _is_positive(number: Any) -> bool:
    """Return whether an object is a positive number within the range of float64."""
    real = isinstance(number, numbers.Real) and not isinstance(number, bool)
    return real and 0 < number <= sys.float_info.max


@dataclass(frozen=True)
class Given(LabelMetric):
    """The class distances of a table, independent of the points.

    Args:
        table: `ClassDistances` of the two datasets, or the path of their npz file; required.

    Raises:
        InputError: `table` is missing, or neither a table nor a path.
    """

    name = "given"
    fixed = True

    table: ClassDistances | str | Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table is None:
            raise InputError(
                "labels=given needs a table: labels.path=W.npz with arrays xx, xy and yy, or "
                "otdd.labels.Given(table) in Python"
            )

    def read(self) -> ClassDistances:
        """Return the table, read from its file if it is a path.

        Raises:
            InputError: as `ClassDistances.load`.
        """
        if isinstance(self.table, ClassDistances):
            return self.table
        assert self.table is not None
        return ClassDistances.load(self.table)

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Raise an `InputError`: a table measures no points."""
        raise measures_nothing()


def measures_nothing() -> InputError:
    """Return the error for measuring with `labels=given`."""
    return InputError(
        "labels=given is the table of two datasets and measures nothing; choose a method, or "
        "pass a table of class_distances([...]) on as class_distances="
    )


# The digits to which a probe is rounded, as processes of a study may sum with different numbers of
# threads.
PROBE = ".6g"


@dataclass(frozen=True)
class PairFunction(LabelMetric):
    """The value of a function of the points of two classes, called once for each pair of classes.

    Classes of equal content are at distance 0. Nothing is cached: a function's computation cannot
    be identified by content.

    Args:
        function: called as function(x, y) with copies of the points (n, d) and (m, d) of two
            classes, on their device; it returns a squared distance. It must be symmetric: the
            content of both classes decides which of them is x.
        called: its name in results; None takes the name of the function.
        probe: its value for one pair of classes, by which a resumed study checks that the function
            is the same.
    """

    function: Callable[[Tensor, Tensor], Any]
    called: str | None = None
    probe: float | None = None

    def __post_init__(self) -> None:
        named = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        module = getattr(self.function, "__module__", type(self.function).__module__)
        object.__setattr__(self, "name", self.called or f"function {module}.{named}")

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        self._check_weights(clouds)
        listed, values = pairs.tolist(), list[float]()
        for i, j in listed:
            values.append(self._between(clouds[i], clouds[j]))
            if progress is not None:
                progress(len(values), len(listed))
        found = torch.tensor(values, dtype=torch.float64, device=clouds[0].points.device)
        return PairDistances.exactly(found)

    def _between(self, one: ClassCloud, other: ClassCloud) -> float:
        """Call the function for two classes and check its value.

        Raises:
            UserCodeError: the function raised.
            InputError: it returned no squared distance.
        """
        classes = f"classes {one.name} and {other.name}"
        # The function gets copies, as it may write to them.
        points = (cloud.points.detach().clone() for cloud in (one, other))
        with user_code(f"labels={self.name}, called for {classes},"):
            value = self.function(*points)
        if isinstance(value, Tensor):
            value = value.detach()
        single = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
        number = value.item() if single else value
        what = f"what labels={self.name} returns for {classes}"
        if isinstance(number, bool) or not isinstance(number, numbers.Real | Decimal):
            raise InputError(
                f"{what} must be one number, the squared distance of both, got {shown(value)}; "
                "return a float"
            )
        number = float(number)
        if not math.isfinite(number):
            raise InputError(
                f"{what} must be finite, got {shown(number)}; return a number, or leave one of "
                "both out with classes=[...] or min_class_size"
            )
        if number < 0:
            raise InputError(
                f"{what} must not be negative, got {shown(number)}; return a squared distance, "
                "max(value, 0.0) where it is below 0 by rounding alone"
            )
        return number

    def to_dict(self) -> dict[str, Any]:
        return {"probe": self.probe}

    def probed(self, clouds: Sequence[ClassCloud]) -> PairFunction:
        """Return the metric with its value for the first and the last class as its probe.

        Raises:
            InputError: as `measure`.
        """
        self._check_weights(clouds)
        return replace(self, probe=float(format(self._between(clouds[0], clouds[-1]), PROBE)))

    def _check_weights(self, clouds: Sequence[ClassCloud]) -> None:
        for cloud in clouds:
            if cloud.weights is not None and cloud.several:
                raise InputError(
                    f"labels={self.name} is called with points alone, and rows with several labels "
                    f"count as a part of each, as of class {cloud.name}; take a metric of "
                    "otdd.labels, such as otdd.labels.Gaussian(), which counts parts"
                )
            if cloud.weights is not None:
                raise InputError(
                    f"labels={self.name} is called with points alone, and those of class "
                    f"{cloud.name} have different weights; leave the weights out, or take a metric "
                    "of otdd.labels, such as otdd.labels.Gaussian(), which counts them"
                )


# The types that `labels=` accepts.
Labels = str | LabelMetric | Callable[[Tensor, Tensor], Any]

_OWN = (Gaussian, Sinkhorn, Exact, Means, UpperBound, NoLabels, Continuous, Tree, Given)


def _accepted(kind: Any, name: str) -> str | None:
    """Return what another package's method must be; None if it is acceptable."""
    if not isinstance(kind, type):
        called = callable(kind) and not isinstance(kind, LabelMetric)
        return None if called else "a type of LabelMetric, or a function f(x, y)"
    if not issubclass(kind, LabelMetric):
        return "a type of LabelMetric, or a function f(x, y)"
    own = getattr(kind, "name", None)
    return None if own == name else f"a type whose name is {name!r}, got {own!r}"


# Other packages add subclasses of LabelMetric, and functions for `PairFunction`.
METRICS: Registry[Callable[..., Any]] = Registry(
    "labels", "labels.method", {kind.name: kind for kind in _OWN}, _accepted
)


def fields_of(name: str) -> tuple[str, ...]:
    """Return the parameter names of a metric; a function has none."""
    kind = METRICS.named(name)
    return tuple(field.name for field in fields(kind)) if isinstance(kind, type) else ()


def metric_named(name: str, parameters: Mapping[str, Any]) -> LabelMetric:
    """Return the metric of a name, with those of the parameters that it has.

    Raises:
        InputError: no such name, or a parameter is missing or not valid.
    """
    kind = METRICS.named(name)
    if not isinstance(kind, type):
        return PairFunction(kind, name)
    with blamed_on(kind, f"labels={name} of package {METRICS.package(name)}"):
        metric: LabelMetric = kind(
            **{key: parameters[key] for key in fields_of(name) if key in parameters}
        )
    return metric


def metric_of(labels: Labels) -> LabelMetric:
    """Return the metric that `labels=` stands for; a name takes its default parameters.

    Raises:
        InputError: no such name, or the metric has a required parameter.
    """
    if isinstance(labels, LabelMetric):
        return labels
    return metric_named(labels, {}) if isinstance(labels, str) else PairFunction(labels)


def with_numbers(
    metric: LabelMetric,
    datasets: Sequence[LabeledSamples],
    statistics: Sequence[LabeledSamples] | None = None,
) -> tuple[LabelMetric, list[LabeledSamples]]:
    """Return metric and datasets, for `continuous` with their scale and with numbers.

    Args:
        metric: any metric; with others than `continuous` all is returned as it is.
        datasets: those that are compared. Classes whose names are numbers stand for these.
        statistics: datasets whose scale is taken instead, of which `datasets` are parts.

    Raises:
        InputError: a dataset has no numbers, they have different columns, a column is constant, or
            a scale is not one positive number a column.
    """
    if not isinstance(metric, Continuous):
        return metric, list(datasets)
    found = [numbered(samples) for samples in datasets]
    wide = {targets_of(samples).shape[1] for samples in found}
    if len(wide) > 1:
        raise InputError(
            f"targets of the datasets have {' and '.join(map(str, sorted(wide)))} columns, and are "
            "compared column by column; give the same to all"
        )
    (count,) = wide
    scale = (1.0,) * count if metric.scale is None else metric.scale
    if isinstance(scale, str):
        scale = _pooled(found if statistics is None else [*map(numbered, statistics)])
    assert isinstance(scale, tuple)
    if len(scale) != count:
        raise InputError(f"labels.scale has {len(scale)} numbers for {count} columns of targets")
    return Continuous(scale), found


def scale_of(metric: LabelMetric | None) -> tuple[float, ...] | None:
    """Return the scale (q,) of numbers that `with_numbers` has put into a metric; else None."""
    if not isinstance(metric, Continuous):
        return None
    assert isinstance(metric.scale, tuple)
    return metric.scale


def refuse_table(metric: LabelMetric, class_distances: object) -> None:
    """Raise an `InputError` if a table of class distances is given beside numbers."""
    if class_distances is not None and isinstance(metric, Continuous):
        raise InputError(
            "labels=continuous compares numbers and takes no class_distances=; leave one out"
        )


def targets_of(samples: LabeledSamples) -> Tensor:
    """Return the targets (n, q) of samples that have some."""
    assert samples.targets is not None
    return samples.targets


def numbered(samples: LabeledSamples) -> LabeledSamples:
    """Return samples with targets and without classes."""
    if samples.targets is not None:
        return replace(samples, labels=None)
    said = "no labels" if samples.labels is None else "several labels a row"
    if samples.labels is not None and samples.label_sets is None:
        said = f"classes that are none, such as {display(repr(samples.class_names[-1]))}"
        with placed(samples.name):
            values = named_numbers(samples.class_names)
        if values is not None:
            targets = torch.from_numpy(values).to(samples.labels.device)[samples.labels]
            return replace(samples, labels=None, targets=targets)
    raise InputError(
        f"labels=continuous compares numbers, and {samples.name} has {said}; give one number or "
        "more for each row, as labels or as targets="
    )


def _pooled(datasets: Sequence[LabeledSamples]) -> tuple[float, ...]:
    """Return the standard deviation of each column over the pooled rows of all datasets.

    A dataset weighs as much as it has rows; within it, rows weigh by their masses.
    """
    masses = torch.cat([samples.masses.cpu() * len(samples) for samples in datasets])
    masses = masses / masses.sum()
    rows = torch.cat([targets_of(samples).cpu() for samples in datasets])
    # Squares of very large numbers would overflow, and those of very small ones underflow.
    largest = rows.abs().amax(0)
    rows = rows / torch.where(largest > 0, largest, 1.0)
    # Relative to one of them: a constant column has the deviation 0 however sums are rounded.
    rows = rows - rows[0]
    found = (masses @ (rows - masses @ rows).square()).sqrt() * largest
    for place, value in enumerate(found.tolist()):
        if not value > 0:
            raise InputError(
                f"column {place} of the targets is constant, so that it has no scale; leave it "
                "out, or set labels.scale=null, which keeps units"
            )
    return tuple(found.tolist())
