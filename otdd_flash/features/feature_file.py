"""Matrices of features in files: where their rows are, and how they are read.

`matrix_of` locates a matrix in a .npy or .safetensors file, or a column of Arrow files
(`features.arrow_column`), as a `Matrix` of `Piece`s: rows that are contiguous in a file.
`FeatureFile` reads them: long passes read blocks of rows (`read`), a few rows in any order come
from memory-mapped files (`take`). `features.file_features` wraps it in a tensor, and
`operators.sharing` sends it to other ranks.

A change must never return rows of another file: a file that is truncated, or that changes while it
is open, raises an `InputError`. The stamps of all files are checked after every read.
"""

from __future__ import annotations

import json
import math
import os
from itertools import accumulate
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.errors import InputError

# Bytes of a block in a pass over the whole matrix.
BLOCK_BYTES = 1 << 24


class Stamp(NamedTuple):
    """The identity of a file's content: device, inode, size and time of change."""

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
        key: the matrix, if there are several.

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
        # Memory maps belong to this process.
        return {**self.__dict__, "_maps": {}}

    def reopened(self) -> FeatureFile:
        """Check, after unpickling in another process, that the files are the same there.

        Raises:
            InputError: a file is missing, or is another one.
        """
        for path, stamp in self._stamps.items():
            try:
                found = Stamp.of(path)
            except OSError as error:
                raise InputError(
                    f"another process cannot read {path} ({error.strerror or error}); features in "
                    "files have to be there for every process of compute.group"
                ) from None
            # Device and inode numbers differ between machines.
            if found[2:] != stamp[2:]:
                raise InputError(
                    f"{path} is another file for another process of compute.group; give all of "
                    "them the same"
                )
            self._stamps[path] = found
        return self

    def check(self) -> None:
        """Refuse files that changed since they were opened.

        Raises:
            InputError: a file has changed or is missing.
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
        """Read rows into `out`, which is contiguous on the CPU.

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
        # Checked first: touching mapped memory of a file that became shorter would kill the
        # process.
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
        """Return slices of all rows, each of about BLOCK_BYTES."""
        count, size = self._firsts[-1], max(1, BLOCK_BYTES // self.matrix.row_bytes)
        return [slice(first, min(first + size, count)) for first in range(0, count, size)]

    def rows(self, rows: slice) -> Tensor:
        """Read some rows (k, d)."""
        shape = max(0, rows.stop - rows.start), self.matrix.columns
        out = torch.empty(shape, dtype=self.matrix.dtype)
        self.read(rows, out)
        return out


# Types of safetensors and NumPy in which features may be stored.
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

NUMPY_TYPES = {"<f8": torch.float64, "<f4": torch.float32, "<f2": torch.float16}

# A longer header is a sign of damage.
MOST_HEADER = 100 << 20


def matrix_of(given: Any, key: str | None) -> Matrix:
    """Locate the matrix of a file, a folder or a `datasets.Dataset`.

    Args:
        given: a path, or the dataset.
        key: the matrix, if there are several: a name in a .safetensors file, a column of a dataset.

    Raises:
        InputError: there is no such file or matrix, or it is damaged.
    """
    if not isinstance(given, Path):
        # Imported here, as it imports pyarrow.
        from otdd_flash.features.arrow_column import matrix_of_dataset

        return matrix_of_dataset(given, key)
    try:
        if given.is_dir() or given.suffix.lower() == ".arrow":
            from otdd_flash.features.arrow_column import matrix_of_arrow

            return matrix_of_arrow(given, key)
        with given.open("rb") as stream:
            return _matrix(given, stream, key)
    except OSError as error:
        raise InputError(f"cannot read {given}: {error.strerror or error}") from None


def _matrix(path: Path, stream: Any, key: str | None) -> Matrix:
    match path.suffix.lower():
        case ".npy":
            return _of_npy(path, stream)
        case ".safetensors":
            return _of_safetensors(path, stream, key)
    raise InputError(
        f"features are read from .npy, .safetensors and .arrow files and from folders of "
        f"Dataset.save_to_disk, got {path}"
    )


def _of_npy(path: Path, stream: Any) -> Matrix:
    try:
        version = np.lib.format.read_magic(stream)
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        shape, by_columns, dtype = read[version[0]](stream)
    except (ValueError, KeyError, SyntaxError, TokenError) as error:
        raise InputError(f"{path} is no .npy file, or a damaged one ({error})") from None
    if dtype.str not in NUMPY_TYPES or (by_columns and len(shape) == 2 and 1 not in shape):
        order = " by columns" if by_columns else ""
        raise InputError(
            f"{path} holds {dtype}{order}; features are read from float16, float32 or float64 rows"
        )
    return _checked(path, shape, NUMPY_TYPES[dtype.str], stream.tell())


def _of_safetensors(path: Path, stream: Any, key: str | None) -> Matrix:
    try:
        length = int.from_bytes(stream.read(8), "little")
        if length > MOST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = {name: _Entry.of(entry) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no .safetensors file, or a damaged one ({error})") from None
    names = ", ".join(sorted(entries))
    if key is None and len(entries) != 1:
        raise InputError(f"{path} holds {names or 'nothing'}; say which matrix with key=")
    if key is not None and key not in entries:
        raise InputError(f"{path} has no {key!r}; it holds {names}")
    dtype, shape, first, end = entries[key or names]
    if dtype not in TYPES:
        raise InputError(f"{path} holds {dtype}; features are read from {', '.join(TYPES)}")
    if end - first != math.prod(shape) * TYPES[dtype].itemsize:
        raise InputError(
            f"{path} is damaged: its header gives {end - first} bytes to numbers of shape "
            f"{shape}; write it again"
        )
    return _checked(path, shape, TYPES[dtype], 8 + length + first)


class _Entry(NamedTuple):
    """A tensor's entry in the header of a .safetensors file; bytes count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    end: int

    @classmethod
    def of(cls, entry: Any) -> _Entry:
        """Read an entry of the JSON header; wrong types or values raise Python's own errors."""
        shape, (first, end) = tuple(entry["shape"]), entry["data_offsets"]
        numbers = *shape, first, end
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"the numbers {numbers}")
        return cls(str(entry["dtype"]), shape, first, end)


def _checked(path: Path, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Matrix:
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{path} holds an array of shape {shape}; features are a matrix (n, d)")
    if offset % dtype.itemsize:
        raise InputError(
            f"the numbers of {path} are not aligned; write it with a newer safetensors"
        )
    found = Matrix(shape[1], dtype, (Piece(path, offset, shape[0]),))
    end, size = offset + shape[0] * found.row_bytes, path.stat().st_size
    if size < end:
        raise InputError(
            f"{path} is truncated: its header promises {end} bytes and it has {size}; write it "
            "again"
        )
    return found


class Piece(NamedTuple):
    """Rows that are contiguous in a file, from a byte offset on."""

    path: Path
    offset: int
    rows: int


class Matrix(NamedTuple):
    """The location of a matrix (n, d) in files.

    Attributes:
        columns: d.
        dtype: type of its numbers.
        pieces: its rows in order.
    """

    columns: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(piece.rows for piece in self.pieces), self.columns

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize
