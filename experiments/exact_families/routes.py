"""The public functions that a problem is solved through, all for the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import otdd_flash as otdd
from experiments.exact_families.problem import Problem
from experiments.exact_families.settings import Settings


@dataclass(frozen=True)
class Request:
    """What is asked of the library: a problem, and how it is solved."""

    problem: Problem
    settings: Settings
    epsilon: float
    compute: otdd.ComputeOptions

    @property
    def sides(self) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
        """Source and target."""
        source = self.problem.x.samples
        if self.settings.route != "identical":
            return source, self.problem.y.samples
        # Another object with the same content.
        return source, source.take(torch.arange(len(source), device=source.features.device))

    @property
    def of_clouds(self) -> dict[str, Any]:
        """Keyword arguments of functions that take a table of classes."""
        problem = self.problem
        given = {
            "class_table": problem.class_table,
            "cost": problem.cost,
            "options": self.settings.solver(),
        }
        return given | {"epsilon": self.epsilon, "compute": self.compute}

    @property
    def of_datasets(self) -> dict[str, Any] | None:
        """Keyword arguments of functions that measure it; None if they refuse the table."""
        problem = self.problem
        given: dict[str, Any] = {"epsilon": self.epsilon, "compute": self.compute}
        given |= {"lambda_x": problem.cost.lambda_x, "lambda_y": problem.cost.lambda_y}
        given |= {"solver": self.settings.solver()}
        if problem.table is None:
            return given | {"labels": "none"}
        if problem.table.min() < 0 or problem.table.diagonal().any():
            return None
        if any(int(side.samples.class_counts.min()) == 0 for side in (problem.x, problem.y)):
            # They leave out classes without points, and then ask for another table.
            return None
        xx, xy, yy = (torch.as_tensor(problem.block(term)) for term in ("xx", "xy", "yy"))
        names = problem.x.samples.class_names, problem.y.samples.class_names
        return given | {"class_distances": otdd.ClassDistances(xx, xy, yy, *names)}


@dataclass(frozen=True)
class Solved:
    """What came back: an interval, and the solved terms where the route gives them."""

    bounds: tuple[float, float]
    debiased: bool
    stopped_by: str | None = None
    terms: Mapping[str, Any] = field(default_factory=dict)


def _cross(request: Request) -> Solved:
    term = otdd.sinkhorn(*request.sides, **request.of_clouds)
    return Solved(term.bounds, False, term.stopped_by, {"xy": term})


def _divergence(request: Request) -> Solved:
    return _of(otdd.sinkhorn_divergence(*request.sides, **request.of_clouds))


def _distance(request: Request) -> Solved:
    if (given := request.of_datasets) is None:
        return _divergence(request)
    return _of(otdd.dataset_distance(*request.sides, **given).divergence)


def _pairwise(request: Request) -> Solved:
    """Both orders of one pair of a table of two datasets."""
    given = request.of_datasets
    # It solves every term once, to a tolerance, and takes a table of all datasets' classes.
    if (
        given is None
        or "class_distances" in given
        or not {"bound_width", "schedule"}.isdisjoint(request.settings.options)
    ):
        return _distance(request)
    found = otdd.pairwise_distances(request.sides, **given)
    bounds = float(found.lower[0, 1]), float(found.upper[0, 1])
    assert bounds == (float(found.lower[1, 0]), float(found.upper[1, 0]))
    return Solved(bounds, True)


def _flow(request: Request) -> Solved:
    """The record of the start of a flow."""
    given = request.of_datasets
    if given is None or not request.problem.cost.lambda_x:
        return _distance(request)
    given = {key: part for key, part in given.items() if not key.startswith("lambda_")}
    if "class_distances" in given:
        given["labels"] = otdd.labels.Given(given.pop("class_distances"))
    flown = otdd.gradient_flow(*request.sides, otdd.Flow(1), cost=request.problem.cost, **given)
    before = flown.before
    assert before.lower is not None
    assert before.upper is not None
    return Solved((before.lower, before.upper), True)


def _of(divergence: Any) -> Solved:
    return Solved(divergence.bounds, True, divergence.terms["xy"].stopped_by, divergence.terms)


# `identical`, `copy` and `mirror` are other problems; `class_pairs` where classes cannot be
# compared is a divergence.
ROUTES: dict[str, Callable[[Request], Solved]] = {
    "cross": _cross,
    "mirror": _cross,
    "divergence": _divergence,
    "identical": _divergence,
    "copy": _divergence,
    "class_pairs": _divergence,
    "distance": _distance,
    "pairwise": _pairwise,
    "flow": _flow,
}
