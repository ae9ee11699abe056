"""Going through a list of units, beside other processes that go through the same list.

Every process walks over the whole list and computes what is not done, what it needs being done, and
what no living process has locked. A study with shards gives every unit to one of them by its
digest; a shard waits for units of others, and takes over those of a shard whose process is dead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from otdd_flash.errors import InputError
from otdd_flash.files.locks import lock
from otdd_flash.study.units.store import Store
from otdd_flash.study.units.unit import Bench, Content, Unit

# Between two looks at units that others compute.
SECONDS_APART = 0.2

# progress(units done, their total); stop() says whether to end after this unit.
Progress = Callable[[int, int], None]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Shard:
    """One of several processes that share the units of a study.

    Attributes:
        number: which one, from 1.
        count: how many there are.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """Read text such as 2/4; None is the only shard.

        Raises:
            InputError: it is no such text.
        """
        if text is None:
            return cls()
        number, _, count = str(text).partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise InputError(f"study.shard must be I/N with 1 <= I <= N such as 2/4, got {text!r}")
        return cls(int(number), int(count))

    def owner(self, unit: Unit) -> int:
        """The number of the shard that a unit belongs to."""
        return int(unit.digest, 16) % self.count + 1

    @contextmanager
    def alive(self, store: Store) -> Iterator[None]:
        """Show that this shard's process lives; its file stays, free once the process has ended.

        Raises:
            InputError: another living process is this shard.
        """
        if self.count == 1:
            yield
            return
        descriptor = self._locked(self.number, store)
        if descriptor is None:
            raise InputError(
                f"study.shard={self.number}/{self.count} of this folder is in use by another run "
                "that has not ended; give every run a shard of its own"
            )
        try:
            yield
        finally:
            os.close(descriptor)

    def mine(self, unit: Unit, store: Store) -> bool:
        """Whether to compute a unit: it belongs here, or to a shard that began and is dead."""
        owner = self.owner(unit)
        return owner == self.number or self._is_dead(owner, store)

    def _is_dead(self, number: int, store: Store) -> bool:
        if not self._path(number, store).exists():
            return False
        descriptor = self._locked(number, store)
        if descriptor is None:
            return False
        os.close(descriptor)
        return True

    def _locked(self, number: int, store: Store) -> int | None:
        store.folder.mkdir(parents=True, exist_ok=True)
        return lock(self._path(number, store))

    def _path(self, number: int, store: Store) -> Path:
        return store.folder / f".shard-{number}-of-{self.count}.lock"


def in_order(units: Iterable[Unit]) -> list[Unit]:
    """Each unit once, after those that it needs."""
    found: dict[str, Unit] = {}

    def add(unit: Unit) -> None:
        if unit.digest not in found:
            for needed in unit.needs:
                add(needed)
            found[unit.digest] = unit

    for unit in units:
        add(unit)
    return list(found.values())


def work_through(
    units: Sequence[Unit],
    bench: Bench,
    store: Store,
    *,
    shard: Shard,
    threads: int,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> None:
    """Compute what is left of a list of units, until each is done, failed or needs a failed one.

    Args:
        units: as `in_order` gives them.
        bench: where they are computed.
        store: where they are kept.
        shard: which of them are this process's.
        threads: of units that are not `one_thread`.
        progress: called as progress(units that are over, their total).
        stop: asked before every unit whether to end.
    """
    left, lost = list(units), set[str]()
    while left:
        before = len(left)
        for unit in list(left):
            if stop is not None and stop():
                return
            if _over(unit, store, lost) or _computed(unit, bench, store, shard, threads, lost):
                left.remove(unit)
                if progress is not None:
                    progress(len(units) - len(left), len(units))
        if left and len(left) == before:
            time.sleep(SECONDS_APART)


def _over(unit: Unit, store: Store, lost: set[str]) -> bool:
    """Whether nothing is left to do for a unit."""
    if store.done(unit):
        return True
    if store.failure(unit) is not None or any(needed.digest in lost for needed in unit.needs):
        lost.add(unit.digest)
    return unit.digest in lost


def _computed(
    unit: Unit, bench: Bench, store: Store, shard: Shard, threads: int, lost: set[str]
) -> bool:
    """Compute a unit if it is this process's turn; whether it is over now."""
    ready = all(store.done(needed) for needed in unit.needs)
    if not ready or not shard.mine(unit, store):
        return False
    with store.locked(unit) as free:
        if not free:
            return False
        # Another process may have ended it before the lock was had.
        if not _over(unit, store, lost):
            compute(unit, bench, store, threads)
    return _over(unit, store, lost)


def compute(unit: Unit, bench: Bench, store: Store, threads: int) -> Content | None:
    """Compute a unit and keep what it came to, or why it failed, which is None."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if unit.one_thread else threads)
    try:
        content = unit.compute(bench)
    except Exception as error:
        # Of any kind: the other units go on.
        store.fail(unit, error)
        return None
    finally:
        torch.set_num_threads(before)
    store.put(unit, content)
    return content
