"""Distances between classes that were measured before, on disk, one entry per pair of classes.

An entry is found by the content of its two classes and by the recipe, the method with its
parameters: a dataset that is compared with a second and then with a third one is measured within
itself once. All entries are in one SQLite database, so that many of them are read at once, several
processes may write at the same time, and a run that is killed leaves whole entries only. A database
that cannot be used is said once and then left alone; it never stops a run.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from otdd_flash.labels.pairs import PairDistances

# Part of the file's name: a database of another layout, or with numbers that a method would compute
# in another way today, is never read.
ENTRY_FORMAT = 1
FILE = f"class_distances.{ENTRY_FORMAT}.sqlite3"

# How long to wait while other processes write.
BUSY_SECONDS = 60.0
ROWS_AT_ONCE = 100_000

# Numbers stand for recipes and for classes: two small ones instead of two long hashes per pair. The
# rows of one class are side by side, so that all pairs of a table are read in a few sweeps.
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS recipes (id INTEGER PRIMARY KEY, content TEXT UNIQUE NOT NULL)",
    "CREATE TABLE IF NOT EXISTS classes (id INTEGER PRIMARY KEY, content BLOB UNIQUE NOT NULL)",
    "CREATE TABLE IF NOT EXISTS pairs (recipe INTEGER NOT NULL, first INTEGER NOT NULL, "
    "second INTEGER NOT NULL, value REAL NOT NULL, lower REAL NOT NULL, upper REAL NOT NULL, "
    "PRIMARY KEY (recipe, first, second)) WITHOUT ROWID",
)
FIND = (
    "SELECT first.place, second.place, value, lower, upper FROM wanted AS first "
    "JOIN pairs ON recipe = (SELECT id FROM recipes WHERE content = ?) AND pairs.first = first.id "
    "JOIN wanted AS second ON pairs.second = second.id"
)
KEEP = "INSERT OR IGNORE INTO pairs VALUES (?, ?, ?, ?, ?, ?)"

logger = logging.getLogger(__name__)


class PairCache:
    """Distances of pairs of classes, in one database.

    Args:
        cache_dir: the database's folder, made on the first write; `~` is expanded. None turns the
            cache off.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] | None) -> None:
        self._path = None if cache_dir is None else Path(cache_dir).expanduser() / FILE

    @property
    def active(self) -> bool:
        """Whether entries can be found or kept; False after a failure of the database."""
        return self._path is not None

    def find(
        self, recipe: str, classes: Sequence[bytes], pairs: Tensor
    ) -> tuple[Tensor, PairDistances]:
        """What is known of some pairs.

        Args:
            recipe: the method and all that its numbers depend on, other than the classes.
            classes: V fingerprints.
            pairs: (P, 2) int64, which of the classes.

        Returns:
            The positions (K,) of the known pairs in the list, ascending, and their distances.
        """
        numbers = np.full((len(pairs), 3), np.nan)
        place = np.full((len(classes), len(classes)), -1)
        place[tuple(pairs.T.numpy())] = np.arange(len(pairs))
        with self._stepping_aside("read"):
            for rows in self._read(recipe, classes):
                positions = place[tuple(rows[:, :2].astype(np.int64).T)]
                numbers[positions[positions >= 0]] = rows[positions >= 0, 2:]
        known = torch.from_numpy(np.flatnonzero(~np.isnan(numbers[:, 0])))
        return known, PairDistances(*torch.from_numpy(numbers)[known].unbind(1))

    def keep(
        self, recipe: str, classes: Sequence[bytes], pairs: Tensor, distances: PairDistances
    ) -> None:
        """Write the distances of pairs (P, 2); arguments as for `find`. Known pairs stay."""
        numbers = torch.stack(distances, 1)
        finite = torch.isfinite(numbers).all(1)
        pairs, numbers = pairs[finite], numbers[finite]
        with self._stepping_aside("write"):
            if self._path is None or not len(pairs):
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _opened(self._path) as database:
                database.execute("BEGIN IMMEDIATE")
                for statement in SCHEMA:
                    database.execute(statement)
                (recipe_id,) = _numbered(database, "recipes", [recipe])
                used = torch.unique(pairs).tolist()
                ids = np.full(len(classes), -1)
                ids[used] = _numbered(database, "classes", [classes[index] for index in used])
                first, second = ids[pairs.T.numpy()].tolist()
                rows = zip(first, second, *numbers.T.tolist(), strict=True)
                database.executemany(KEEP, ((recipe_id, *row) for row in rows))
                database.execute("COMMIT")

    def _read(self, recipe: str, classes: Sequence[bytes]) -> Iterator[np.ndarray]:
        """Rows (first, second, value, lower, upper) of all known pairs of these classes."""
        if self._path is None or not self._path.exists():
            return
        with _opened(self._path) as database:
            tables = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'pairs'")
            if tables.fetchone() == (0,):
                # Another process is about to write the first entries.
                return
            database.execute("PRAGMA temp_store = MEMORY")
            database.execute("BEGIN")
            database.execute("CREATE TEMP TABLE wanted (id INTEGER PRIMARY KEY, place INTEGER)")
            database.executemany(
                "INSERT INTO wanted SELECT id, ? FROM classes WHERE content = ?",
                enumerate(classes),
            )
            found = database.execute(FIND, (recipe,))
            while rows := found.fetchmany(ROWS_AT_ONCE):
                yield np.array(rows, dtype=np.float64)

    @contextmanager
    def _stepping_aside(self, action: str) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            logger.warning(
                "cannot %s the class distances in %s (%s); going on without them. Free space "
                "there, delete the file if it is damaged, or choose another folder with "
                "cache_dir=DIR (cache_dir=null turns the cache off)",
                action,
                self._path,
                error,
            )
            self._path = None


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that leaves transactions to its user; what is not committed is undone."""
    database = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        yield database
    finally:
        database.close()


def _numbered(
    database: sqlite3.Connection, table: str, contents: Sequence[str | bytes]
) -> list[int]:
    """The numbers that stand for contents, new ones where they are not known yet."""
    database.executemany(
        f"INSERT OR IGNORE INTO {table} (content) VALUES (?)", ((content,) for content in contents)
    )
    query = f"SELECT id FROM {table} WHERE content = ?"
    return [database.execute(query, (content,)).fetchone()[0] for content in contents]
