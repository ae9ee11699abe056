"""Tasks and resolved settings of a study, from which its units are made, and those of transfer.

`as_tasks` makes tasks from what the user gave: it drops small classes, matches the classes of test
rows by name and groups tasks that share rows into families. `Settings` holds what decides results
and `Setup` joins both. `study.study` makes them; `study.training` and the modules of
`study.measures` make the keys and the work of units from them. `study.result` looks these units up
and reads names, sizes and settings here, and `report.study.page` and `report.study.writing` show
them. `Transfer` says how networks are trained; users, `commands.study` and `study.study` make it,
and `study.training` reads it.

The dictionaries of `Settings`, and of `Transfer` with them, are parts of unit keys and of
study.json. A new or renamed entry, or another default, changes the digests of the units that have
it in their key, and `study.study` refuses to resume a folder whose study.json differs; a setting
that decides no result, such as `cache_dir`, must stay out of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import combinations, permutations
from typing import Any, TypeAlias, TypeVar

import numpy as np
from torch import nn

from otdd_flash.arguments import (
    Count,
    Index,
    NotNegative,
    Positive,
    check_fields,
    count,
    holds_items,
    importable,
    samples,
)
from otdd_flash.checks import optional, sequence
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.errors import DataNotice, InputError, choose, prefixed, warn
from otdd_flash.extractors.module_features import Unidentified, content_digest
from otdd_flash.fingerprint import VERSION
from otdd_flash.labels import drop_small_classes
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.plugins import import_callable
from otdd_flash.result import versions
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import listing
from otdd_flash.solver.schedules import Schedule

T = TypeVar("T")

# Key of study.json: the version of `otdd_flash.fingerprint` that digested the tasks.
VERSION_KEY = "fingerprint_version"

Given: TypeAlias = "Samples | tuple[Samples, Samples | None]"

PROTOCOLS = ("finetune", "head")

# Rows of the target per class, if their number is not given.
PER_CLASS = 10


@dataclass(frozen=True)
class Transfer:
    """Settings of transfer runs: a source's network is trained further on a few rows of the target.

    The baseline is trained on the same rows of the target alone: all layers under either protocol,
    from the weights that the source's network began with, in the same order and for as many steps.

    Args:
        protocol: `finetune` trains all layers on the target, `head` only the last layer.
        target_samples: rows of the target in all, drawn in proportion to its classes; None is ten
            per class.
        seeds: repetitions, each with its own weights, rows and orders.
        source_epochs: passes over the source.
        target_epochs: passes over the target's rows.
        min_target_steps: passes over the target's rows are added until there are at least this many
            steps; 0 adds none.
        batch_size: rows of a step, on the source and on the target.
        learning_rate: that of Adam.
        weight_decay: that of `torch.optim.Adam`, which adds it times the weights to the gradient.
        network: a function, or where to import it from, "package.module:function". It
            takes (dim, image_shape) and returns a module from features (n, dim) to the input of the
            linear head. None: LeNet-5 for images, otherwise one hidden layer of 256.
        image_shape: (c, h, w) if features are pixels of images, otherwise None.

    Raises:
        InputError: a field is invalid.
    """

    protocol: str = "finetune"
    target_samples: Count | None = None
    seeds: Count = 5
    source_epochs: Count = 20
    target_epochs: Count = 10
    min_target_steps: Index = 200
    batch_size: Count = 32
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 1e-6
    network: str | Callable[..., nn.Module] | None = None
    image_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            "transfer.",
            network=optional(importable),
            image_shape=optional(sequence(count, length=3)),
        )
        choose("transfer.protocol", self.protocol, PROTOCOLS)

    def target_rows(self, target: LabeledSamples) -> int:
        """Return the number of rows of a target that are trained on.

        Raises:
            InputError: it is below the number of classes or above the number of rows.
        """
        classes, rows = target.class_total, len(target)
        wanted = PER_CLASS * classes if self.target_samples is None else self.target_samples
        if not classes <= wanted <= rows:
            given = "" if self.target_samples is not None else f", {PER_CLASS} a class,"
            raise InputError(
                f"transfer.target_samples={wanted}{given} must lie between the {classes} classes "
                f"and the {rows} training rows of {target.name}; set transfer.target_samples to a "
                "number in between"
            )
        return wanted

    def builder(self) -> Callable[..., nn.Module] | None:
        """Import the function that builds bodies; None for the built-in ones.

        Raises:
            InputError: there is no such function.
        """
        if isinstance(self.network, str):
            return import_callable(self.network, "transfer.network")
        return self.network

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of study.json; a user's function becomes its name and digest.

        Raises:
            InputError: the function reads an object that has no content to digest.
        """
        shape = None if self.image_shape is None else list(self.image_shape)
        summary = {**vars(self), "network": None, "image_shape": shape}
        if (builder := self.builder()) is not None:
            name = getattr(builder, "__qualname__", type(builder).__name__)
            try:
                digest = content_digest(builder)
            except Unidentified as error:
                raise InputError(
                    f"transfer.network holds what has no content to tell it by ({error}), and a "
                    "study could not know whether it changed; name a function of a module"
                ) from error
            summary["network"] = f"{getattr(builder, '__module__', '')}.{name} {digest[:16]}"
        return summary


