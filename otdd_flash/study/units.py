"""Units of a study: pieces of work with stored results, and the loop that computes them.

A `Unit` states what its result depends on (`key`, `needs`) and how to compute it; its digest names
its file. `Store` computes units, and reads and writes their files, complete or not at all and with
a checksum. `work_through` computes a list of units beside other processes that work through the
same list: each process computes a unit that is not done, whose needs are done and which no living
process has locked. With shards, the digest assigns each unit to one shard; a shard waits for units
of others, and takes over those of a shard whose process has died.

The modules of `study.measures` and `study.training` make units; `study.study` runs them,
`study.result` reads them, and `commands.study` checks a shard by `Shard`, reads parts of a dataset
by `part_of`, and deletes FOLDER. A stored unit is never computed again, so its key must hold
everything that decides the result, and nothing else, so that no unit is computed without need. The
names of the files and the content of a unit are a format on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from otdd_flash.arguments import Progress
from otdd_flash.errors import DEFECT, DataNotice, InputError, exit_code
from otdd_flash.files.atomic import lock, unlock, write_json
from otdd_flash.files.tensor_file import DamagedFileError, read_tensors, write_tensors

T = TypeVar("T")

DIGEST_LENGTH = 32


@dataclass(frozen=True, eq=False)
class Content:
    """The stored result of a unit.

    Attributes:
        facts: values that JSON can hold.
        tensors: tensors on the CPU.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Unit:
    """A piece of work; two units with equal kind, key and needs are the same.

    Attributes:
        kind: the sort of work, part of the digest.
        key: all that the result depends on, as JSON types: content fingerprints, settings, seeds.
        title: the unit's name in messages.
        compute: compute(store) returns the content of the unit.
        needs: the units whose contents this one reads.
        one_thread: whether one thread computes it, so that the result is the same to the last bit
            on one machine; other units use the study's number of threads.
    """

    kind: str
    key: Mapping[str, Any]
    title: str
    compute: Callable[[Store], Content]
    needs: tuple[Unit, ...] = ()
    one_thread: bool = False

    @cached_property
    def digest(self) -> str:
        """The name of the unit's file: SHA-256 of kind, key and the digests of `needs`."""
        parts = [self.kind, self.key, [unit.digest for unit in self.needs]]
        text = json.dumps(parts, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


FOLDER = "units"


class Store:
    """The contents of units by their digests, in `folder`/units, and what units share.

    Args:
        folder: the study's folder; created on the first write.
        threads: threads of units that are not `one_thread`.
    """

    def __init__(self, folder: str | Path, threads: int) -> None:
        self.folder, self.threads = Path(folder) / FOLDER, threads
        self._cached: dict[str, Any] = {}

    def done(self, unit: Unit) -> bool:
        """Return whether the unit's file exists."""
        return self._path(unit).exists()

    def known(self, unit: Unit) -> Content | None:
        """Return the content of a unit, or None if it is not done."""
        return self.found(unit) if self.done(unit) else None

    def found(self, unit: Unit) -> Content:
        """Return the content of a unit; it is computed again if its file is damaged or missing.

        Raises:
            InputError: the unit had to be computed again, and failed.
        """
        content = self._read(unit) or self.compute(unit)
        if content is None:
            failure = self.failure(unit) or {}
            raise InputError(f"{unit.title} failed: {failure.get('error', 'for no known reason')}")
        return content

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` returned when any unit first asked for this name."""
        if name not in self._cached:
            self._cached[name] = make()
        kept: T = self._cached[name]
        return kept

    def compute(self, unit: Unit) -> Content | None:
        """Compute a unit and store its content, or store why it failed and return None."""
        before = torch.get_num_threads()
        torch.set_num_threads(1 if unit.one_thread else self.threads)
        try:
            content = unit.compute(self)
        except Exception as error:
            # Any exception is caught, so that the other units continue.
            self._fail(unit, error)
            return None
        finally:
            torch.set_num_threads(before)
        self.put(unit, content)
        return content

    def _read(self, unit: Unit) -> Content | None:
        """Return the content of a unit, or None if its file is missing or damaged.

        A damaged file is removed.

        Warns:
            DataNotice: the file is damaged.
        """
        path = self._path(unit)
        try:
            stored = read_tensors(path)
            if stored.texts.get("digest") != unit.digest:
                raise DamagedFileError("it is not what its name says")
            return Content(json.loads(stored.texts["facts"]), stored.tensors)
        except FileNotFoundError:
            return None
        except (DamagedFileError, OSError) as error:
            warnings.warn(
                f"the file of {unit.title}, {path}, is damaged ({error}); it is computed again",
                DataNotice,
                stacklevel=2,
            )
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return None

    def put(self, unit: Unit, content: Content) -> None:
        """Write the content of a unit, and remove the record of an earlier failure.

        Raises:
            InputError: the file cannot be written.
        """
        texts = {
            "digest": unit.digest,
            "kind": unit.kind,
            "title": unit.title,
            "key": json.dumps(unit.key, sort_keys=True),
            "facts": json.dumps(content.facts, sort_keys=True, allow_nan=False),
        }
        write_tensors(self._path(unit), content.tensors, texts)
        self.forget_failure(unit)

    def _fail(self, unit: Unit, error: Exception) -> None:
        code = exit_code(error)
        record = {
            "unit": unit.title,
            "error": str(error) or type(error).__name__,
            "type": type(error).__name__,
            "exit_code": code,
        }
        if code == DEFECT:
            record["traceback"] = "".join(traceback.format_exception(error))
        write_json(self._error_path(unit), record)

    def failure(self, unit: Unit) -> dict[str, Any] | None:
        """Return the record of the unit's last failure; None if there is none."""
        try:
            record: dict[str, Any] = json.loads(self._error_path(unit).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return record

    def forget_failure(self, unit: Unit) -> None:
        with suppress(OSError):
            self._error_path(unit).unlink(missing_ok=True)

    def _path(self, unit: Unit) -> Path:
        return self.folder / f"{unit.digest}.safetensors"

    def _error_path(self, unit: Unit) -> Path:
        return self.folder / f"{unit.digest}.error.json"


@contextmanager
def locked(path: Path, *, remains: bool = False) -> Iterator[bool]:
    """Lock a file, and yield whether this process got the lock.

    Until the context ends, no other process can lock the file.

    Args:
        path: created with its folder if it does not exist.
        remains: whether the file remains afterwards.

    Raises:
        InputError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = lock(path)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror or error}); free space there or choose another "
            "folder"
        ) from error
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None and remains:
            os.close(descriptor)
        elif descriptor is not None:
            unlock(path, descriptor)


# The pause before units that other processes compute are checked again.
SECONDS_APART = 0.2

# stop(): whether to end.
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Shard:
    """One of several processes that share the units of a study.

    Attributes:
        number: which of them this is, from 1.
        count: how many there are.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """Read a text such as 2/4; None means the only shard.

        Raises:
            InputError: the text has another form.
        """
        return cls() if text is None else cls(*part_of("study.shard", text, "2/4"))

    def owner(self, unit: Unit) -> int:
        """Return the number of the shard that a unit belongs to."""
        return int(unit.digest, 16) % self.count + 1

    @contextmanager
    def alive(self, store: Store) -> Iterator[None]:
        """Hold the lock of this shard, which shows other shards that its process is alive.

        The lock file remains afterwards; an unlocked file means that the process has ended.

        Raises:
            InputError: another living process is this shard.
        """
        if self.count == 1:
            yield
            return
        with locked(self._path(self.number, store), remains=True) as free:
            if not free:
                raise InputError(
                    f"study.shard={self.number}/{self.count} of this folder is in use by another "
                    "run that has not ended; give every run a shard of its own"
                )
            yield

    def mine(self, unit: Unit, store: Store) -> bool:
        """Return whether to compute a unit: it belongs to this shard, or to one that died."""
        owner = self.owner(unit)
        return owner == self.number or self._is_dead(owner, store)

    def _is_dead(self, number: int, store: Store) -> bool:
        path = self._path(number, store)
        if not path.exists():
            return False
        with locked(path, remains=True) as free:
            return free

    def _path(self, number: int, store: Store) -> Path:
        return store.folder / f".shard-{number}-of-{self.count}.lock"


def part_of(name: str, text: Any, example: str) -> tuple[int, int]:
    """Read I and N of a text I/N.

    Raises:
        InputError: the text has another form.
    """
    number, _, count = str(text).partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise InputError(f"{name} must be I/N with 1 <= I <= N such as {example}, got {text!r}")
    return int(number), int(count)


def in_order(units: Iterable[Unit]) -> list[Unit]:
    """Return each unit once, after the units that it needs."""
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
    store: Store,
    *,
    shard: Shard,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> None:
    """Compute a list of units, until each is done, has failed or needs a failed unit.

    Args:
        units: in an order of `in_order`.
        store: where contents are stored.
        shard: which units this process computes.
        progress: called as progress(units finished, their total).
        stop: called before each unit; if it returns True, the function returns.
    """
    left, lost = list(units), set[str]()
    while left:
        before = len(left)
        for unit in list(left):
            if stop is not None and stop():
                return
            if _over(unit, store, lost) or _computed(unit, store, shard, lost):
                left.remove(unit)
                if progress is not None:
                    progress(len(units) - len(left), len(units))
        if left and len(left) == before:
            time.sleep(SECONDS_APART)


def _over(unit: Unit, store: Store, lost: set[str]) -> bool:
    """Return whether a unit is done, has failed, or needs a failed unit."""
    if store.done(unit):
        return True
    if store.failure(unit) is not None or any(needed.digest in lost for needed in unit.needs):
        lost.add(unit.digest)
    return unit.digest in lost


def _computed(unit: Unit, store: Store, shard: Shard, lost: set[str]) -> bool:
    """Compute a unit if this process may, and return whether the unit is finished."""
    ready = all(store.done(needed) for needed in unit.needs)
    if not ready or not shard.mine(unit, store):
        return False
    with locked(store.folder / f".{unit.digest}.lock") as free:
        if not free:
            return False
        # Another process may have finished it before this one got the lock.
        if not _over(unit, store, lost):
            store.compute(unit)
    return _over(unit, store, lost)
