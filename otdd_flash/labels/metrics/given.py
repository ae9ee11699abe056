"""Class distances that the user gives: a table (`labels=given`) or a function of two classes.

`Given` wraps a `ClassDistances` or the path of one; `labels.many` reads it and never measures with
it. `PairFunction` calls a function of the points of two classes; `labels.metrics` makes it of a
function given as `labels=`, and `study.study` checks by `probe` that a resumed run has the same
function. Distances of functions are not cached, because what a function computes cannot be
identified.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otdd_flash.checks import shown
from otdd_flash.errors import InputError
from otdd_flash.importing import user_code
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.pairs import PairDistances, Progress
from otdd_flash.labels.table import ClassDistances


@dataclass(frozen=True)
class Given(LabelMetric):
    """The class distances of a table, independent of the points.

    Args:
        table: `ClassDistances` of the two datasets, or the path of their npz file; required.

    Raises:
        InputError: it is missing, or neither a table nor a path.
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


# Digits of a probe: processes of a study may sum with different numbers of threads.
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
        called: its name in results; None takes the function's own.
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
        # Copies, as the function may write to them.
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
            if cloud.weights is not None:
                raise InputError(
                    f"labels={self.name} is called with points alone, and those of class "
                    f"{cloud.name} have different weights; leave the weights out, or take a metric "
                    "of otdd.labels, such as otdd.labels.Gaussian(), which counts them"
                )
