"""The base classes of the measures of a study, and their readings.

`Measure` is the base of all measures. Each pair of a `PairwiseMeasure` is one unit (`study.units`),
whose stored facts are fields of `Reading`. A `PairMeasure` is a function of two datasets: another
package writes a subclass with that function and the attributes of `Measure`. The key of its units
holds the measure's name, and the name and version of each package that gives a measure of that
name, so a new version of a package is computed again. `interval_ends` makes the ends of sampling
intervals from K subsamples.

`study.measures.distances` and `study.measures.network` derive from these classes and call
`interval_ends`; `study.result` and the modules of `report.study` read `Reading`, which
`study.measures` exports. Other packages derive from the classes too, so the names and arguments of
their methods must stay. Facts are stored under the names of the fields of `Reading`, so these names
must stay too, and a new field needs a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from otdd_flash.arguments import finite
from otdd_flash.plugins import blamed_on, parts
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling.subsampling import deviation_interval, sampling_rate
from otdd_flash.study.setup import Settings, Setup
from otdd_flash.study.units import Content, Store, Unit

Pair = tuple[int, int]


@dataclass(frozen=True)
class Reading:
    """The reading of a measure for one ordered pair of tasks.

    Attributes:
        value: the measure.
        lower: the lower solver bound, or the lower end of the interval over the measure's own
            draws, such as projections; None if there is none.
        upper: the upper bound or end.
        sample_lower: lower end of the sampling interval; None if none was asked for.
        sample_upper: its upper end.
        deviation: the standard deviation over seeds, for measures computed per seed.
        root: the square root of the value, for measures whose square root is a distance.
        root_lower: the square root of `lower`.
        root_upper: the square root of `upper`.
        floor_source: the distance of two halves of the source, if asked for.
        floor_target: that of two halves of the target.
        converged: whether the solves behind the value reached their tolerance.
    """

    value: float
    lower: float | None = None
    upper: float | None = None
    sample_lower: float | None = None
    sample_upper: float | None = None
    deviation: float | None = None
    root: float | None = None
    root_lower: float | None = None
    root_upper: float | None = None
    floor_source: float | None = None
    floor_target: float | None = None
    converged: bool = True


class Measure(ABC):
    """A measure that predicts, before any transfer, how much a source will help a target.

    Attributes:
        name: as `measures=NAME` and in tables.
        title: its name on the report's page.
        nearer: the sign of an improvement: -1 for a distance, 1 for a score. Statistics use
            `nearer` times the value.
        unit: the least size that rounding is relative to where values are compared for ties
            (`study.statistics.levelled`): 1 for a score or an entropy. It is no `Unit` of work.
        proven: whether `lower` and `upper` of a reading are solver bounds; otherwise they are an
            interval over draws.
        needs_transfer: whether it uses trained sources.
        one_class: whether it has a meaning for rows of one class alone, not of several labels or
            numbers.
        reads_plans: whether it is of a plan or its value, so that penalties of marginals have an
            effect.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    nearer: ClassVar[int]
    unit: ClassVar[float] = 0.0
    proven: ClassVar[bool] = False
    needs_transfer: ClassVar[bool] = False
    one_class: ClassVar[bool] = False
    reads_plans: ClassVar[bool] = False

    @abstractmethod
    def units(self, setup: Setup) -> list[Unit]:
        """Return the units of all pairs; `study.units.in_order` adds the units that they need."""

    @abstractmethod
    def read(self, setup: Setup, store: Store) -> Iterator[tuple[Pair, Reading]]:
        """Yield readings of the ordered pairs whose units are done."""


class PairwiseMeasure(Measure):
    """A measure whose readings of pairs are the facts of one unit each.

    Attributes:
        symmetric: whether it is the same in both directions, and so computed in one.
    """

    symmetric: ClassVar[bool] = False

    @abstractmethod
    def pair_unit(self, setup: Setup, i: int, j: int) -> Unit:
        """Return the unit of a source and a target."""

    def pair_title(self, setup: Setup, i: int, j: int) -> str:
        """Return the name of that unit in messages."""
        return f"{self.name} of {setup.names[i]} for {setup.names[j]}"

    def pairs(self, setup: Setup) -> Iterable[Pair]:
        """Return the pairs that have a unit: one of both directions if the measure is symmetric."""
        return setup.pairs() if self.symmetric else setup.ordered_pairs()

    def units(self, setup: Setup) -> list[Unit]:
        """Return one unit per pair; see `Measure.units`."""
        return [self.pair_unit(setup, *pair) for pair in self.pairs(setup)]

    def read(self, setup: Setup, store: Store) -> Iterator[tuple[Pair, Reading]]:
        """Yield the readings of pairs that are done; see `Measure.read`."""
        for i, j in self.pairs(setup):
            found = store.known(self.pair_unit(setup, i, j))
            if found is not None:
                yield (i, j), Reading(**found.facts)
                if self.symmetric:
                    yield (j, i), Reading(**found.facts)


class PairMeasure(PairwiseMeasure):
    """A measure that is a function of the training rows of a source and a target."""

    @abstractmethod
    def value(self, source: LabeledSamples, target: LabeledSamples) -> float:
        """Return the finite measure of a source for a target; samples are on the CPU."""

    def pair_unit(self, setup: Setup, i: int, j: int) -> Unit:
        """Return the unit that calls `value`."""
        title, sides = self.pair_title(setup, i, j), setup.sides(i, j)
        key = {
            "measure": self.name,
            "packages": [one.package for one in parts("measures").get(self.name, ())],
            "fingerprints": setup.fingerprints(i, j),
            # Compute options, threads and versions of software.
            **setup.settings.machine,
        }

        def compute(_: Store) -> Content:
            with blamed_on(self, title):
                value = self.value(*sides)
            return Content({"value": finite(title, value)})

        return Unit("pair", key, title, compute)


def interval_ends(
    settings: Settings,
    values: Sequence[float],
    draw: Callable[[np.random.Generator], Sequence[float]],
    fraction: float,
    excess: float = 0.0,
) -> list[dict[str, float]]:
    """Return the ends of the sampling intervals of some statistics, from K subsamples.

    Args:
        settings: K and the seed of the draws.
        values: the statistics of all rows.
        draw: function that returns the statistics of a subsample.
        fraction: the share of all rows that is drawn.
        excess: tail excess of the rows, as in `deviation_interval`.

    Returns:
        The fields `sample_lower` and `sample_upper` of `Reading` for each statistic.
    """
    assert settings.subsample is not None
    generator = np.random.default_rng(settings.seed)
    drawn = np.array([draw(generator) for _ in range(settings.subsample)])
    ends = []
    for place, value in enumerate(values):
        around = deviation_interval(value, drawn[:, place], sampling_rate(fraction), excess=excess)
        ends.append(dict(zip(("sample_lower", "sample_upper"), map(float, around), strict=True)))
    return ends
