"""The SQLite database of known class distances: rows, their checksums, and who waits for whom."""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Seconds for which another process's hold is waited out in silence, and in all.
SILENT_SECONDS = 0.5
BUSY_SECONDS = 5.0

# Numbers stand for recipes and for classes: two small ones instead of two long hashes per pair. The
# rows of one class are side by side, so that all pairs of a table are read in a few sweeps.
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS recipes (id INTEGER PRIMARY KEY, content TEXT UNIQUE NOT NULL)",
    "CREATE TABLE IF NOT EXISTS classes (id INTEGER PRIMARY KEY, content BLOB UNIQUE NOT NULL)",
    "CREATE TABLE IF NOT EXISTS pairs (recipe INTEGER NOT NULL, first INTEGER NOT NULL, "
    "second INTEGER NOT NULL, value REAL NOT NULL, lower REAL NOT NULL, upper REAL NOT NULL, "
    "checksum INTEGER NOT NULL, PRIMARY KEY (recipe, first, second)) WITHOUT ROWID",
)

# Odd, so that a product with it modulo 2^64 forgets nothing; otherwise arbitrary.
BASE = np.uint64(0x9E3779B97F4A7C15)

# Primary codes of SQLite that blame the disk, other processes or rights, not the content.
CIRCUMSTANCES = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in (
        *("BUSY", "LOCKED", "READONLY", "CANTOPEN", "FULL", "IOERR", "PERM", "AUTH", "NOMEM"),
        *("INTERRUPT", "PROTOCOL", "NOLFS", "TOOBIG"),
    )
)

# What a damaged database makes SQLite and the conversion of its rows raise.
FAILURES = (OSError, sqlite3.Error, ValueError, TypeError, OverflowError)

logger = logging.getLogger(__name__)


class DamagedRowError(ValueError):
    """A row does not match its checksum."""


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that leaves transactions to its user; what is not committed is undone."""
    database = sqlite3.connect(path, timeout=SILENT_SECONDS, isolation_level=None)
    try:
        yield database
    finally:
        database.close()


def patiently(database: sqlite3.Connection, path: Path, statement: str) -> sqlite3.Cursor:
    """Execute what another process may keep from being executed, saying so before a long wait.

    Raises:
        sqlite3.OperationalError: it still does after `BUSY_SECONDS`.
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
    """Whether another process's hold is the cause."""
    return _primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_damage(error: BaseException) -> bool:
    """Whether the content of the file is the cause, and not its circumstances."""
    return not isinstance(error, OSError) and _primary_code(error) not in CIRCUMSTANCES


def numbered(
    database: sqlite3.Connection, table: str, contents: Sequence[str | bytes]
) -> list[int]:
    """The numbers that stand for contents, new ones where they are not known yet."""
    database.executemany(
        f"INSERT OR IGNORE INTO {table} (content) VALUES (?)", ((content,) for content in contents)
    )
    query = f"SELECT id FROM {table} WHERE content = ?"
    return [database.execute(query, (content,)).fetchone()[0] for content in contents]


def checksums(
    recipe: str, classes: Sequence[bytes], pairs: NDArray[Any], numbers: NDArray[Any]
) -> NDArray[np.int64]:
    """One checksum per row, over what it is about and what it says.

    A polynomial modulo 2^64 with an odd base in six words of 64 bits: a change of any one of them
    changes it, and a random change of several leaves it with probability 2^-64.

    Args:
        recipe: the method with its parameters.
        classes: V fingerprints of at least 8 bytes.
        pairs: (P, 2) int64, which of the classes.
        numbers: (P, 3) float64, value and bounds.
    """
    heads = np.frombuffer(b"".join(content[:8] for content in classes), np.uint64)
    head = np.frombuffer(hashlib.sha256(recipe.encode()).digest()[:8], np.uint64)
    # SQLite keeps no sign of zero.
    bits = np.ascontiguousarray(numbers.T + 0.0).view(np.uint64)
    total = np.broadcast_to(head, len(pairs))
    for word in (*heads[pairs.T], *bits):
        total = total * BASE + word
    return total.view(np.int64)


def set_aside(path: Path) -> Path:
    """Rename a damaged database and its journals, out of the way of a new one.

    Returns:
        The name that it has now; an earlier one there is replaced.

    Raises:
        OSError: the folder cannot be written.
    """
    aside = path.with_name(f"{path.name}.damaged")
    # Journals first: beside a new database they would be played back into it.
    for ending in ("-journal", "-wal", "-shm", ""):
        # Another process may have been here before.
        with suppress(FileNotFoundError):
            os.replace(f"{path}{ending}", f"{aside}{ending}")
    return aside


def _primary_code(error: BaseException) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
