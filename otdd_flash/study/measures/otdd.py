"""`otdd`: the dataset distance S_epsilon with its solver bounds, as `pairwise_distances` has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from otdd_flash.study.measures.base import Measure, Pair, Reading
from otdd_flash.study.setup import Setup
from otdd_flash.study.transport.sampling import PairFloor, PairInterval
from otdd_flash.study.transport.terms import distance_of, distance_units
from otdd_flash.study.units.unit import Bench, Unit


class Otdd(Measure):
    """The Optimal Transport Dataset Distance; the same in both directions."""

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
    """What of the sampling error was asked for."""
    units: dict[str, Unit] = {}
    if setup.settings.subsample is not None:
        units["interval"] = PairInterval(setup, i, j)
    if setup.settings.noise_floor:
        units["floor"] = PairFloor(setup, i, j)
    return units


def _named(sides: tuple[str, str]) -> list[tuple[str, str]]:
    return list(zip(("source", "target"), sides, strict=True))
