"""The methods that measure class distances, by their names in the registry `METRICS`.

`builtin` holds the methods of this package, `given` tables and functions of the user's, `base` the
class `LabelMetric` that all of them extend. `metric_of` turns the `labels=` argument of the public
functions into a metric, `metric_named` the `labels` group of a configuration. `labels.many`,
`labels.measuring`, `labels.by_ranks`, `contributions` and `study.setup` import it; `otdd`,
`pairwise`, `flows.run`, `commands.settings` and others do through `otdd_flash.labels`.

The names are keys of configurations and results, so they must stay; other packages add to them by
entry points (`plugins`).
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.metrics.builtin import Exact, Gaussian, Means, NoLabels, Sinkhorn, UpperBound
from otdd_flash.labels.metrics.given import Given, PairFunction
from otdd_flash.plugins import Registry, blamed_on

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
    "fields_of",
    "metric_named",
    "metric_of",
]

# What `labels=` accepts.
Labels = str | LabelMetric | Callable[[Tensor, Tensor], Any]

_OWN = (Gaussian, Sinkhorn, Exact, Means, UpperBound, NoLabels, Given)


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
