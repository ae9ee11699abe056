"""The base of all measures of a study, and their readings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from otdd_flash.study.setup import Setup
from otdd_flash.study.units.unit import Bench, Unit

Pair = tuple[int, int]


@dataclass(frozen=True)
class Reading:
    """The reading of a measure for one ordered pair of tasks.

    Attributes:
        value: the measure.
        lower: the lower solver bound, or lower end of the interval over draws; None without.
        upper: the upper bound or end.
        sample_lower: lower end of the sampling interval; None where none was asked for.
        sample_upper: its upper end.
        deviation: over seeds, of what is measured seed by seed.
        root: the square root of the value where that is a distance as well.
        root_lower: that of `lower`.
        root_upper: that of `upper`.
        floor_source: the distance of two halves of the source, where asked for.
        floor_target: that of two halves of the target.
        converged: whether the solves behind it reached their tolerance.
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


class NetworkView(NamedTuple):
    """The features and outputs of a trained source on the target's training rows, on the CPU.

    Attributes:
        features: (n, d) what the network's last layer sees.
        outputs: (n, Z) logits of the source's classes.
        labels: (n,) the target's class indices.
    """

    features: Tensor
    outputs: Tensor
    labels: Tensor

    def take(self, rows: Tensor) -> NetworkView:
        return NetworkView(*(part[rows] for part in self))


class Measure(ABC):
    """A measure that predicts, before any transfer, how much a source will help a target.

    Attributes:
        name: as `measures=NAME` and in tables.
        title: as on the page.
        nearer: the sign of a change for the better: -1 of a distance, 1 of a score. Statistics
            are of `nearer` times the value.
        unit: what rounding is relative to where all values are small: 1 of a score or entropy.
        proven: whether `lower` and `upper` of a reading are solver bounds; else they are of draws.
        needs_transfer: whether it looks at trained sources.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    nearer: ClassVar[int]
    unit: ClassVar[float] = 0.0
    proven: ClassVar[bool] = False
    needs_transfer: ClassVar[bool] = False

    @abstractmethod
    def units(self, setup: Setup) -> list[Unit]:
        """List the work behind all pairs; units that these need come by themselves."""

    @abstractmethod
    def read(self, setup: Setup, bench: Bench) -> Iterator[tuple[Pair, Reading]]:
        """Yield readings of the ordered pairs whose units are done."""
