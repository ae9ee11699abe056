"""`sliced`: the sliced dataset distance over draws that all tasks share, and its square root."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from otdd_flash.sliced.distances import chunk_distances, prepare
from otdd_flash.sliced.draws import chunks_of, draw_chunk, draws_in
from otdd_flash.sliced.result import SlicedResult
from otdd_flash.study.measures.base import Measure, Pair, Reading
from otdd_flash.study.setup import Setup
from otdd_flash.study.units.unit import Bench, Content, Unit


class Sliced(Measure):
    """The mean of W_2^2 over draws, with its 95% interval; the same in both directions."""

    name = "sliced"
    title = "s-OTDD"
    nearer = -1

    def units(self, setup: Setup) -> list[Unit]:
        chunks = chunks_of(setup.settings.projections)
        return [DrawChunk(setup, chunk) for chunk in chunks]

    def read(self, setup: Setup, bench: Bench) -> Iterator[tuple[Pair, Reading]]:
        """Yield the readings of all pairs once all draws are there, none before."""
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
