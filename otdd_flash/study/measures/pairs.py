"""Measures that are a function of two datasets: what another package has to write is that function.

Every pair of tasks is a unit of work of its own, kept under the measure's name and the version of
the package that it comes from.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from otdd_flash.checks import number
from otdd_flash.plugins import blamed_on, parts
from otdd_flash.samples import LabeledSamples
from otdd_flash.study.measures.base import Measure, Pair, Reading
from otdd_flash.study.setup import Setup
from otdd_flash.study.units.unit import Bench, Content, Unit

finite = number("be finite", math.isfinite)


class PairMeasure(Measure):
    """A measure that is a function of the training rows of a source and a target.

    Attributes:
        symmetric: whether it is the same in both directions, and measured in one.
    """

    symmetric: ClassVar[bool] = False

    @abstractmethod
    def value(self, source: LabeledSamples, target: LabeledSamples) -> float:
        """Return the measure of a source for a target, finite; samples are on the CPU."""

    def units(self, setup: Setup) -> list[Unit]:
        """List one unit for every pair; see `Measure.units`."""
        return [PairValue(setup, self, *pair) for pair in self._pairs(setup)]

    def read(self, setup: Setup, bench: Bench) -> Iterator[tuple[Pair, Reading]]:
        """Yield the readings of pairs that are done; see `Measure.read`."""
        for i, j in self._pairs(setup):
            found = bench.known(PairValue(setup, self, i, j))
            if found is not None:
                yield (i, j), Reading(**found.facts)
                if self.symmetric:
                    yield (j, i), Reading(**found.facts)

    def _pairs(self, setup: Setup) -> Iterator[Pair]:
        return setup.pairs() if self.symmetric else setup.ordered_pairs()


class PairValue(Unit):
    """The value of a measure for one source and one target."""

    kind = "pair"

    def __init__(self, setup: Setup, measure: PairMeasure, i: int, j: int) -> None:
        self.setup, self.measure, self.i, self.j = setup, measure, i, j

    @property
    def key(self) -> Mapping[str, Any]:
        return {
            "measure": self.measure.name,
            "packages": [one.package for one in parts("measures").get(self.measure.name, ())],
            "fingerprints": [self.setup.fingerprints[k] for k in (self.i, self.j)],
            **self.setup.settings.machine,
        }

    @property
    def title(self) -> str:
        names = self.setup.names
        return f"{self.measure.name} of {names[self.i]} for {names[self.j]}"

    def compute(self, bench: Bench) -> Content:
        source, target = (self.setup.tasks[k].train for k in (self.i, self.j))
        with blamed_on(self.measure, self.title):
            value = self.measure.value(source, target)
        return Content({"value": finite(self.title, value)})
