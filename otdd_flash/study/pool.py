"""The list of a study's units, the bench that computes them, and processes that share the work.

`study_units` lists the units of all measures and transfer runs in an order in which they can be
computed. `StoredBench` reads contents from the store and caches shared data. `work_in_processes`
starts workers on one machine. `study.study` calls all three; `study.result` uses `StoredBench`.

Each unit comes after the units that it needs, so that one process can compute the list in order.
A worker may be killed at any moment, because units are written completely or not at all.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from otdd_flash.errors import InputError
from otdd_flash.plugins import blamed_on
from otdd_flash.study.measures import measures_named
from otdd_flash.study.setup import Setup
from otdd_flash.study.training import transfer_units
from otdd_flash.study.transport import Epsilon, Term
from otdd_flash.study.units import (
    Content,
    Progress,
    Shard,
    Stop,
    Store,
    Unit,
    compute,
    in_order,
    work_through,
)

# The pause between two checks of the workers' progress.
SECONDS_APART = 0.5


def work_in_processes(
    setup: Setup,
    folder: Path,
    *,
    workers: int,
    shard: Shard,
    progress: Progress | None,
    stop: Stop | None,
) -> None:
    """Compute all units with `workers` processes; other arguments are those of `work_through`.

    Raises:
        InputError: a worker was killed.
    """
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    store = Store(folder)
    flag = store.folder / f".stop-{shard.number}"
    store.folder.mkdir(parents=True, exist_ok=True)
    flag.unlink(missing_ok=True)
    calls = [delayed(_worker)(setup, folder, shard, flag, os.getpid()) for _ in range(workers)]
    try:
        with _watched(study_units(setup), store, flag, progress, stop):
            Parallel(n_jobs=workers, backend="loky")(calls)
    except TerminatedWorkerError as error:
        raise InputError(
            "a worker process was killed from outside, as systems do where memory runs out; "
            "finished work is kept: go on with study.resume=true (resume=True) and a smaller "
            f"study.workers (workers) than {workers}"
        ) from error


def _worker(setup: Setup, folder: Path, shard: Shard, flag: Path, parent: int) -> None:
    _end_with(parent)
    # Ctrl-C reaches all processes of a terminal; only the parent handles it and sets the flag.
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    store, threads = Store(folder), setup.settings.threads
    bench = StoredBench(store, threads)
    units = study_units(setup)
    work_through(units, bench, store, shard=shard, threads=threads, stop=flag.exists)


@cache
def _end_with(parent: int) -> None:
    """End this process, even during a unit, once its parent has been killed.

    Otherwise it would hold the locks of its units and use cores unnoticed. Units are written
    completely or not at all, so it may end at any moment.
    """

    def watch() -> None:
        # If the parent ends, the process gets another parent.
        while os.getppid() == parent:
            time.sleep(SECONDS_APART)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _watched(
    units: Sequence[Unit], store: Store, flag: Path, progress: Progress | None, stop: Stop | None
) -> Iterator[None]:
    """Report progress, and create the flag file when the work should stop."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SECONDS_APART):
            if stop is not None and stop():
                flag.touch()
            if progress is not None:
                over = sum(store.done(unit) for unit in units)
                progress(over, len(units))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        flag.unlink(missing_ok=True)


T = TypeVar("T")


class StoredBench:
    """A bench over a store; it recomputes a unit whose file is damaged or missing.

    Args:
        store: the contents of units.
        threads: threads of units that are not `one_thread`.
    """

    def __init__(self, store: Store, threads: int) -> None:
        self._store, self._threads = store, threads
        self._kept: dict[str, Any] = {}

    def found(self, unit: Unit) -> Content:
        """Return the content of a unit.

        Raises:
            InputError: the unit had to be computed again, and failed.
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


def study_units(setup: Setup) -> list[Unit]:
    """Return the units of a study's measures and of its transfer runs, each after its needs."""
    settings = setup.settings
    with_transfer = settings.transfer is not None
    measures = measures_named(settings.measures, transfer=with_transfer)
    units: list[Unit] = []
    for measure in measures:
        with blamed_on(measure, f"measure {measure.name}"):
            units += measure.units(setup)
    if any(isinstance(unit, Term) for unit in in_order(units)):
        units.append(Epsilon(setup))
    if with_transfer:
        units += transfer_units(setup)
    return in_order(units)
