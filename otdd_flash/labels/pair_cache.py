"""The cache of measured class distances: one SQLite database, one row per pair of classes.

A row is keyed by the content of its two classes and by the recipe, that is the method with its
parameters. So a dataset that is compared with a second and then with a third one is measured within
itself once. One database lets many rows be read at once. Several processes may use it: their writes
wait for each other, up to `BUSY_SECONDS`. A killed run leaves only complete rows.

`labels.measuring` is the only caller, through one `PairCache` for each list of pairs. The cache
never stops a run: a damaged database is renamed and begun anew; an unusable one is reported once,
and this process does not use it again (`UNUSABLE`).

A change of the layout, or of a method's numbers, must raise ENTRY_FORMAT, which is part of the
file's name, so that old distances are not read as new ones. Every row carries a checksum that is
verified when it is read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash import __version__
from otdd_flash.checks import path
from otdd_flash.files.cache import check_owner, make_folder, share_as_folder
from otdd_flash.labels.pairs import PairDistances

# Part of the file's name: a database of another layout, or with numbers that a method would compute
# differently today, is never read.
ENTRY_FORMAT = 3

FILE = f"class_distances.{ENTRY_FORMAT}.sqlite3"

ROWS_AT_ONCE = 100_000

FIND = (
    "SELECT first.place, second.place, value, lower, upper, checksum FROM wanted AS first "
    "JOIN pairs ON recipe = (SELECT id FROM recipes WHERE content = ?) AND pairs.first = first.id "
    "JOIN wanted AS second ON pairs.second = second.id"
)

PLACES, NUMBERS = ("first", "second"), ("value", "lower", "upper")

ROW = np.dtype(
    [*((name, "i8") for name in PLACES), *((name, "f8") for name in NUMBERS), ("checksum", "i8")]
)

KEEP = "INSERT OR IGNORE INTO pairs VALUES (?, ?, ?, ?, ?, ?, ?)"

# Databases that this process could not use, and whether to "write", or to "read", which ends both.
# A run measures table after table, and each would wait and warn again.
UNUSABLE: set[tuple[Path, str]] = set()

T = TypeVar("T")

# Indices of the two classes (P, 2), and value and bounds (P, 3).
Rows = tuple[NDArray[Any], NDArray[Any]]

logger = logging.getLogger(__name__)


class PairCache:
    """Distances of pairs of classes in one database.

    Args:
        cache_dir: the database's folder, made on the first write.

    Attributes:
        path: of the database.
    """

    def __init__(self, cache_dir: str | os.PathLike[str]) -> None:
        self.path = Path(path("cache_dir", cache_dir)) / FILE
        # Messages name the path as it was given.
        self._place = self.path.absolute()

    def find(
        self, recipe: str, classes: Sequence[bytes], pairs: Tensor
    ) -> tuple[Tensor, PairDistances]:
        """Look up the distances of pairs of classes.

        Args:
            recipe: the method with all parameters that its numbers depend on.
            classes: V fingerprints.
            pairs: (P, 2) int64, indices of the classes.

        Returns:
            The positions (K,) of the known pairs in the list, ascending, and their distances, on
            the device of `pairs`.
        """
        numbers = np.full((len(pairs), 3), np.nan)
        place = np.full((len(classes), len(classes)), -1)
        place[tuple(pairs.T.cpu().numpy())] = np.arange(len(pairs))
        found = self._attempt("read", lambda path: _read(path, recipe, classes)) or []
        for ends, rows in found:
            positions = place[tuple(ends.T)]
            numbers[positions[positions >= 0]] = rows[positions >= 0]
        known = torch.from_numpy(np.flatnonzero(~np.isnan(numbers[:, 0])))
        distances = torch.from_numpy(numbers)[known].T.to(pairs.device)
        return known.to(pairs.device), PairDistances(*distances)

    def keep(
        self, recipe: str, classes: Sequence[bytes], pairs: Tensor, distances: PairDistances
    ) -> None:
        """Write the distances of pairs (P, 2), arguments as for `find`; keep rows that exist.

        Distances that are not finite are left out.
        """
        numbers = torch.stack(distances, 1).double()
        finite = torch.isfinite(numbers).all(1)
        pairs, numbers = pairs[finite].cpu(), numbers[finite].cpu()
        if len(pairs):
            self._attempt(
                "write",
                lambda path: _write(path, recipe, classes, pairs.numpy(), numbers.numpy()),
            )

    def _attempt(self, action: str, step: Callable[[Path], T]) -> T | None:
        """Run `step` on the database: once more after damage, never again after another failure.

        Returns:
            The result of `step`, or None if there is no usable database.
        """
        for _ in range(2):
            if {(self._place, "read"), (self._place, action)} & UNUSABLE:
                return None
            try:
                return step(self.path)
            except FAILURES as error:
                if is_damage(error):
                    self._set_aside(error)
                else:
                    self._step_aside(action, error)
        return None

    def _set_aside(self, error: Exception) -> None:
        try:
            aside = set_aside(self.path)
        except OSError as unwritable:
            self._step_aside("replace", unwritable)
            return
        logger.warning(
            "the class distances in %s are damaged (%s); measuring them again, the damaged ones "
            "are kept as %s",
            self.path,
            error,
            aside.name,
        )

    def _step_aside(self, action: str, error: Exception) -> None:
        reason = f"held by another process for {BUSY_SECONDS:g} s" if is_busy(error) else error
        logger.warning(
            "cannot %s the class distances in %s (%s); this process goes on without them. Correct "
            "that, or choose another folder with cache_dir=DIR (cache_dir=null turns the cache "
            "off)",
            action,
            self.path,
            reason,
        )
        UNUSABLE.add((self._place, "write" if action == "write" else "read"))


def _read(path: Path, recipe: str, classes: Sequence[bytes]) -> list[Rows]:
    """Read all known pairs of these classes, in parts.

    Raises:
        DamagedRowError: a row does not match its checksum, or holds impossible numbers.
    """
    check_owner(path)
    if not path.exists():
        others = path.parent.glob(FILE.replace(f".{ENTRY_FORMAT}.", ".*."))
        if names := sorted(other.name for other in others):
            logger.warning(
                "%s in %s is of another format, and otdd_flash %s reads %s; measuring again",
                names[-1],
                path.parent,
                __version__,
                FILE,
            )
        return []
    with closing(_connection(path)) as database:
        return list(_rows(database, path, recipe, classes))


def _rows(
    database: sqlite3.Connection, path: Path, recipe: str, classes: Sequence[bytes]
) -> Iterator[Rows]:
    database.execute("PRAGMA temp_store = MEMORY")
    database.execute("BEGIN")
    tables = "SELECT count(*) FROM sqlite_master WHERE name = 'pairs'"
    if patiently(database, path, tables).fetchone() == (0,):
        # Another process has created the file and not yet written to it.
        return
    database.execute("CREATE TEMP TABLE wanted (id INTEGER PRIMARY KEY, place INTEGER)")
    database.executemany(
        "INSERT INTO wanted SELECT id, ? FROM classes WHERE content = ?", enumerate(classes)
    )
    found = database.execute(FIND, (recipe,))
    while fetched := found.fetchmany(ROWS_AT_ONCE):
        rows = np.array(fetched, ROW)
        ends, numbers = (np.stack([rows[name] for name in part], 1) for part in (PLACES, NUMBERS))
        if (rows["checksum"] != checksums(recipe, classes, ends, numbers)).any():
            raise DamagedRowError("a checksum does not match")
        if not (np.isfinite(numbers).all() and (numbers[:, 1] <= numbers[:, 2]).all()):
            raise DamagedRowError("it holds what was never measured")
        yield ends, numbers


def _write(
    path: Path,
    recipe: str,
    classes: Sequence[bytes],
    pairs: NDArray[Any],
    numbers: NDArray[Any],
) -> None:
    make_folder(path.parent)
    check_owner(path)
    if not path.exists():
        # An empty file is an empty database. SQLite would give it the mode of any new file.
        path.touch(mode=0o600)
        share_as_folder(path)
    with closing(_connection(path)) as database:
        patiently(database, path, "BEGIN IMMEDIATE")
        for statement in SCHEMA:
            database.execute(statement)
        (recipe_id,) = numbered(database, "recipes", [recipe])
        used = np.unique(pairs).tolist()
        ids = np.full(len(classes), -1)
        ids[used] = numbered(database, "classes", [classes[index] for index in used])
        columns = (*ids[pairs.T], *numbers.T, checksums(recipe, classes, pairs, numbers))
        rows = zip(*(column.tolist() for column in columns), strict=True)
        database.executemany(KEEP, ((recipe_id, *row) for row in rows))
        patiently(database, path, "COMMIT")


# Seconds to wait for another process's lock: without a message, and in all.
SILENT_SECONDS = 0.5

BUSY_SECONDS = 5.0

# Integers replace recipes and classes: two small numbers instead of two long hashes per pair. The
# rows of one class are adjacent, so that all pairs of a table are read in a few sweeps.
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS recipes (id INTEGER PRIMARY KEY, content TEXT UNIQUE NOT NULL)",
    "CREATE TABLE IF NOT EXISTS classes (id INTEGER PRIMARY KEY, content BLOB UNIQUE NOT NULL)",
    "CREATE TABLE IF NOT EXISTS pairs (recipe INTEGER NOT NULL, first INTEGER NOT NULL, "
    "second INTEGER NOT NULL, value REAL NOT NULL, lower REAL NOT NULL, upper REAL NOT NULL, "
    "checksum INTEGER NOT NULL, PRIMARY KEY (recipe, first, second)) WITHOUT ROWID",
)

# Odd, so that multiplication by it modulo 2^64 is invertible; otherwise arbitrary.
BASE = np.uint64(0x9E3779B97F4A7C15)

# Primary codes of SQLite for failures of the disk, other processes or rights, not of the content.
CIRCUMSTANCES = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in (
        *("BUSY", "LOCKED", "READONLY", "CANTOPEN", "FULL", "IOERR", "PERM", "AUTH", "NOMEM"),
        *("INTERRUPT", "PROTOCOL", "NOLFS", "TOOBIG"),
    )
)

# Errors that SQLite and the conversion of rows raise on a damaged database.
FAILURES = (OSError, sqlite3.Error, ValueError, TypeError, OverflowError)


class DamagedRowError(ValueError):
    """A row does not match its checksum, or holds impossible numbers."""


def _connection(path: Path) -> sqlite3.Connection:
    """Return a connection without automatic transactions: uncommitted writes are rolled back."""
    return sqlite3.connect(path, timeout=SILENT_SECONDS, isolation_level=None)


def patiently(database: sqlite3.Connection, path: Path, statement: str) -> sqlite3.Cursor:
    """Execute a statement that another process's lock may delay, with a warning before a long wait.

    Raises:
        sqlite3.OperationalError: the database is still locked after `BUSY_SECONDS`.
    """
    try:
        return database.execute(statement)
    except sqlite3.OperationalError as error:
        if not is_busy(error):
            raise
        logger.warning(
            "another process holds the class distances in %s; waiting for at most %g s",
            path,
            BUSY_SECONDS,
        )
        remaining = max(BUSY_SECONDS - SILENT_SECONDS, 0)
        database.execute(f"PRAGMA busy_timeout = {round(1000 * remaining)}")
        return database.execute(statement)


def is_busy(error: BaseException) -> bool:
    """Return whether another process's lock is the cause."""
    return _primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_damage(error: BaseException) -> bool:
    """Return whether the content of the file is the cause, not its circumstances."""
    return not isinstance(error, OSError) and _primary_code(error) not in CIRCUMSTANCES


