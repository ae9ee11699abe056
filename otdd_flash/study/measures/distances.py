"""Measures of a study that compare datasets without networks: otdd, sliced, frechet and otce.

`otdd` is the dataset distance S_epsilon with its solver bounds, equal to that of
`pairwise_distances`. `sliced` is the sliced dataset distance over draws that all tasks share.
`frechet` is the squared Bures-Wasserstein distance between whole datasets, without labels. `otce`
is the conditional entropy of the target's classes under the plan. `study.measures` registers them.
The units of `otdd` are those of `study.transport`; the other measures add their own. Stored units
are used as long as their keys are equal, so a change that gives other numbers must change the key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.gaussian import gaussian_distances
from otdd_flash.samples import LabeledSamples, same_content
from otdd_flash.sampling.comparison import Comparison, subsample
from otdd_flash.sampling.subsampling import (
    LEVEL,
    MOST_EXCESS,
    deviation_interval,
    sampling_rate,
    subsample_sizes,
)
from otdd_flash.sliced.distances import chunk_distances, chunks_of, draw_chunk, draws_in, prepare
from otdd_flash.sliced.result import SlicedResult, rows_excess
from otdd_flash.study.measures.base import Measure, Pair, Reading
from otdd_flash.study.setup import Setup
from otdd_flash.study.transport import (
    PairFloor,
    PairInterval,
    PairSampling,
    Term,
    distance_of,
    distance_units,
)
from otdd_flash.study.units import Bench, Content, Unit


class Otdd(Measure):
    """The Optimal Transport Dataset Distance; it is the same in both directions."""

    name = "otdd"
    title = "OTDD"
    nearer = -1
    proven = True

    def units(self, setup: Setup) -> list[Unit]:
        units: list[Unit] = []
        for i, j in setup.pairs():
            units += [*distance_units(setup, i, j), *_sampling(setup, i, j).values()]
        return units

    def read(self, setup: Setup, bench: Bench) -> Iterator[tuple[Pair, Reading]]:
        for i, j in setup.pairs():
            if any(bench.known(unit) is None for unit in distance_units(setup, i, j)):
                continue
            found = distance_of(setup, bench, i, j)
            more: dict[str, Any] = {}
            floors: dict[str, float] = {}
            for name, unit in _sampling(setup, i, j).items():
                content = bench.known(unit)
                if content is None:
                    continue
                if name == "floor":
                    floors = dict(content.facts)
                else:
                    more |= {f"sample_{end}": value for end, value in content.facts.items()}
            for pair, sides in (((i, j), ("source", "target")), ((j, i), ("target", "source"))):
                ends = {f"floor_{key}": floors.get(side) for key, side in _named(sides)}
                yield (
                    pair,
                    Reading(
                        found.value,
                        found.lower,
                        found.upper,
                        converged=found.converged,
                        **more,
                        **ends,
                    ),
                )


def _sampling(setup: Setup, i: int, j: int) -> dict[str, Unit]:
    """Return the units of the sampling error that the settings ask for, by name."""
    units: dict[str, Unit] = {}
    if setup.settings.subsample is not None:
        units["interval"] = PairInterval(setup, i, j)
    if setup.settings.noise_floor:
        units["floor"] = PairFloor(setup, i, j)
    return units


def _named(sides: tuple[str, str]) -> list[tuple[str, str]]:
    return list(zip(("source", "target"), sides, strict=True))


class Sliced(Measure):
    """The mean of W_2^2 over draws, with its 95% interval; it is the same in both directions."""

    name = "sliced"
    title = "s-OTDD"
    nearer = -1

    def units(self, setup: Setup) -> list[Unit]:
        chunks = chunks_of(setup.settings.projections)
        return [DrawChunk(setup, chunk) for chunk in chunks]

    def read(self, setup: Setup, bench: Bench) -> Iterator[tuple[Pair, Reading]]:
        """Yield the readings of all pairs once all draws are done, and none before."""
        found = [bench.known(unit) for unit in self.units(setup)]
        parts = [content.tensors["squared"] for content in found if content is not None]
        if len(parts) < len(found):
            return
        settings = setup.settings
        result = SlicedResult.of_draws(torch.cat(parts, 1), setup.names, settings.seed)
        for i, j in setup.ordered_pairs():
            lower, upper = (_or_none(float(end[i, j])) for end in (result.lower, result.upper))
            yield (
                (i, j),
                Reading(
                    float(result.values[i, j]),
                    lower,
                    upper,
                    root=math.sqrt(float(result.values[i, j])),
                    root_lower=None if lower is None else math.sqrt(max(lower, 0.0)),
                    root_upper=None if upper is None else math.sqrt(upper),
                ),
            )


class DrawChunk(Unit):
    """W_2^2 of all pairs of tasks along some of the draws."""

    kind = "draws"

    def __init__(self, setup: Setup, chunk: int) -> None:
        self.setup, self.chunk = setup, chunk

    @property
    def key(self) -> Mapping[str, Any]:
        settings = self.setup.settings
        return {
            "fingerprints": self.setup.fingerprints,
            "chunk": self.chunk,
            "draws": draws_in(self.chunk, settings.projections),
            "seed": settings.seed,
            "device": settings.compute.device,
            "threads": settings.threads,
            "versions": settings.machine["versions"],
        }

    @property
    def title(self) -> str:
        return f"chunk {self.chunk} of the draws"

    def compute(self, bench: Bench) -> Content:
        datasets = bench.cached(
            "sliced",
            lambda: prepare(
                [task.train for task in self.setup.tasks], self.setup.settings.compute.device
            ),
        )
        settings, dim = self.setup.settings, self.setup.tasks[0].train.dim
        draws = draw_chunk(self.chunk, settings.projections, dim, settings.seed)
        return Content(tensors={"squared": chunk_distances(datasets, draws)})


def _or_none(end: float) -> float | None:
    return None if math.isnan(end) else end


def frechet_distance(source: LabeledSamples, target: LabeledSamples) -> float:
    """Return the squared Bures-Wasserstein distance of two datasets; 0 if they are equal.

        |m_x - m_y|^2 + tr S_x + tr S_y - 2 tr (S_x^1/2 S_y S_x^1/2)^1/2

    with means m and unbiased covariances S, in units of ||.||^2; labels are ignored.
    """
    if same_content(source, target):
        return 0.0
    clouds = [_whole(source), _whole(target)]
    return float(gaussian_distances(clouds, torch.tensor([[0, 1]])).values)


def _whole(samples: LabeledSamples) -> ClassCloud:
    """Return all rows of positive weight as one class."""
    if samples.weights is None:
        return ClassCloud(samples.name, samples.features, None)
    kept = samples.weights > 0
    weights = samples.weights[kept]
    return ClassCloud(samples.name, samples.features[kept], weights / weights.sum())


class Frechet(Measure):
    """The distance between the Gaussians of two datasets; it is the same in both directions."""

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
    """The Fréchet distance of two tasks, and its sampling interval."""

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


def conditional_entropy(coupling: Tensor) -> float:
    """Return H(target class | source class) in nats, for masses (V_x, V_y) that sum to 1.

    It is the transferability term of Tan et al. 2021, OTCE: a transferability metric for
    cross-domain cross-task representations, with the sign of a distance.
    """
    joint = coupling.double()
    given = joint / joint.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return float(-torch.xlogy(joint, given).sum())


class Otce(Measure):
    """The conditional entropy of the target's classes under the plan, which has a direction."""

    name = "otce"
    title = "OTCE entropy"
    nearer = -1
    unit = 1.0

    def units(self, setup: Setup) -> list[Unit]:
        terms: list[Unit] = [Term(setup, i, j) for i, j in setup.pairs()]
        if setup.settings.subsample is not None:
            terms += [CouplingSampling(setup, i, j) for i, j in setup.pairs()]
        return terms

    def read(self, setup: Setup, bench: Bench) -> Iterator[tuple[Pair, Reading]]:
        for i, j in setup.pairs():
            term = bench.known(Term(setup, i, j))
            if term is None:
                continue
            sampled = None
            if setup.settings.subsample is not None:
                sampled = bench.known(CouplingSampling(setup, i, j))
            coupling, converged = term.tensors["coupling"], bool(term.facts["converged"])
            for pair, masses, side in (((i, j), coupling, "to"), ((j, i), coupling.T, "from")):
                ends = {} if sampled is None else sampled.facts[side]
                yield pair, Reading(conditional_entropy(masses), converged=converged, **ends)


