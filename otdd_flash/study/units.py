"""A piece of work of a study: what its result depends on, and how it is computed.

The folder of a study's units: one file each, whole or not at all, with a checksum.

Going through a list of units, beside other processes that go through the same list.

Every process walks over the whole list and computes what is not done, what it needs being done, and
what no living process has locked. A study with shards gives every unit to one of them by its
digest; a shard waits for units of others, and takes over those of a shard whose process is dead.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from otdd_flash.errors import ConvergenceError, DataNotice, InputError
from otdd_flash.files.atomic import lock, unlock, write_json
from otdd_flash.files.tensor_file import DamagedFileError, read_tensors, write_tensors

T = TypeVar("T")

DIGEST_LENGTH = 32


@dataclass(frozen=True, eq=False)
class Content:
    """What a unit came to.

    Attributes:
        facts: what JSON can hold.
        tensors: the rest, on the CPU.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Unit(ABC):
    """A piece of work; two with equal keys are one.

    Attributes:
        kind: what sort of work it is, part of the digest.
        one_thread: whether it is computed by one thread, as what has to come out the same to the
            last bit on one machine; others take the threads of the study.
    """

    kind: ClassVar[str]
    one_thread: ClassVar[bool] = False

    @property
    @abstractmethod
    def key(self) -> Mapping[str, Any]:
        """All that the result depends on, for JSON: content fingerprints, settings, seeds."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What messages call it."""

    @property
    def needs(self) -> tuple[Unit, ...]:
        """The units whose contents this one reads."""
        return ()

    @abstractmethod
    def compute(self, bench: Bench) -> Content:
        """Do the work."""

    @cached_property
    def digest(self) -> str:
        """The name of its file: SHA-256 of kind, key and the digests of what it needs."""
        parts = [self.kind, self.key, [unit.digest for unit in self.needs]]
        text = json.dumps(parts, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


class Bench(Protocol):
    """Where units are computed: the study's data, and what other units came to."""

    def found(self, unit: Unit) -> Content:
        """The content of a unit that is done."""

    def known(self, unit: Unit) -> Content | None:
        """The content of a unit, or None where it is not done."""

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gave when it was first asked for under this name, by any unit."""


FOLDER = "units"

# How a unit that failed ends, in the order of the commands' exit codes.
DEFECT, BAD_INPUT, NOT_CONVERGED = 1, 2, 3


class Store:
    """Contents of units by their digests, under `folder`/units.

    Args:
        folder: the study's; made on the first write.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) / FOLDER

    def done(self, unit: Unit) -> bool:
        """Whether there is a file of the unit."""
        return self._path(unit).exists()

    def get(self, unit: Unit) -> Content | None:
        """What the unit came to, or None where there is no file, or a damaged one, which goes.

        Warns:
            DataNotice: the file is damaged.
        """
        path = self._path(unit)
        try:
            stored = read_tensors(path)
            if not stored.checked or stored.texts.get("digest") != unit.digest:
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
        """Keep what a unit came to.

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
        with suppress(OSError):
            self._error_path(unit).unlink(missing_ok=True)

    def fail(self, unit: Unit, error: Exception) -> None:
        match error:
            case InputError():
                code = BAD_INPUT
            case ConvergenceError():
                code = NOT_CONVERGED
            case _:
                code = DEFECT
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
        """Why the unit failed when it was last tried; None if it did not."""
        try:
            record: dict[str, Any] = json.loads(self._error_path(unit).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return record

    def forget_failure(self, unit: Unit) -> None:
        with suppress(OSError):
            self._error_path(unit).unlink(missing_ok=True)

    @contextmanager
    def locked(self, unit: Unit) -> Iterator[bool]:
        """Whether no other living process computes the unit; until the end none will.

        Raises:
            InputError: the folder cannot be written.
        """
        path = self.folder / f".{unit.digest}.lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = lock(path)
        except OSError as error:
            raise InputError(
                f"cannot write {path} ({error.strerror or error}); free space there or choose "
                "another folder"
            ) from error
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                unlock(path, descriptor)

    def _path(self, unit: Unit) -> Path:
        return self.folder / f"{unit.digest}.safetensors"

    def _error_path(self, unit: Unit) -> Path:
        return self.folder / f"{unit.digest}.error.json"


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
