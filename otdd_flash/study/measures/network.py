"""Scores of a trained source's features, or outputs, on the target's training rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from otdd_flash.sampling.draws import subsample_rows
from otdd_flash.sampling.subsampling import deviation_interval, sampling_rate, subsample_sizes
from otdd_flash.study.measures.base import Measure, NetworkView, Pair, Reading
from otdd_flash.study.setup import Setup
from otdd_flash.study.transfer.training import body_features
from otdd_flash.study.transfer.units import TrainedSource, target_rows, transfer_of
from otdd_flash.study.units.unit import Bench, Content, Unit


class NetworkMeasure(Measure):
    """A score of all repetitions of a source's network, each on its rows of the target."""

    nearer = 1
    unit = 1.0
    needs_transfer = True

    @abstractmethod
    def score(self, view: NetworkView) -> float:
        """The score of all rows of a view; the larger, the better."""

    def units(self, setup: Setup) -> list[Unit]:
        return [Score(setup, self, i, j) for i, j in setup.transferred()]

    def read(self, setup: Setup, bench: Bench) -> Iterator[tuple[Pair, Reading]]:
        for pair in setup.transferred():
            found = bench.known(Score(setup, self, *pair))
            if found is not None:
                yield pair, Reading(**found.facts)


class Score(Unit):
    """A score of one source and one target: its mean and deviation over repetitions."""

    kind = "score"
    one_thread = True

    def __init__(self, setup: Setup, measure: NetworkMeasure, i: int, j: int) -> None:
        self.setup, self.measure, self.i, self.j = setup, measure, i, j

    @property
    def key(self) -> Mapping[str, Any]:
        """Return what the score depends on but for the networks, which are among `needs`."""
        target = self.setup.tasks[self.j].train
        return {
            "measure": self.measure.name,
            "fingerprints": [target.fingerprint],
            "target_samples": transfer_of(self.setup).target_rows(target),
            **self.setup.settings.sampling,
        }

    @property
    def title(self) -> str:
        names = self.setup.names
        return f"{self.measure.name} of {names[self.i]} for {names[self.j]}"

    @property
    def needs(self) -> tuple[Unit, ...]:
        return tuple(self._sources())

    def compute(self, bench: Bench) -> Content:
        views, drawn = [], []
        for source in self._sources():
            rows = target_rows(self.setup, self.j, source.repetition)
            network = source.network(bench)
            features = body_features(network.body, rows.features.float())
            assert rows.labels is not None
            with torch.no_grad():
                views.append(NetworkView(features, network.head(features), rows.labels))
            drawn.append(rows)
        scores = np.array([self.measure.score(view) for view in views])
        deviation = float(scores.std(ddof=1)) if len(scores) > 1 else None
        facts: dict[str, Any] = {"value": float(scores.mean()), "deviation": deviation}
        count = self.setup.settings.subsample
        if count is not None:
            (size, _) = subsample_sizes(drawn[0], drawn[0], None)
            generator = np.random.default_rng(self.setup.settings.seed)
            values = [
                np.mean(
                    [
                        self.measure.score(view.take(subsample_rows(rows, size, generator)))
                        for view, rows in zip(views, drawn, strict=True)
                    ]
                )
                for _ in range(count)
            ]
            rate = sampling_rate(size / len(drawn[0]))
            ends = deviation_interval(facts["value"], np.array(values), rate)
            facts |= dict(zip(("sample_lower", "sample_upper"), map(float, ends), strict=True))
        return Content(facts)

    def _sources(self) -> list[TrainedSource]:
        repetitions = range(transfer_of(self.setup).seeds)
        return [TrainedSource(self.setup, self.i, repetition) for repetition in repetitions]