class CouplingSampling(PairSampling):
    """Sampling intervals of the conditional entropies of two tasks, in both directions."""

    kind = "sampling of the coupling"

    def compute(self, bench: Bench) -> Content:
        settings, whole = self.setup.settings, bench.found(Term(self.setup, self.i, self.j))
        assert settings.subsample is not None
        arguments = self._arguments(bench)
        generator = np.random.default_rng(arguments.pop("seed"))
        source, target = (self.setup.tasks[k].train for k in (self.i, self.j))
        comparison = Comparison(source, target, arguments)
        sides = comparison.source, comparison.target
        sizes = subsample_sizes(*sides, settings.subsample_size)
        values = []
        for _ in range(settings.subsample):
            one, other = (
                subsample(side, size, generator) for side, size in zip(sides, sizes, strict=True)
            )
            coupling = comparison.distance(one, other).class_coupling()
            values.append([conditional_entropy(masses) for masses in (coupling, coupling.T)])
        rate = sampling_rate(sum(sizes) / sum(map(len, sides)))
        facts = {}
        for place, (side, masses) in enumerate(
            (("to", whole.tensors["coupling"]), ("from", whole.tensors["coupling"].T))
        ):
            drawn = np.array(values)[:, place]
            lower, upper = deviation_interval(conditional_entropy(masses), drawn, rate)
            facts[side] = {"sample_lower": float(lower), "sample_upper": float(upper)}
        return Content(facts)
