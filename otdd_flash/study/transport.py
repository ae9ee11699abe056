"""Transport units of a study: class distances, epsilon, self and cross terms, and sampling errors.

    S_epsilon(x, y) = OT_epsilon(x, y) - OT_epsilon(x, x) / 2 - OT_epsilon(y, y) / 2

K tasks have K self terms and K (K - 1) / 2 cross terms, each solved as `dataset_distance` does and
each a unit of its own (`Term`). Class distances are computed in blocks of two tasks (`ClassBlock`),
and an epsilon that is relative to the mean cost over all pairs is one unit (`Epsilon`).
`study.measures.distances` uses all of it; `study.pool` and `study.result` use `Epsilon` and `Term`.

A term orders its tasks by index, so that both directions share one unit. Stored units are used as
long as their keys are equal, so a change that gives other numbers must change the key. The datasets
are checked and moved to the device once per process (`request_of`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from otdd_flash.errors import DataNotice, NotConvergedWarning
from otdd_flash.labels import ClassDistances, LabelMetric
from otdd_flash.labels.measuring import class_block
from otdd_flash.operators.build import mean_cost
from otdd_flash.operators.request import Request
from otdd_flash.result import DistanceResult
from otdd_flash.sampling import noise_floor, subsample_interval
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.term.epsilon import DEFAULT_RELATIVE, epsilon_of_datasets, settled_epsilon
from otdd_flash.study.setup import Setup
from otdd_flash.study.units import Bench, Content, Unit


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
        """Solve the term; a cross term also stores the class coupling of its plan."""
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
    """S_epsilon of two tasks with its solver bounds.

    Attributes:
        value: the distance, in units of the cost.
        lower: the lower bound.
        upper: the upper bound.
        marginal_error: the largest over the three terms.
        converged: whether all terms reached the tolerance.
    """

    value: float
    lower: float
    upper: float
    marginal_error: float
    converged: bool


def distance_units(setup: Setup, i: int, j: int) -> tuple[Term, ...]:
    """Return the cross term and the two self terms of a distance."""
    return Term(setup, i, j), Term(setup, i, i), Term(setup, j, j)


def distance_of(setup: Setup, bench: Bench, i: int, j: int) -> Distance:
    """Compute the distance between two tasks from its terms."""
    xy, xx, yy = (bench.found(unit).facts for unit in distance_units(setup, i, j))
    error = max(term["marginal_error"] for term in (xy, xx, yy))
    converged = all(term["converged"] for term in (xy, xx, yy))
    if xy["identical"]:
        return Distance(0.0, 0.0, 0.0, error, converged)
    # As in `Divergence`: a lower bound takes the upper bounds of the self terms, and vice versa.
    value = xy["value"] - sum(term["value"] for term in (xx, yy)) / 2
    lower = xy["bounds"][0] - sum(term["bounds"][1] for term in (xx, yy)) / 2
    upper = xy["bounds"][1] - sum(term["bounds"][0] for term in (xx, yy)) / 2
    return Distance(value, lower, upper, error, converged)


class ClassBlock(Unit):
    """Squared distances between the classes of two tasks, or within one task."""

    kind = "class distances"

    def __init__(self, setup: Setup, i: int, j: int) -> None:
        self.setup, self.i, self.j = setup, min(i, j), max(i, j)

    @property
    def key(self) -> Mapping[str, Any]:
        settings = self.setup.settings
        return {
            "fingerprints": [self.setup.fingerprints[k] for k in (self.i, self.j)],
            "labels": settings.metric,
            "ground": settings.cost.ground,
            **settings.machine,
        }

    @property
    def title(self) -> str:
        names = self.setup.names
        return f"class distances of {names[self.i]} and {names[self.j]}"

    def compute(self, bench: Bench) -> Content:
        seen = request_of(self.setup, bench).seen
        found = class_block(
            seen[self.i],
            seen[self.j],
            self.setup.settings.labels,
            cache_dir=self.setup.cache_dir,
        )
        return Content(tensors=found._asdict())


class Epsilon(Unit):
    """The mean cost over all pairs, and the regularisation, which may be relative to it."""

    kind = "epsilon"

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @property
    def key(self) -> Mapping[str, Any]:
        return {
            "fingerprints": self.setup.fingerprints,
            **self.setup.settings.transport,
        }

    @property
    def title(self) -> str:
        return "the mean cost of all pairs"

    @property
    def needs(self) -> tuple[Unit, ...]:
        return tuple(ClassBlock(self.setup, *pair) for pair in self.setup.pairs())

    def compute(self, bench: Bench) -> Content:
        request, means = request_of(self.setup, bench), []
        for i, j in self.setup.pairs():
            block = bench.found(ClassBlock(self.setup, i, j)).tensors["values"]
            means.append(mean_cost(request.inputs((i, j), block)))
        mean, settings = sum(means, 0.0) / len(means), self.setup.settings
        relative = settings.epsilon_relative
        # None is the default, for which a constant cost is no error.
        relative = None if relative == DEFAULT_RELATIVE else relative
        *_, epsilon = settled_epsilon(settings.epsilon, relative, lambda: mean)
        return Content({"epsilon": epsilon, "mean_cost": mean})


def epsilon_units(setup: Setup) -> tuple[Unit, ...]:
    """Return the unit that a relative epsilon is read from; none if epsilon is absolute."""
    return () if setup.settings.epsilon_relative is None else (Epsilon(setup),)


def epsilon_of(setup: Setup, bench: Bench) -> float:
    """Return the regularisation of all pairs, in units of the cost."""
    units = epsilon_units(setup)
    if units:
        return float(bench.found(units[0]).facts["epsilon"])
    assert setup.settings.epsilon is not None
    return setup.settings.epsilon


def table_units(setup: Setup, i: int, j: int) -> tuple[Unit, ...]:
    """Return the blocks of class distances of two tasks, or of one with itself."""
    return tuple(ClassBlock(setup, *pair) for pair in dict.fromkeys(((i, i), (i, j), (j, j))))


def table_of(setup: Setup, bench: Bench, i: int, j: int) -> ClassDistances:
    """Return W over the classes of two tasks, i <= j, in the form of `class_distances`."""
    blocks = {
        pair: bench.found(ClassBlock(setup, *pair)).tensors for pair in ((i, i), (i, j), (j, j))
    }
    full = {}
    for part in ("values", "lower", "upper"):
        xx, xy, yy = (blocks[pair][part] for pair in ((i, i), (i, j), (j, j)))
        full[part] = torch.cat((torch.cat((xx, xy), 1), torch.cat((xy.T, yy), 1)))
    bounded = not all(torch.equal(full["values"], full[part]) for part in ("lower", "upper"))
    tasks = setup.tasks
    return ClassDistances.from_full(
        full["values"],
        tasks[i].train.class_total,
        tasks[i].train.class_names,
        tasks[j].train.class_names,
        lower=full["lower"] if bounded else None,
        upper=full["upper"] if bounded else None,
    )


def request_of(setup: Setup, bench: Bench) -> Request:
    """Return the request of all tasks, prepared once per process.

    Raises:
        InputError: the device or its memory does not suffice for a term.
    """
    settings = setup.settings

    def prepare() -> Request:
        datasets = [task.train for task in setup.tasks]
        return Request.prepare(datasets, settings.cost, settings.compute, resident=True)

    return bench.cached("request", prepare)


class PairSampling(Unit):
    """A unit on the sampling error of the distance of two tasks, in the order of the study."""

    def __init__(self, setup: Setup, i: int, j: int) -> None:
        self.setup, self.i, self.j = setup, min(i, j), max(i, j)

    @property
    def key(self) -> Mapping[str, Any]:
        return self.setup.settings.sampling

    @property
    def title(self) -> str:
        names = self.setup.names
        return f"the {self.kind} of {names[self.i]} and {names[self.j]}"

    @property
    def needs(self) -> tuple[Unit, ...]:
        return distance_units(self.setup, self.i, self.j)

    def _arguments(self, bench: Bench) -> dict[str, Any]:
        """Return the arguments of `dataset_distance`."""
        settings = self.setup.settings
        metric: LabelMetric = settings.labels
        return {
            "seed": settings.seed,
            "epsilon": epsilon_of(self.setup, bench),
            "labels": metric,
            "solver": settings.solver,
            "compute": settings.compute,
            **asdict(settings.cost),
        }


class PairInterval(PairSampling):
    """The sampling interval of a distance, computed from subsamples."""

    kind = "subsample interval"

    def compute(self, bench: Bench) -> Content:
        settings = self.setup.settings
        assert settings.subsample is not None
        source, target = (self.setup.tasks[k].train for k in (self.i, self.j))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataNotice)
            warnings.simplefilter("ignore", NotConvergedWarning)
            found = subsample_interval(
                source,
                target,
                distance_of(self.setup, bench, self.i, self.j).value,
                count=settings.subsample,
                size=settings.subsample_size,
                **self._arguments(bench),
            )
        return Content({"lower": found.lower, "upper": found.upper})


class PairFloor(PairSampling):
    """The noise floor of two tasks: distances between two halves of each."""

    kind = "noise floor"

    def compute(self, bench: Bench) -> Content:
        source, target = (self.setup.tasks[k].train for k in (self.i, self.j))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConvergedWarning)
            found = noise_floor(source, target, **self._arguments(bench))
        return Content({"source": found.source.value, "target": found.target.value})
