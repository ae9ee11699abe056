"""Where units of a study are computed: what is in memory, and what other units came to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from otdd_flash.errors import InputError
from otdd_flash.study.units.store import Store
from otdd_flash.study.units.unit import Content, Unit
from otdd_flash.study.units.work import compute

T = TypeVar("T")


class StoredBench:
    """A bench over a store; a unit whose file is damaged or gone is computed again.

    Args:
        store: the contents of units.
        threads: of units that are not `one_thread`.
    """

    def __init__(self, store: Store, threads: int) -> None:
        self._store, self._threads = store, threads
        self._kept: dict[str, Any] = {}

    def found(self, unit: Unit) -> Content:
        """The content of a unit.

        Raises:
            InputError: it had to be computed again, and failed.
        """
        content = self._store.get(unit) or compute(unit, self, self._store, self._threads)
        if content is None:
            failure = self._store.failure(unit) or {}
            raise InputError(f"{unit.title} failed: {failure.get('error', 'for no known reason')}")
        return content

    def known(self, unit: Unit) -> Content | None:
        return self.found(unit) if self._store.done(unit) else None

    def cached(self, name: str, make: Callable[[], T]) -> T:
        if name not in self._kept:
            self._kept[name] = make()
        kept: T = self._kept[name]
        return kept
