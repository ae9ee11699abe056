"""The measures of a study, by their names in the registry `MEASURES`.

A measure names the units it needs and reads its value for each ordered pair from them.
`study.study`, `study.result` and the modules of `report.study` look measures up here; other
packages add their own through the registry (`plugins`). Settings and result files hold the names of
measures, and so do the keys of units of scores and of other packages' measures, so they must stay.
"""

from collections.abc import Sequence
from typing import Any

from otdd_flash.errors import InputError
from otdd_flash.plugins import Registry, blamed_on
from otdd_flash.study.measures.base import Measure, PairMeasure, Reading
from otdd_flash.study.measures.distances import Frechet, Otce, Otdd, Sliced
from otdd_flash.study.measures.network import HScore, Knn, Leep, LogMe

__all__ = [
    "MEASURES",
    "Measure",
    "PairMeasure",
    "Reading",
    "measure_that_chooses",
    "measures_named",
]

_OWN = (Otdd, Sliced, Frechet, Otce, Knn, LogMe, HScore, Leep)


def _accepted(kind: Any, name: str) -> str | None:
    """Return what another package's measure must be, or None if it is accepted."""
    if not isinstance(kind, type) or not issubclass(kind, Measure):
        return "a type of Measure, such as one of PairMeasure"
    said = {key: getattr(kind, key, None) for key in ("name", "title", "nearer")}
    if said["name"] != name:
        return f"a type whose name is {name!r}, got {said['name']!r}"
    if not isinstance(said["title"], str) or said["nearer"] not in (-1, 1):
        return f"a type with a title, and with nearer -1 or 1, got {said}"
    return None


# Packages add types of Measure.
MEASURES: Registry[type[Measure]] = Registry(
    "measures", "measure", {kind.name: kind for kind in _OWN}, _accepted
)


def measures_named(names: Sequence[str], *, transfer: bool) -> tuple[Measure, ...]:
    """Return the measures of some names, each once.

    Raises:
        InputError: there is no name, an unknown name, or one that needs transfer without it.
    """
    if not names:
        raise InputError(f"measures must name at least one of: {', '.join(MEASURES)}")
    found = []
    for name in dict.fromkeys(names):
        kind = MEASURES.named(name)
        with blamed_on(kind, f"measure {name} of package {MEASURES.package(name)}"):
            found.append(kind())
    blind = [measure.name for measure in found if measure.needs_transfer and not transfer]
    if blind:
        raise InputError(f"{', '.join(blind)} need trained sources: drop them or set transfer")
    return tuple(found)


def measure_that_chooses(given: str | None, names: Sequence[str]) -> str:
    """Return the measure that a study chooses sources by: the given one, else otdd or the first.

    Raises:
        InputError: it is unknown, or not among the study's measures.
    """
    if given is None:
        return Otdd.name if Otdd.name in names else names[0]
    MEASURES.named(given)
    if given not in names:
        raise InputError(
            f"measure={given} (study.measure) is to choose sources, but measures are "
            f"{', '.join(names)}; add {given} to measures, or choose by one of these"
        )
    return given
