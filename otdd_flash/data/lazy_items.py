"""A sequence whose items are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


class LazyItems(Sequence[Any]):
    """Items fetched one at a time by row number; a slice gives a list.

    Args:
        fetch: reads the item at one row.
        rows: (n,) the rows of which this sequence consists, in order.
        files: the file behind each row number, where every item is one file.
    """

    def __init__(
        self,
        fetch: Callable[[int], Any],
        rows: NDArray[np.int64],
        files: Sequence[str] | None = None,
    ) -> None:
        self._fetch = fetch
        self._rows = rows
        self._files = files

    @property
    def paths(self) -> list[str] | None:
        """The n files of the items, or None where items are not files."""
        if self._files is None:
            return None
        return [self._files[row] for row in self._rows.tolist()]

    @classmethod
    def chain(cls, parts: Sequence[Sequence[Any] | NDArray[Any]]) -> LazyItems:
        """Several sequences read one after the other."""
        ends = np.cumsum([len(part) for part in parts])
        return cls(_Chained(parts, ends), np.arange(int(ends[-1])))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._fetch(row) for row in self._rows[index].tolist()]
        return self._fetch(int(self._rows[index]))

    def take(self, rows: NDArray[np.int64]) -> LazyItems:
        """The items at these positions, still unread."""
        return LazyItems(self._fetch, self._rows[rows], self._files)


@dataclass(frozen=True)
class _Chained:
    """Reads the items of several sequences, of which each ends before `ends`."""

    parts: Sequence[Sequence[Any] | NDArray[Any]]
    ends: NDArray[np.int64]

    def __call__(self, row: int) -> Any:
        part = int(np.searchsorted(self.ends, row, side="right"))
        start = 0 if part == 0 else int(self.ends[part - 1])
        return self.parts[part][row - start]
