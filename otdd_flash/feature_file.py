"""Features that stay in files: a matrix that looks like a tensor and is read as it is used.

A .npy array, a matrix of a .safetensors file or a column of Arrow files. One that lies in one piece
is mapped into memory, so that any operation on the tensor reads what it touches. A column in record
batches has no address of its own: rows that are taken from it are read, its largest entry is found
block by block, and any other operation reads all of it. Long passes read blocks of rows from the
files themselves (`FeatureFile.read`). A file that is shorter than it says, or that changes while it
is open, is an error in one sentence.
"""

from __future__ import annotations

import math
import os
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash import arguments
from otdd_flash.checks import takes
from otdd_flash.errors import InputError
from otdd_flash.feature_layout import Matrix, Piece, matrix_of

if TYPE_CHECKING:
    from datasets import Dataset

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
        """That of a file as it is now."""
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
        """The same files as another process finds them.

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

    @property
    def features(self) -> Tensor:
        """(n, d), as `features_file` gives them."""
        if len(self.matrix.pieces) > 1:
            return ScatteredFeatures.of(self)
        features = self.mapped().as_subclass(FileFeatures)
        features.file = self
        return features

    def check(self) -> None:
        """Refuse files that are others than when they were opened.

        Raises:
            InputError: as said.
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
        """Fill `out` (k, d), on the CPU, with rows (k,) int64 in any order."""
        self.check()
        count = self._firsts[-1]
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
            raise IndexError(f"row {int(rows.max())} of {count}")
        if len(self.matrix.pieces) == 1:
            return torch.index_select(self.mapped(), 0, rows, out=out)
        order = torch.argsort(rows)
        wanted = rows[order]
        cuts = torch.searchsorted(wanted, torch.tensor(self._firsts)).tolist()
        for place, (piece, first) in enumerate(zip(self.matrix.pieces, self._firsts, strict=False)):
            here = slice(cuts[place], cuts[place + 1])
            if here.start < here.stop:
                out[order[here]] = self._mapped(piece)[wanted[here] - first]
        return out

    def mapped(self) -> Tensor:
        """All of one piece, mapped into memory; what is written to it stays in memory."""
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
        """Some rows (k, d), read."""
        shape = max(0, rows.stop - rows.start), self.matrix.columns
        out = torch.empty(shape, dtype=self.matrix.dtype)
        self.read(rows, out)
        return out


class FileFeatures(Tensor):
    """A matrix that knows its files; what operations make of it are plain tensors.

    Attributes:
        file: where it is.
    """

    file: FeatureFile

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Other processes read the files."""
        return _reopened, (self.file,)


class ScatteredFeatures(FileFeatures):
    """A matrix in several pieces, which are read when an operation needs them."""

    @staticmethod
    def of(file: FeatureFile) -> ScatteredFeatures:
        """A tensor without memory of its own."""
        make: Any = Tensor._make_wrapper_subclass
        found: ScatteredFeatures = make(
            ScatteredFeatures, file.matrix.shape, dtype=file.matrix.dtype, device="cpu"
        )
        found.file = file
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ScatteredFeatures({self.file.matrix.shape}, {self.file.matrix.dtype})"

    def numpy(self, *, force: bool = False) -> Any:
        """All of it, read."""
        return self.file.rows(slice(0, self.shape[0])).numpy(force=force)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Rows that are taken, and the largest entry, without reading all of it."""
        one = args[0]
        aten = torch.ops.aten
        if isinstance(one, ScatteredFeatures):
            file, count = one.file, one.file.matrix.shape[0]
            match function, args[1:]:
                case aten.detach.default | aten.alias.default, _:
                    return ScatteredFeatures.of(file)
                case aten.slice.Tensor, (0, start, stop, *step) if step in ([], [1]):
                    start, stop, _ = slice(start, stop).indices(count)
                    return file.rows(slice(start, max(start, stop)))
                case aten.index.Tensor, ([Tensor() as rows],) if rows.dtype == torch.int64:
                    rows = torch.where(rows < 0, rows + count, rows).cpu()
                    return file.take(rows, torch.empty(len(rows), one.shape[1], dtype=one.dtype))
                case aten.linalg_vector_norm.default, (math.inf,):
                    norms = [function(file.rows(rows), math.inf) for rows in file.blocks()]
                    return torch.stack(norms).amax()

        def read(given: Any) -> Any:
            whole = isinstance(given, ScatteredFeatures)
            return given.file.rows(slice(0, given.shape[0])) if whole else given

        args, kwargs = torch.utils._pytree.tree_map(read, (args, kwargs or {}))
        return function(*args, **kwargs)


@takes(arguments.FEATURES_FILE)
def features_file(path: str | os.PathLike[str] | Dataset, *, key: str | None = None) -> Tensor:
    """Features (n, d) in files, to be given wherever features are, that are not read at once.

    Args:
        path: a .npy or .safetensors file with a matrix of floating-point numbers; an .arrow file or
            a folder of `Dataset.save_to_disk` with a column of lists of one length; or a
            `datasets.Dataset` that lies in such files.
        key: the name of the matrix in a .safetensors file, or of the column; needed if there are
            several.

    Returns:
        (n, d), mapped into memory or read as it is used. Distances stream it to the device in
        blocks of rows where it does not fit there.

    Raises:
        InputError: there is no such file or matrix, it is truncated or damaged, or its type is
            another.
    """
    given = Path(path).expanduser() if isinstance(path, str | os.PathLike) else path
    return FeatureFile(given, key).features


def _reopened(file: FeatureFile) -> Tensor:
    return file.reopened().features
