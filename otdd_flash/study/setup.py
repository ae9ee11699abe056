"""A study made ready: tasks and settings, of which units are made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from typing import Any

from otdd_flash.fingerprint import VERSION
from otdd_flash.study.folder import VERSION_KEY
from otdd_flash.study.settings import Settings
from otdd_flash.study.task import Task, shared_rows


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that units read.

    Attributes:
        tasks: at least two.
        settings: resolved.
        cache_dir: where distances between classes are kept; decides no result.
    """

    tasks: tuple[Task, ...]
    settings: Settings
    cache_dir: str | os.PathLike[str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(task.name for task in self.tasks)

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of the training rows of all tasks."""
        return [task.train.fingerprint for task in self.tasks]

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Places of two different tasks, the earlier first."""
        return combinations(range(len(self.tasks)), 2)

    def ordered_pairs(self) -> Iterator[tuple[int, int]]:
        """Places of a source and of a target."""
        return permutations(range(len(self.tasks)), 2)

    def transferred(self) -> list[tuple[int, int]]:
        """The ordered pairs that transfer is tried on: those without rows in common."""
        return [pair for pair in self.ordered_pairs() if tuple(sorted(pair)) not in self.shared]

    def to_dict(self) -> dict[str, Any]:
        """What study.json says."""
        return {
            "tasks": {
                task.name: {
                    "rows": len(task.train),
                    "test_rows": None if task.test is None else len(task.test),
                    "classes": list(task.train.class_names),
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
        """The pairs (i, j), i < j, that share rows, and how many."""
        found = {(i, j): shared_rows(self.tasks[i], self.tasks[j]) for i, j in self.pairs()}
        return {pair: count for pair, count in found.items() if count}
