"""`frechet`: the squared Bures-Wasserstein distance of two whole clouds, whatever their labels.

    |m_x - m_y|^2 + tr S_x + tr S_y - 2 tr (S_x^1/2 S_y S_x^1/2)^1/2

with means m and unbiased covariances S, in units of ||.||^2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.gaussian import gaussian_distances
from otdd_flash.samples import LabeledSamples, same_content
from otdd_flash.sampling.draws import subsample
from otdd_flash.sampling.subsampling import (
    LEVEL,
    MOST_EXCESS,
    deviation_interval,
    sampling_rate,
    subsample_sizes,
)
from otdd_flash.sliced.tails import rows_excess
from otdd_flash.study.measures.base import Measure, Pair, Reading
from otdd_flash.study.setup import Setup
from otdd_flash.study.units.unit import Bench, Content, Unit


def frechet_distance(source: LabeledSamples, target: LabeledSamples) -> float:
    """The squared distance of the Gaussians of two datasets; 0 between equal ones."""
    if same_content(source, target):
        return 0.0
    clouds = [_whole(source), _whole(target)]
    return float(gaussian_distances(clouds, torch.tensor([[0, 1]])).values)


def _whole(samples: LabeledSamples) -> ClassCloud:
    """All rows of positive weight as one class."""
    if samples.weights is None:
        return ClassCloud(samples.name, samples.features, None)
    kept = samples.weights > 0
    weights = samples.weights[kept]
    return ClassCloud(samples.name, samples.features[kept], weights / weights.sum())


class Frechet(Measure):
    """The distance of the Gaussians of both clouds; the same in both directions."""

    name = "frechet"
    title = "Fréchet distance"
    nearer = -1

    def units(self, setup: Setup) -> list[Unit]:
        return [WholeClouds(setup, i, j) for i, j in setup.pairs()]

    def read(self, setup: Setup, bench: Bench) -> Iterator[tuple[Pair, Reading]]:
        for i, j in setup.pairs():
            found = bench.known(WholeClouds(setup, i, j))
            if found is not None:
                yield (i, j), Reading(**found.facts)
                yield (j, i), Reading(**found.facts)


class WholeClouds(Unit):
    """The distance of two tasks, and its sampling interval."""

    kind = "frechet"

    def __init__(self, setup: Setup, i: int, j: int) -> None:
        self.setup, self.i, self.j = setup, i, j

    @property
    def key(self) -> Mapping[str, Any]:
        settings = self.setup.settings
        fingerprints = [self.setup.fingerprints[k] for k in (self.i, self.j)]
        return {"fingerprints": fingerprints, **settings.sampling, **settings.machine}

    @property
    def title(self) -> str:
        names = self.setup.names
        return f"the Fréchet distance of {names[self.i]} and {names[self.j]}"

    def compute(self, bench: Bench) -> Content:
        source, target = (self.setup.tasks[k].train for k in (self.i, self.j))
        value = frechet_distance(source, target)
        return Content({"value": value, **self._interval(source, target, value)})

    def _interval(
        self, source: LabeledSamples, target: LabeledSamples, value: float
    ) -> dict[str, float]:
        settings = self.setup.settings
        if settings.subsample is None:
            return {}
        sizes = subsample_sizes(source, target, settings.subsample_size)
        generator = np.random.default_rng(settings.seed)
        values = [
            frechet_distance(
                subsample(source, sizes[0], generator), subsample(target, sizes[1], generator)
            )
            for _ in range(settings.subsample)
        ]
        rate = sampling_rate(sum(sizes) / (len(source) + len(target)))
        excess = min(rows_excess(source, target), MOST_EXCESS)
        lower, upper = deviation_interval(value, values, rate, LEVEL, excess)
        return {"sample_lower": float(lower), "sample_upper": float(upper)}
