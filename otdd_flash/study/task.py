"""The tasks of a study: datasets with labels to learn, and which of them come from one source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from otdd_flash.arguments.values import holds_items, samples
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.errors import DataNotice, InputError, prefixed, warn
from otdd_flash.labels import drop_small_classes
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import listing

Given: TypeAlias = "Samples | tuple[Samples, Samples | None]"


@dataclass(frozen=True, eq=False)
class Task:
    """A labelled dataset under a name, with rows to test on.

    Attributes:
        name: how tables call it.
        train: the rows that are compared and trained on, on the CPU.
        test: rows of the same classes that errors are counted on; None where nothing is
            transferred to the task.
        family: the unit that it belongs to for intervals; None until `with_families` gives one.
    """

    name: str
    train: LabeledSamples
    test: LabeledSamples | None
    family: str | None = None

    @cached_property
    def row_hashes(self) -> frozenset[bytes]:
        """One hash for every row of features, of both parts."""
        trained, tested = self.part_hashes
        return trained | tested

    @cached_property
    def part_hashes(self) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """One hash for every row of features, of the training and of the test rows."""
        parts = (self.train, self.test)
        trained, tested = (frozenset(() if part is None else _hashes(part)) for part in parts)
        return trained, tested

    @property
    def fingerprints(self) -> list[str | None]:
        """Fingerprints of the contents of both parts; None without test rows."""
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
    """Tasks from what a study is made with.

    Args:
        given: by name, (train, test) as samples, or train alone.
        min_class_size: drop classes with fewer training rows, with a notice.
        families: the family of tasks by name; the others get theirs from the rows they share.
        transfer: whether every task needs test rows.

    Raises:
        InputError: there are too few tasks, or one has no labels, no test rows or other classes
            in its test rows.
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
    """Read the datasets among the given tasks into samples, and leave samples as they are.

    Raises:
        InputError: as for `as_samples`.
    """

    def read(name: str, one: Any) -> Any:
        if isinstance(one, tuple) and any(map(holds_items, one)):
            return tuple(read(name, part) for part in one)
        return as_samples(one, f"tasks[{name!r}]") if holds_items(one) else one

    return {name: read(name, one) for name, one in given.items()}


def shared_rows(one: Task, other: Task) -> int:
    """How many different rows two tasks have in common."""
    return len(one.row_hashes & other.row_hashes)


def with_families(tasks: Sequence[Task], given: Mapping[str, str]) -> tuple[Task, ...]:
    """Tasks with their family: as given, else one for all that share rows in any chain."""
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
    if train.labels is None or (test is not None and test.labels is None):
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
    """Training and test rows; two arrays are features and labels, as elsewhere."""
    test = None
    # Two pairs (features, labels) are (train, test) as well.
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
    """The test rows with the classes of the training rows, by name."""
    if test.dim != train.dim:
        raise InputError(
            f"task {name} has {train.dim} features in its training rows and {test.dim} in its "
            "test rows; both must have the same"
        )
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
