"""Files that hold a matrix of features: where its rows are, read and mapped, and never others.

Long passes read blocks of rows (`read`), few rows of any place come from memory that the files are
mapped into (`take`). A file that is shorter than it says, or that changes while it is open, is an
error in one sentence.
"""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.features.layout import matrix_of
from otdd_flash.features.pieces import Matrix, Piece

# Bytes that are read at once where a matrix is looked through.
BLOCK_BYTES = 1 << 24


class Stamp(NamedTuple):
    """What changes with the content of a file."""

    device: int
    inode: int
    size: int
    changed: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        found = os.stat(path)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class FeatureFile:
    """A matrix (n, d) in files.

    Args:
        given: a file, a folder or a `datasets.Dataset`.
        key: which matrix of several.

    Raises:
        InputError: there is no such file or matrix, or it is truncated or damaged.
    """

    def __init__(self, given: Any, key: str | None) -> None:
        self.matrix: Matrix = matrix_of(given, key)
        self._stamps = {
            path: Stamp.of(path) for path in dict.fromkeys(p.path for p in self.matrix.pieces)
        }
        self._maps: dict[Path, Any] = {}
        # The first row of each piece, and the number of rows.
        self._firsts = [0, *accumulate(piece.rows for piece in self.matrix.pieces)]

    def __getstate__(self) -> dict[str, Any]:
        # Memory is of this process.
        return {**self.__dict__, "_maps": {}}

    def reopened(self) -> FeatureFile:
        """Open the same files in another process.

        Raises:
            InputError: one is not there, or is another.
        """
        for path, stamp in self._stamps.items():
            try:
                found = Stamp.of(path)
            except OSError as error:
                raise InputError(
                    f"another process cannot read {path} ({error.strerror or error}); features in "
                    "files have to be there for every process of compute.group"
                ) from None
            # Devices and inodes are numbered anew on every machine.
            if found[2:] != stamp[2:]:
                raise InputError(
                    f"{path} is another file for another process of compute.group; give all of "
                    "them the same"
                )
            self._stamps[path] = found
        return self

    def check(self) -> None:
        """Refuse files that are others than when they were opened.

        Raises:
            InputError: a file has changed, or is gone.
        """
        for path, stamp in self._stamps.items():
            try:
                same = Stamp.of(path) == stamp
            except OSError:
                same = False
            if not same:
                raise InputError(
                    f"{path} changed while it was in use; leave it alone until the run has ended, "
                    "and start again"
                )

    def read(self, rows: slice, out: Tensor) -> None:
        """Fill `out`, contiguous on the CPU, with some rows.

        Raises:
            InputError: a file changed, or cannot be read.
        """
        first = int(np.searchsorted(self._firsts, rows.start, "right")) - 1
        at = rows.start
        while at < rows.stop:
            stop = min(rows.stop, self._firsts[first + 1])
            part = out[at - rows.start : stop - rows.start]
            self._read(self.matrix.pieces[first], at - self._firsts[first], part)
            first, at = first + 1, stop
        self.check()

    def _read(self, piece: Piece, row: int, out: Tensor) -> None:
        buffer = memoryview(out.view(torch.uint8).numpy().data).cast("B")
        try:
            with piece.path.open("rb", buffering=0) as stream:
                stream.seek(piece.offset + row * self.matrix.row_bytes)
                done = 0
                while done < len(buffer) and (count := stream.readinto(buffer[done:])):
                    done += count
        except OSError as error:
            raise InputError(f"cannot read {piece.path}: {error.strerror or error}") from None

    def take(self, rows: Tensor, out: Tensor) -> Tensor:
        """Fill `out` (k, d), on the CPU, with rows (k,) int64 in any order.

        Raises:
            InputError: a file changed.
        """
        # Before, as memory that was mapped of a file that is shorter now must not be touched.
        self.check()
        self._take(rows, out)
        self.check()
        return out

    def _take(self, rows: Tensor, out: Tensor) -> None:
        count = self._firsts[-1]
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
            raise IndexError(f"row {int(rows.max())} of {count}")
        if len(self.matrix.pieces) == 1:
            torch.index_select(self.mapped(), 0, rows, out=out)
            return
        order = torch.argsort(rows)
        wanted = rows[order]
        cuts = torch.searchsorted(wanted, torch.tensor(self._firsts)).tolist()
        for place, (piece, first) in enumerate(zip(self.matrix.pieces, self._firsts, strict=False)):
            here = slice(cuts[place], cuts[place + 1])
            if here.start < here.stop:
                out[order[here]] = self._mapped(piece)[wanted[here] - first]

    def mapped(self) -> Tensor:
        """Map a matrix of one piece into memory; writing to it changes no file."""
        (piece,) = self.matrix.pieces
        return self._mapped(piece)

    def _mapped(self, piece: Piece) -> Tensor:
        if piece.path not in self._maps:
            self._maps[piece.path] = np.memmap(piece.path, np.uint8, "c")
        content = self._maps[piece.path][piece.offset :][: piece.rows * self.matrix.row_bytes]
        return torch.from_numpy(content).view(self.matrix.dtype).view(piece.rows, -1)

    def blocks(self) -> list[slice]:
        """All rows in blocks that are read at once."""
        count, size = self._firsts[-1], max(1, BLOCK_BYTES // self.matrix.row_bytes)
        return [slice(first, min(first + size, count)) for first in range(0, count, size)]

    def rows(self, rows: slice) -> Tensor:
        """Read some rows (k, d)."""
        shape = max(0, rows.stop - rows.start), self.matrix.columns
        out = torch.empty(shape, dtype=self.matrix.dtype)
        self.read(rows, out)
        return out
