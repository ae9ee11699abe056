"""Class distances of a study in blocks of two tasks, and the epsilon of all pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from otdd_flash.labels import ClassDistances
from otdd_flash.labels.blocks import class_block
from otdd_flash.operators.build import mean_cost
from otdd_flash.solver.term.epsilon import DEFAULT_RELATIVE, settled_epsilon
from otdd_flash.study.setup import Setup
from otdd_flash.study.transport.clouds import request_of
from otdd_flash.study.units.unit import Bench, Content, Unit


class ClassBlock(Unit):
    """Squared distances between the classes of two tasks, or of one."""

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
    """The mean over all pairs of the mean cost, and the regularisation that is relative to it."""

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
        # The default of all studies, which a constant cost does not stop.
        relative = None if relative == DEFAULT_RELATIVE else relative
        *_, epsilon = settled_epsilon(settings.epsilon, relative, lambda: mean)
        return Content({"epsilon": epsilon, "mean_cost": mean})


def epsilon_units(setup: Setup) -> tuple[Unit, ...]:
    """What the epsilon of a term is read from, where it is relative."""
    return () if setup.settings.epsilon_relative is None else (Epsilon(setup),)


def epsilon_of(setup: Setup, bench: Bench) -> float:
    """The regularisation of all pairs, in units of the cost."""
    units = epsilon_units(setup)
    if units:
        return float(bench.found(units[0]).facts["epsilon"])
    assert setup.settings.epsilon is not None
    return setup.settings.epsilon


def table_units(setup: Setup, i: int, j: int) -> tuple[Unit, ...]:
    """The blocks of the table of two tasks, or of one with itself."""
    return tuple(ClassBlock(setup, *pair) for pair in dict.fromkeys(((i, i), (i, j), (j, j))))


def table_of(setup: Setup, bench: Bench, i: int, j: int) -> ClassDistances:
    """W over the classes of two tasks, i <= j, as `class_distances` has it."""
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
