"""Ways of measuring distances between classes: one file each, by their names in `METRICS`."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from otdd_flash.errors import choose
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.metrics.exact import Exact
from otdd_flash.labels.metrics.function import PairFunction
from otdd_flash.labels.metrics.gaussian import Gaussian
from otdd_flash.labels.metrics.given import Given
from otdd_flash.labels.metrics.means import Means
from otdd_flash.labels.metrics.none import NoLabels
from otdd_flash.labels.metrics.sinkhorn import Sinkhorn
from otdd_flash.labels.metrics.upper_bound import UpperBound

__all__ = [
    "METRICS",
    "Exact",
    "Gaussian",
    "Given",
    "LabelMetric",
    "Labels",
    "Means",
    "NoLabels",
    "PairFunction",
    "Sinkhorn",
    "UpperBound",
    "metric_named",
    "metric_of",
]

# What `labels=` takes.
Labels = str | LabelMetric | Callable[[Tensor, Tensor], Any]

METRICS: dict[str, type[LabelMetric]] = {
    kind.name: kind for kind in (Gaussian, Sinkhorn, Exact, Means, UpperBound, NoLabels, Given)
}


def metric_named(name: str, parameters: Mapping[str, Any]) -> LabelMetric:
    """The metric of a name, with those of the parameters that it has.

    Raises:
        InputError: no such name, a parameter is not what it must be, or one is missing.
    """
    kind = METRICS[choose("labels.method", name, tuple(METRICS))]
    own = (field.name for field in fields(kind))
    return kind(**{key: parameters[key] for key in own if key in parameters})


def metric_of(labels: Labels) -> LabelMetric:
    """What `labels=` says: a metric, a function, or a name, whose parameters are the defaults.

    Raises:
        InputError: no such name, or a metric that has to be told something.
    """
    if isinstance(labels, LabelMetric):
        return labels
    return metric_named(labels, {}) if isinstance(labels, str) else PairFunction(labels)
