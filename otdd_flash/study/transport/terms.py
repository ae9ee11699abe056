"""Self terms and cross terms of a study, and the distances that they make.

    S_epsilon(x, y) = OT_epsilon(x, y) - OT_epsilon(x, x) / 2 - OT_epsilon(y, y) / 2

K tasks have K self terms and K (K - 1) / 2 cross terms, each solved as `dataset_distance` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from otdd_flash.operators.build import mean_cost
from otdd_flash.result import DistanceResult
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.term.epsilon import epsilon_of_datasets
from otdd_flash.study.setup import Setup
from otdd_flash.study.transport.classes import epsilon_of, epsilon_units, table_of, table_units
from otdd_flash.study.transport.clouds import request_of
from otdd_flash.study.units.unit import Bench, Content, Unit


class Term(Unit):
    """The transport term of two tasks, or the self term of one."""

    kind = "transport term"

    def __init__(self, setup: Setup, i: int, j: int) -> None:
        self.setup, self.i, self.j = setup, min(i, j), max(i, j)

    @property
    def key(self) -> Mapping[str, Any]:
        return {
            "fingerprints": [self.setup.fingerprints[k] for k in (self.i, self.j)],
            **self.setup.settings.transport,
        }

    @property
    def title(self) -> str:
        names = self.setup.names
        if self.i == self.j:
            return f"the self term of {names[self.i]}"
        return f"the cross term of {names[self.i]} and {names[self.j]}"

    @property
    def needs(self) -> tuple[Unit, ...]:
        return table_units(self.setup, self.i, self.j) + epsilon_units(self.setup)

    def compute(self, bench: Bench) -> Content:
        """Solve the term; a cross term also keeps the coupling of classes, by its plan."""
        settings = self.setup.settings
        table, epsilon = table_of(self.setup, bench, self.i, self.j), epsilon_of(self.setup, bench)
        request = request_of(self.setup, bench).of(self.i, self.j)
        problem = Problem(request, epsilon, table.full)
        relative, cost = settings.epsilon_relative, settings.cost
        given = ("epsilon", epsilon) if relative is None else ("epsilon_relative", relative)

        def mean() -> float:
            return mean_cost(request.inputs((0, 1), table.xy))

        with epsilon_of_datasets(*given, epsilon, mean, cost.standardized(request.given[0].dim)):
            divergence = problem.solve(settings.solver, debias=problem.identical)
        term = divergence.xy
        facts = {
            "value": term.value,
            "bounds": list(term.bounds),
            "marginal_error": term.marginal_error,
            "iterations": term.iterations,
            "converged": term.converged,
            "identical": problem.identical,
            "epsilon": epsilon,
        }
        if self.i == self.j:
            return Content(facts)
        source, target = request.given
        result = DistanceResult(
            source,
            target,
            table,
            divergence,
            settings.cost,
            settings.compute,
            method=settings.labels.name,
            seconds={},
            request=request,
        )
        return Content(facts, {"coupling": result.class_coupling()})


class Distance(NamedTuple):
    """S_epsilon of two tasks.

    Attributes:
        value: the distance, in units of the cost.
        lower: a lower bound.
        upper: an upper bound.
        marginal_error: the largest of the terms'.
        converged: whether all terms reached the tolerance.
    """

    value: float
    lower: float
    upper: float
    marginal_error: float
    converged: bool


def distance_units(setup: Setup, i: int, j: int) -> tuple[Term, ...]:
    """The terms of a distance."""
    return Term(setup, i, j), Term(setup, i, i), Term(setup, j, j)


def distance_of(setup: Setup, bench: Bench, i: int, j: int) -> Distance:
    """The distance between two tasks, from its terms."""
    xy, xx, yy = (bench.found(unit).facts for unit in distance_units(setup, i, j))
    error = max(term["marginal_error"] for term in (xy, xx, yy))
    converged = all(term["converged"] for term in (xy, xx, yy))
    if xy["identical"]:
        return Distance(0.0, 0.0, 0.0, error, converged)
    # As in `Divergence`: each end takes the opposite end of the self terms.
    value = xy["value"] - sum(term["value"] for term in (xx, yy)) / 2
    lower = xy["bounds"][0] - sum(term["bounds"][1] for term in (xx, yy)) / 2
    upper = xy["bounds"][1] - sum(term["bounds"][0] for term in (xx, yy)) / 2
    return Distance(value, lower, upper, error, converged)
