"""Sampling of the transport distances of a study: intervals by subsamples, and noise floors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from otdd_flash.errors import DataNotice, NotConvergedWarning
from otdd_flash.labels import LabelMetric
from otdd_flash.sampling import noise_floor, subsample_interval
from otdd_flash.study.setup import Setup
from otdd_flash.study.transport.classes import epsilon_of
from otdd_flash.study.transport.terms import distance_of, distance_units
from otdd_flash.study.units.unit import Bench, Content, Unit


class PairSampling(Unit):
    """What sampling makes of the distance of two tasks, in the order of the study."""

    def __init__(self, setup: Setup, i: int, j: int) -> None:
        self.setup, self.i, self.j = setup, min(i, j), max(i, j)

    @property
    def key(self) -> Mapping[str, Any]:
        return self.setup.settings.sampling

    @property
    def title(self) -> str:
        names = self.setup.names
        return f"the {self.kind} of {names[self.i]} and {names[self.j]}"

    @property
    def needs(self) -> tuple[Unit, ...]:
        return distance_units(self.setup, self.i, self.j)

    def _arguments(self, bench: Bench) -> dict[str, Any]:
        """Return the arguments of `dataset_distance`."""
        settings = self.setup.settings
        metric: LabelMetric = settings.labels
        return {
            "seed": settings.seed,
            "epsilon": epsilon_of(self.setup, bench),
            "labels": metric,
            "solver": settings.solver,
            "compute": settings.compute,
            **asdict(settings.cost),
        }


class PairInterval(PairSampling):
    """The interval of a distance by subsamples."""

    kind = "subsample interval"

    def compute(self, bench: Bench) -> Content:
        settings = self.setup.settings
        assert settings.subsample is not None
        source, target = (self.setup.tasks[k].train for k in (self.i, self.j))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataNotice)
            warnings.simplefilter("ignore", NotConvergedWarning)
            found = subsample_interval(
                source,
                target,
                distance_of(self.setup, bench, self.i, self.j).value,
                count=settings.subsample,
                size=settings.subsample_size,
                **self._arguments(bench),
            )
        return Content({"lower": found.lower, "upper": found.upper})


class PairFloor(PairSampling):
    """Distances between two halves of each of two tasks."""

    kind = "noise floor"

    def compute(self, bench: Bench) -> Content:
        source, target = (self.setup.tasks[k].train for k in (self.i, self.j))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConvergedWarning)
            found = noise_floor(source, target, **self._arguments(bench))
        return Content({"source": found.source.value, "target": found.target.value})
