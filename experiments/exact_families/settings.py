"""How a problem is solved: route, epsilon, precision, memory, and when to stop."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import otdd_flash as otdd
from otdd_flash.solver.divergence import SCHEDULES
from otdd_flash.solver.schedules import Schedule

# What is asked of the library: OT(x, y), S(x, y), the same through `dataset_distance`, S of one
# cloud, S of a cloud and its shuffled copy, OT(x, x) as a cross term, distances between classes, S
# as one of a table of pairs, S as the first record of a flow.
ROUTES = {
    "cross": 0.36,
    "divergence": 0.26,
    "distance": 0.08,
    "identical": 0.03,
    "copy": 0.06,
    "mirror": 0.05,
    "class_pairs": 0.06,
    "pairwise": 0.05,
    "flow": 0.05,
}
PRECISIONS = {"fast": 0.4, "high": 0.3, "double": 0.3}
STOPS = {"default": 0.35, "tolerance": 0.2, "bound_width": 0.15, "early": 0.2, "geomloss": 0.1}
# Decimal exponents of epsilon over the mean cost.
EPSILONS = (-4.0, 4.0)
# A memory budget that stores no score.
STREAMED = "1"


@dataclass(frozen=True)
class Settings:
    """One way of solving a problem.

    Attributes:
        route: one of `ROUTES`.
        relative_epsilon: multiple of the mean of |C|.
        precision: as `ComputeOptions`.
        streamed: whether storing scores is forbidden.
        options: arguments of `otdd.Converged`, or of the `schedule` that they name.
    """

    route: str = "cross"
    relative_epsilon: float = 0.1
    precision: str = "fast"
    streamed: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def compute(self, device: str) -> otdd.ComputeOptions:
        """Where and how passes run."""
        budget = STREAMED if self.streamed else "auto"
        return otdd.ComputeOptions(device, precision=self.precision, memory_budget=budget)

    def solver(self) -> Schedule:
        """How to solve, and when to stop."""
        parameters = dict(self.options)
        return SCHEDULES[parameters.pop("schedule", "converged")](**parameters)

    def summary(self) -> dict[str, Any]:
        """What the result file says of them."""
        return asdict(self)


def draw_settings(random: np.random.Generator, most_iterations: int) -> Settings:
    """Settings of which none is special."""
    options: dict[str, Any] = {"max_iterations": most_iterations}
    match _one_of(random, STOPS):
        case "tolerance":
            options["tolerance"] = float(10 ** random.uniform(-6, -1))
        case "bound_width":
            options["bound_width"] = float(10 ** random.uniform(-4, -0.5))
        case "early":
            options["max_iterations"] = min(most_iterations, int(random.choice([1, 2, 5])))
        case "geomloss":
            options = {"schedule": "geomloss", "scaling": float(random.choice([0.3, 0.5]))}
    return Settings(
        _one_of(random, ROUTES),
        float(10 ** random.uniform(*EPSILONS)),
        _one_of(random, PRECISIONS),
        bool(random.random() < 0.5),
        options,
    )


def _one_of(random: np.random.Generator, shares: dict[str, float]) -> str:
    return str(random.choice(list(shares), p=list(shares.values())))
