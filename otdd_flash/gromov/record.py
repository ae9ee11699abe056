"""The record of a Gromov-Wasserstein distance: what it reports besides value, bounds and plan.

`gromov.solve` builds the record. `DistanceResult` (`result`) holds, saves and loads it, and from
`matrix` and `coordinates` computes the plan of a loaded result; `pairwise` writes the `to_dict` of
every pair to its result.json. The keys of `to_dict` and the names of `tensors` must stay, because
saved results have them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

# Coordinates of both sides in the spans of their rows, see `energy.Cloud`.
Coordinates = tuple[Tensor | None, Tensor | None]

NUMBERS = ("energy", "class_cost", "class_lower", "independent")
# Names of the lower bounds of E.
BOUNDS = ("eccentricities", "spectra")


class Start(NamedTuple):
    """A start and where it led.

    Attributes:
        name: `axes`, `classes`, `independent` or `random k`.
        objective: F + epsilon KL reached.
        steps: linearisations.
        finished: whether it was followed to the end. Others ended where steps were short, as they
            were no longer among the best.
    """

    name: str
    objective: float
    steps: int
    finished: bool


@dataclass(frozen=True, eq=False)
class GromovRecord:
    """The parts of a Gromov-Wasserstein distance besides its value, bounds and plan.

    Attributes:
        energy: E of the plan found, with its sums corrected.
        energy_bounds: two lower bounds of E over all plans, of eccentricities and of spectra.
        class_cost: <W, P> of the plan found.
        class_lower: a lower bound of it over all plans.
        independent: F(a b^T), the unit of `epsilon_relative`.
        starts: where each start led; the plan found is that of the least objective.
        objectives: F + epsilon KL of every converged step from the best start.
        matrix: M float64 of the last linearised cost, (d_x, d_y), or of coordinates.
        coordinates: for each side with fewer rows than features the rows' coordinates (n, n) in
            their span; else None.
    """

    energy: float
    energy_bounds: tuple[float, float]
    class_cost: float
    class_lower: float
    independent: float
    starts: tuple[Start, ...]
    objectives: tuple[float, ...]
    matrix: Tensor
    coordinates: Coordinates = (None, None)

    @property
    def gw(self) -> float:
        """GW_2 in Memoli's sense, sqrt(E) / 2, of the plan found."""
        return math.sqrt(max(self.energy, 0.0)) / 2

    def to_dict(self) -> dict[str, Any]:
        """Return the content of result.json; tensors are kept beside it."""
        return {
            **{name: getattr(self, name) for name in (*NUMBERS, "gw")},
            "energy_bounds": dict(zip(BOUNDS, self.energy_bounds, strict=True)),
            "starts": [start._asdict() for start in self.starts],
            "objectives": list(self.objectives),
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        sides = zip(("source", "target"), self.coordinates, strict=True)
        return {"matrix": self.matrix, **{name: each for name, each in sides if each is not None}}

    @classmethod
    def from_dict(cls, summary: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> GromovRecord:
        """Restore the record from its `to_dict` and `tensors`."""
        return cls(
            **{name: summary[name] for name in NUMBERS},
            energy_bounds=tuple(summary["energy_bounds"][name] for name in BOUNDS),
            starts=tuple(Start(**start) for start in summary["starts"]),
            objectives=tuple(summary["objectives"]),
            matrix=tensors["matrix"],
            coordinates=(tensors.get("source"), tensors.get("target")),
        )