@dataclass(frozen=True)
class Settings:
    """The settings of a study, resolved: none of them is `auto`.

    Attributes:
        measures: names of measures, in the order of tables.
        measure: the measure that chooses sources, fixed before any gain is known.
        epsilon: of the transport, in units of the cost; None if it is relative.
        epsilon_relative: epsilon as a multiple of the mean cost over all pairs.
        unbalanced: the penalty of both marginals, in units of the cost; None if it is relative, or
            marginals are exact.
        unbalanced_relative: the penalty as a multiple of the mean cost over all pairs.
        labels: the method of class distances.
        cost: the ground cost.
        solver: how transport is solved.
        compute: where and how passes run.
        projections: draws of the sliced distance.
        subsample: K, the subsamples of a sampling interval; None for no intervals.
        subsample_size: rows of each subsample of a source; None for a quarter.
        noise_floor: whether distances between halves of each dataset are computed.
        transfer: how networks are trained; None for no transfer.
        seed: of every draw.
        threads: threads of units that do not need exactly one.
    """

    measures: tuple[str, ...]
    measure: str
    epsilon: float | None
    epsilon_relative: float | None
    unbalanced: float | None
    unbalanced_relative: float | None
    labels: LabelMetric
    cost: GroundCost
    solver: Schedule
    compute: ComputeOptions
    projections: int
    subsample: int | None
    subsample_size: int | None
    noise_floor: bool
    transfer: Transfer | None
    seed: int
    threads: int

    @property
    def transport(self) -> dict[str, Any]:
        """The settings on which a transport term depends, as JSON types."""
        return {
            "epsilon": self.epsilon,
            "epsilon_relative": self.epsilon_relative,
            **self.penalties,
            "labels": self.metric,
            "cost": self.cost.to_dict(),
            "solver": asdict(self.solver),
            **self.machine,
        }

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties of marginals; empty where they are exact, as in keys of earlier folders."""
        given = {"unbalanced": self.unbalanced, "unbalanced_relative": self.unbalanced_relative}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def metric(self) -> dict[str, Any]:
        return {"method": self.labels.name, **self.labels.to_dict()}

    @property
    def machine(self) -> dict[str, Any]:
        """Compute options, threads and versions, as JSON types."""
        return {"compute": self.compute.settings, "threads": self.threads, "versions": versions()}

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings on which a sampling interval depends, as JSON types."""
        return {
            "subsample": self.subsample,
            "subsample_size": self.subsample_size,
            "seed": self.seed,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the content of study.json without the tasks."""
        return {
            "measures": list(self.measures),
            "measure": self.measure,
            **self.transport,
            "projections": self.projections,
            **self.sampling,
            "noise_floor": self.noise_floor,
            "transfer": None if self.transfer is None else self.transfer.to_dict(),
        }


@dataclass(frozen=True, eq=False)
class Task:
    """A labelled dataset with a name and test rows.

    Attributes:
        name: its name in tables.
        train: the rows that are compared and trained on, on the CPU.
        test: rows of the same classes on which errors are counted; None if nothing is
            transferred to the task.
        family: the unit that it belongs to in intervals; None until `with_families` sets it.
    """

    name: str
    train: LabeledSamples
    test: LabeledSamples | None
    family: str | None = None

    @cached_property
    def part_hashes(self) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """One hash for each different row of features, for training and for test rows."""
        parts = (self.train, self.test)
        trained, tested = (frozenset(() if part is None else _hashes(part)) for part in parts)
        return trained, tested

    @property
    def fingerprints(self) -> list[str | None]:
        """Content fingerprints of both parts; None without test rows."""
        return [self.train.fingerprint, None if self.test is None else self.test.fingerprint]


def _hashes(part: LabeledSamples) -> Iterator[bytes]:
    for row in part.features.numpy().astype(np.float64) + 0.0:
        yield hashlib.blake2b(row.tobytes(), digest_size=16).digest()


def as_tasks(
    given: Mapping[str, Given],
    *,
    min_class_size: int | None,
    families: Mapping[str, str] | None,
    transfer: bool,
) -> tuple[Task, ...]:
    """Make the tasks of a study from datasets.

    Args:
        given: by name, (train, test) as samples, or train alone.
        min_class_size: drop classes with fewer training rows, with a notice.
        families: the family of tasks by name; other tasks are grouped by shared rows.
        transfer: whether each task needs test rows.

    Raises:
        InputError: there are too few tasks, or a task has no labels, no test rows, or test rows
            with other classes.
    """
    least = 4 if transfer else 2
    if len(given) < least:
        raise InputError(
            f"a study compares at least 2 tasks and correlates from 4, got {len(given)}: add tasks"
            + (" or set transfer=null" if len(given) >= 2 else "")
        )
    tasks = [_task(name, one, min_class_size, transfer) for name, one in given.items()]
    unknown = [name for name in families or {} if name not in given]
    if unknown:
        raise InputError(f"families names {unknown[0]!r}, which is no task: {listing(given)}")
    return with_families(tasks, families or {})


def read_datasets(given: Mapping[str, Given]) -> dict[str, Given]:
    """Read given datasets into samples, and leave given samples unchanged.

    Raises:
        InputError: as for `as_samples`.
    """

    def read(name: str, one: Any) -> Any:
        if isinstance(one, tuple) and any(map(holds_items, one)):
            return tuple(read(name, part) for part in one)
        return as_samples(one, f"tasks[{name!r}]") if holds_items(one) else one

    return {name: read(name, one) for name, one in given.items()}


def shared_rows(one: Task, other: Task) -> int:
    """Return how many different rows two tasks have in common."""
    rows = (frozenset[bytes]().union(*task.part_hashes) for task in (one, other))
    return len(frozenset.intersection(*rows))


def with_families(tasks: Sequence[Task], given: Mapping[str, str]) -> tuple[Task, ...]:
    """Return the tasks with their families.

    A task's family is the given one. Otherwise tasks that share rows, directly or through others,
    form one family, named after the first of them.
    """
    place = list(range(len(tasks)))
    for j in range(len(tasks)):
        for i in range(j):
            if place[i] != place[j] and shared_rows(tasks[i], tasks[j]):
                joined = place[j]
                place = [place[i] if one == joined else one for one in place]
    return tuple(
        replace(task, family=given.get(task.name, tasks[first].name))
        for task, first in zip(tasks, place, strict=True)
    )


def _task(name: str, given: Given, min_class_size: int | None, transfer: bool) -> Task:
    train, test = _parts(name, given)
    if any(one is not None and one.labels is None and one.targets is None for one in (train, test)):
        raise InputError(
            f"task {name} has no labels; label it with otdd_flash.data.with_pseudo_labels (on the "
            "command line by pseudo_labels and k of the task), or drop it"
        )
    kept = drop_small_classes(replace(train.to("cpu"), name=name), min_class_size)
    if test is not None:
        test = _tested(name, kept, test.to("cpu"))
    elif transfer:
        raise InputError(
            f"task {name} has no test rows to count errors on; transfer.test_fraction=0.2 splits "
            "some off on the command line, (train, test) gives some in Python; transfer=null (None "
            "in Python) counts no errors"
        )
    if transfer and (kept.label_sets is not None or kept.targets is not None):
        raise InputError(
            f"task {name} has several labels a row or numbers, and networks learn one class a row; "
            "set transfer=null (None in Python)"
        )
    if len(kept.class_names) < 2 and transfer:
        raise InputError(f"task {name} has one class, of which nothing is learnt; take it out")
    task = Task(name, kept, test)
    trained, tested = task.part_hashes
    if transfer and trained & tested:
        warn(
            f"task {name}: {len(trained & tested)} of {len(tested)} different test rows are "
            "training rows as well, so that errors are lower than on new rows; give it other ones",
            DataNotice,
        )
    return task


def _parts(name: str, given: Any) -> tuple[LabeledSamples, LabeledSamples | None]:
    """Return training and test rows; two arrays are features and labels."""
    test = None
    # A tuple of two tuples (features, labels) is (train, test) too.
    if isinstance(given, tuple) and (
        any(isinstance(part, LabeledSamples) for part in given)
        or all(isinstance(part, tuple) for part in given)
    ):
        if len(given) != 2:
            raise InputError(f"task {name} must be (train, test), got {len(given)} datasets")
        given, test = given
    parts = [samples(f"task {name}", part) for part in (given, test) if part is not None]
    try:
        train, *rest = (LabeledSamples.of(part, name) for part in parts)
    except InputError as error:
        raise prefixed(f"task {name}", error) from error
    return train, rest[0] if rest else None


def _tested(name: str, train: LabeledSamples, test: LabeledSamples) -> LabeledSamples:
    """Return the test rows with the classes of the training rows, matched by name."""
    if test.dim != train.dim:
        raise InputError(
            f"task {name} has {train.dim} features in its training rows and {test.dim} in its "
            "test rows; both must have the same"
        )
    if train.label_sets is not None or train.targets is not None:
        return test
    missing = [label for label in train.class_names if label not in test.class_names]
    if missing:
        raise InputError(
            f"task {name} has no class {missing[0]} among its test rows, whose classes are "
            f"{listing(test.class_names, 12)}; name the classes of both alike"
        )
    order = [test.class_names.index(label) for label in train.class_names]
    kept = test if order == list(range(len(test.class_names))) else test.keep_classes(order)
    if len(kept) < len(test):
        warn(
            f"task {name}: {len(test) - len(kept)} test rows are of classes without training rows "
            "and are left out",
            DataNotice,
        )
    return replace(kept, name=f"{name} test")


@dataclass(frozen=True, eq=False)
class Setup:
    """The tasks and settings that units read.

    Attributes:
        tasks: at least two.
        settings: resolved.
        cache_dir: where class distances are cached; it decides no result.
    """

    tasks: tuple[Task, ...]
    settings: Settings
    cache_dir: str | os.PathLike[str] | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # Another process makes its own units, because functions of some cannot be pickled.
        return {**vars(self), "_made": {}}

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned when it was first asked for by this name.

        Units of K tasks need up to K^2 others each, so they are not made again for each of them.
        """
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(task.name for task in self.tasks)

    def sides(self, i: int, j: int) -> tuple[LabeledSamples, LabeledSamples]:
        """Return the training rows of two tasks."""
        return self.tasks[i].train, self.tasks[j].train

    def fingerprints(self, *places: int) -> list[str]:
        """Return fingerprints of the training rows of some tasks, of all where none are named."""
        chosen = places or range(len(self.tasks))
        return [self.tasks[place].train.fingerprint for place in chosen]

    def both(self, i: int, j: int) -> str:
        """Return the names of two tasks, for titles of units."""
        return f"{self.names[i]} and {self.names[j]}"

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Return the index pairs (i, j), i < j, of different tasks."""
        return combinations(range(len(self.tasks)), 2)

    def ordered_pairs(self) -> Iterator[tuple[int, int]]:
        """Return the index pairs (source, target) of different tasks."""
        return permutations(range(len(self.tasks)), 2)

    def transferred(self) -> list[tuple[int, int]]:
        """Return the ordered pairs for which transfer is run: those without shared rows."""
        return [pair for pair in self.ordered_pairs() if tuple(sorted(pair)) not in self.shared]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of study.json."""
        return {
            "tasks": {
                task.name: {
                    "rows": len(task.train),
                    "test_rows": None if task.test is None else len(task.test),
                    "classes": list(task.train.label_names),
                    "family": task.family,
                    "fingerprints": task.fingerprints,
                }
                for task in self.tasks
            },
            VERSION_KEY: VERSION,
            **self.settings.to_dict(),
        }

    @cached_property
    def shared(self) -> dict[tuple[int, int], int]:
        """The pairs (i, j), i < j, that share rows, with the number of shared rows."""
        found = {(i, j): shared_rows(self.tasks[i], self.tasks[j]) for i, j in self.pairs()}
        return {pair: count for pair, count in found.items() if count}