def numbered(
    database: sqlite3.Connection, table: str, contents: Sequence[str | bytes]
) -> list[int]:
    """Return the integer ids of contents in a table; new contents get new ids."""
    database.executemany(
        f"INSERT OR IGNORE INTO {table} (content) VALUES (?)", ((content,) for content in contents)
    )
    query = f"SELECT id FROM {table} WHERE content = ?"
    return [database.execute(query, (content,)).fetchone()[0] for content in contents]


def checksums(
    recipe: str, classes: Sequence[bytes], pairs: NDArray[Any], numbers: NDArray[Any]
) -> NDArray[np.int64]:
    """Compute one checksum per row, over its key and its numbers.

    It is a polynomial modulo 2^64 with an odd base in six words of 64 bits. A change of one word
    always changes it; a random change of several words leaves it with probability 2^-64.

    Args:
        recipe: the method with its parameters.
        classes: V fingerprints of at least 8 bytes.
        pairs: (P, 2) int64, indices of the classes.
        numbers: (P, 3) float64, value and bounds.
    """
    heads = np.frombuffer(b"".join(content[:8] for content in classes), np.uint64)
    head = np.frombuffer(hashlib.sha256(recipe.encode()).digest()[:8], np.uint64)
    # Adding 0 removes the sign of zero, which SQLite does not store.
    bits = np.ascontiguousarray(numbers.T + 0.0).view(np.uint64)
    total = np.broadcast_to(head, len(pairs))
    for word in (*heads[pairs.T], *bits):
        total = total * BASE + word
    return total.view(np.int64)


def set_aside(path: Path) -> Path:
    """Rename a damaged database and its journals, so that a new one can be begun.

    Returns:
        The new path; an earlier file of that name is replaced.

    Raises:
        OSError: the folder cannot be written.
    """
    aside = path.with_name(f"{path.name}.damaged")
    # Journals first: SQLite would replay them into a new database.
    for ending in ("-journal", "-wal", "-shm", ""):
        # Another process may have renamed it before.
        with suppress(FileNotFoundError):
            os.replace(f"{path}{ending}", f"{aside}{ending}")
    return aside


def _primary_code(error: BaseException) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
