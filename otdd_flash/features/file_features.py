"""Features that stay in files: where their rows are, how they are read, and tensors of them.

`features_file` is public and opens a .npy array, a matrix of a .safetensors file or a column of
Arrow files. `file_of` locates it (Arrow files by `features.arrow_column`) as a `FeatureFile` of
`Piece`s: rows that are contiguous in a file. Passes over all rows read blocks of rows (`read`), a
few rows in any order come from memory-mapped files (`take`). A matrix in one piece is
memory-mapped, so that any operation reads what it touches (`FileFeatures`). A column in record
batches is not contiguous, so it cannot be one mapped tensor (`ScatteredFeatures`): a slice of
consecutive rows and rows by a tensor of int64 numbers read only those rows, the largest entry is
found block by block, and any other operation reads the whole matrix.

`extractors.feature_store` opens such tensors; `checks`, `samples`, `fingerprint`, `cost.points`,
`cost.host_points`, `operators.comparison`, `solver.tensors` and `flows.run` recognise them;
`operators.sharing` sends their files to other ranks (processes).

A change must keep three things (`tests/features/test_feature_file.py`). No row of another file is
returned: a file that is truncated, or changes while it is open, raises an `InputError`. The stamps
of all files are therefore checked after every `read`, and before and after every `take`; callers of
`mapped` check by themselves. Changes in place are refused, because they would not reach the files,
and passes over all rows read the files again. A change of a mapped matrix is found by the next
`check`; an operation that changes a scattered one raises itself. Pickling sends the names of files,
not their content.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import Word, takes
from otdd_flash.eager import computes
from otdd_flash.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

CHANGED = (
    "features in files cannot be changed in place, as they are read from there again; change a "
    "copy in memory, features[:].clone()"
)


class FileFeatures(Tensor):
    """A matrix with the files that hold it; results of operations are plain tensors.

    A detached or aliased `ScatteredFeatures` is a `ScatteredFeatures` again, no other result.

    Attributes:
        file: the matrix in its files.
    """

    file: FeatureFile

    # Results of operations do not get this class.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def check(self) -> None:
        """Refuse files that changed after they were opened, and a mapped matrix that was changed.

        The file does not have the changed numbers.

        Raises:
            InputError: a file or a number in memory has changed.
        """
        self.file.check()
        # Inference tensors count no changes, so theirs are not found.
        if not self.is_inference() and self._version > 0:
            raise InputError(CHANGED)

    def __deepcopy__(self, _: Any) -> Tensor:
        self.check()
        # The file's copy has memory maps of its own (`FeatureFile.__getstate__`).
        return features_of(copy(self.file))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the files' names; other processes read the files."""
        self.check()
        return _reopened, (self.file,)


class ScatteredFeatures(FileFeatures):
    """A matrix in several pieces, read when an operation needs them."""

    @staticmethod
    def of(file: FeatureFile) -> ScatteredFeatures:
        """Make a tensor without memory of its own."""
        make: Any = Tensor._make_wrapper_subclass
        found: ScatteredFeatures = make(
            ScatteredFeatures, file.shape, dtype=file.dtype, device="cpu"
        )
        found.file = file
        return found

    def __setitem__(self, *_: Any) -> None:
        raise InputError(CHANGED)

    # `tolist` and `numpy` do not reach `__torch_dispatch__`, and this tensor has no memory to
    # share.
    def tolist(self) -> Any:
        return self.numpy().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ScatteredFeatures({self.file.shape}, {self.file.dtype})"

    def numpy(self, *, force: bool = False) -> Any:
        return self.file.rows(slice(0, self.shape[0])).numpy(force=force)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read only the rows asked for, or blocks for the largest entry; for all else the whole.

        Raises:
            InputError: the operation writes to the matrix; the files would not change.
        """
        one = args[0]
        aten = torch.ops.aten
        if isinstance(one, ScatteredFeatures):
            file, count = one.file, one.file.shape[0]
            match function, args[1:]:
                case aten.detach.default | aten.alias.default, _:
                    return ScatteredFeatures.of(file)
                # Consecutive rows.
                case aten.slice.Tensor, (0, start, stop, *step) if step in ([], [1]):
                    start, stop, _ = slice(start, stop).indices(count)
                    return file.rows(slice(start, max(start, stop)))
                # Rows by number; negative numbers count from the end.
                case aten.index.Tensor, ([Tensor(dtype=torch.int64, ndim=1) as rows],):
                    rows = torch.where(rows < 0, rows + count, rows).cpu()
                    return file.take(rows, torch.empty(len(rows), one.shape[1], dtype=one.dtype))
                # `samples.largest_entry`.
                case aten.linalg_vector_norm.default, (math.inf,):
                    blocks = row_blocks(count, file.row_bytes)
                    norms = [function(file.rows(rows), math.inf) for rows in blocks]
                    return torch.stack(norms).amax()

        # Any other operation is computed from the whole matrix in memory.
        def read(given: Any) -> Any:
            whole = isinstance(given, ScatteredFeatures)
            return given.file.rows(slice(0, given.shape[0])) if whole else given

        if any(isinstance(given, ScatteredFeatures) for given in _written(function, args, kwargs)):
            raise InputError(CHANGED)
        args, kwargs = torch.utils._pytree.tree_map(read, (args, kwargs or {}))
        return function(*args, **kwargs)


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@takes()
def features_file(path: str | os.PathLike[str] | Dataset, *, key: Word | None = None) -> Tensor:
    """Open a feature matrix (n, d) in a file, without reading it into memory.

    Args:
        path: a .npy or .safetensors file with a matrix of floating-point numbers; an .arrow file or
            a folder of `Dataset.save_to_disk` with a column of lists of one length; or a
            `datasets.Dataset` that is stored in such files.
        key: the name of the matrix in a .safetensors file, or of the column; needed if there are
            several. A .npy file has none.

    Returns:
        (n, d), mapped into memory or read as it is used. Distances stream it to the device in
        blocks of rows if it does not fit there.

    Raises:
        InputError: there is no such file or matrix, it is truncated or damaged, or has another
            type.
    """
    given = Path(path) if isinstance(path, str | os.PathLike) else path
    return features_of(file_of(given, key))


def features_of(file: FeatureFile) -> FileFeatures:
    """Return the matrix (n, d) of files, mapped into memory if it is in one piece."""
    if len(file.pieces) > 1:
        return ScatteredFeatures.of(file)
    features = file.mapped().as_subclass(FileFeatures)
    features.file = file
    return features


def _reopened(file: FeatureFile) -> Tensor:
    return features_of(file.reopened())


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to."""
    declared = function._schema.arguments
    given = dict(zip((each.name for each in declared), args, strict=False)) | (kwargs or {})
    changed = (each.name for each in declared if each.alias_info and each.alias_info.is_write)
    return [given.get(name) for name in changed]


# Bytes of a block in a pass over the whole matrix; no result depends on it.
BLOCK_BYTES = 1 << 24

Stamp = tuple[int, int, int, int]
# Shape and type of a matrix, and the byte at which its numbers begin.
Place = tuple[tuple[int, ...], torch.dtype, int]


def row_blocks(count: int, row_bytes: int) -> list[slice]:
    """Return slices of all rows of a matrix, each of about BLOCK_BYTES."""
    size = max(1, BLOCK_BYTES // max(1, row_bytes))
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def stamp_of(path: Path) -> Stamp:
    """Return the identity of a file's content: device, inode, size, last modification."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Piece(NamedTuple):
    """Rows that are contiguous in a file, from a byte offset on."""

    path: Path
    offset: int
    rows: int


class FeatureFile:
    """A matrix (n, d) in files.

    Args:
        columns: d.
        dtype: type of its numbers.
        pieces: its rows in order.
        stamps: the identity of each file's content, taken before the file was read for the first
            time.
    """

    def __init__(
        self, columns: int, dtype: torch.dtype, pieces: Sequence[Piece], stamps: dict[Path, Stamp]
    ) -> None:
        self.columns, self.dtype, self.pieces, self.stamps = columns, dtype, pieces, stamps
        self._maps: dict[Path, Any] = {}
        # The first row of each piece, and the number of rows.
        self._firsts = [0, *accumulate(piece.rows for piece in pieces)]

    @property
    def shape(self) -> tuple[int, int]:
        return self._firsts[-1], self.columns

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    def __getstate__(self) -> dict[str, Any]:
        # Memory maps belong to this process.
        return {**self.__dict__, "_maps": {}}

    def reopened(self) -> FeatureFile:
        """Check, after unpickling in another process, that the files are the same there.

        Raises:
            InputError: a file is missing, or is another one.
        """
        for path, stamp in self.stamps.items():
            try:
                found = stamp_of(path)
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
            self.stamps[path] = found
        return self

    def check(self) -> None:
        """Refuse files that changed since they were opened.

        Raises:
            InputError: a file has changed or is missing.
        """
        for path, stamp in self.stamps.items():
            try:
                same = stamp_of(path) == stamp
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
        # The piece that holds the first row.
        first = int(np.searchsorted(self._firsts, rows.start, "right")) - 1
        at = rows.start
        while at < rows.stop:
            stop = min(rows.stop, self._firsts[first + 1])
            part = out[at - rows.start : stop - rows.start]
            self._read(self.pieces[first], at - self._firsts[first], part)
            first, at = first + 1, stop
        self.check()

    def _read(self, piece: Piece, row: int, out: Tensor) -> None:
        buffer = memoryview(out.view(torch.uint8).numpy().data).cast("B")
        try:
            with piece.path.open("rb") as stream:
                stream.seek(piece.offset + row * self.row_bytes)
                # A file that ends early leaves rows unread; `check` then finds another size.
                stream.readinto(buffer)
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
        if len(self.pieces) == 1:
            torch.index_select(self.mapped(), 0, rows, out=out)
            return
        order = torch.argsort(rows)
        wanted = rows[order]
        cuts = torch.searchsorted(wanted, torch.tensor(self._firsts)).tolist()
        # `_firsts` has one entry more, the number of rows.
        for place, (piece, first) in enumerate(zip(self.pieces, self._firsts, strict=False)):
            # The sorted rows cuts[k] to cuts[k + 1] are in piece k.
            here = slice(cuts[place], cuts[place + 1])
            if here.start < here.stop:
                out[order[here]] = self._mapped(piece)[wanted[here] - first]

    def mapped(self) -> Tensor:
        """Map a matrix of one piece into memory; writing to it changes no file."""
        (piece,) = self.pieces
        return self._mapped(piece)

    def _mapped(self, piece: Piece) -> Tensor:
        if piece.path not in self._maps:
            # Copy on write.
            self._maps[piece.path] = np.memmap(piece.path, np.uint8, "c")
        content = self._maps[piece.path][piece.offset :][: piece.rows * self.row_bytes]
        return torch.from_numpy(content).view(self.dtype).view(piece.rows, -1)

    def rows(self, rows: slice) -> Tensor:
        """Read some rows (k, d)."""
        shape = max(0, rows.stop - rows.start), self.columns
        out = torch.empty(shape, dtype=self.dtype)
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

# Bytes; a longer header is a sign of damage. safetensors itself writes none beyond 100 MB.
MOST_HEADER = 100 << 20


def file_of(given: Any, key: str | None) -> FeatureFile:
    """Locate the matrix of a file, a folder or a `datasets.Dataset`.

    Args:
        given: a path, or the dataset.
        key: the matrix, if there are several: a name in a .safetensors file, a column of a dataset.
            A .npy file holds one matrix, without a name.

    Raises:
        InputError: there is no such file or matrix, or it is damaged.
    """
    if not isinstance(given, Path):
        # Imported here, as it imports pyarrow.
        from otdd_flash.features.arrow_column import file_of_dataset

        return file_of_dataset(given, key)
    try:
        if given.is_dir() or given.suffix.lower() == ".arrow":
            from otdd_flash.features.arrow_column import file_of_arrow

            return file_of_arrow(given, key)
        # Before the header is read, so that a file which takes this one's place has another stamp.
        stamp = stamp_of(given)
        with given.open("rb") as stream:
            match given.suffix.lower():
                case ".npy":
                    shape, dtype, offset = _of_npy(given, stream, key)
                case ".safetensors":
                    shape, dtype, offset = _of_safetensors(given, stream, key)
                case _:
                    raise InputError(
                        "features are read from .npy, .safetensors and .arrow files and from "
                        f"folders of Dataset.save_to_disk, got {given}"
                    )
    except OSError as error:
        raise InputError(f"cannot read {given}: {error.strerror or error}") from None
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{given} holds an array of shape {shape}; features are a matrix (n, d)")
    if offset % dtype.itemsize:
        raise InputError(
            f"the numbers of {given} are not aligned; write it with a newer safetensors"
        )
    found = FeatureFile(shape[1], dtype, [Piece(given, offset, shape[0])], {given: stamp})
    end, size = offset + shape[0] * found.row_bytes, given.stat().st_size
    if size < end:
        raise InputError(
            f"{given} is truncated: its header promises {end} bytes and it has {size}; write it "
            "again"
        )
    return found


def _of_npy(path: Path, stream: Any, key: str | None) -> Place:
    if key is not None:
        raise InputError(f"{path} holds one matrix, without a name; leave key={key} out")
    try:
        version = np.lib.format.read_magic(stream)
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        shape, by_columns, dtype = read[version[0]](stream)
    except (ValueError, KeyError, SyntaxError, TokenError) as error:
        raise InputError(f"{path} is no .npy file, or a damaged one ({error})") from None
    # A matrix of one row or one column is the same in both orders.
    if dtype.str not in NUMPY_TYPES or (by_columns and len(shape) == 2 and 1 not in shape):
        order = " by columns" if by_columns else ""
        raise InputError(
            f"{path} holds {dtype}{order}; features are read from float16, float32 or float64 rows"
        )
    return shape, NUMPY_TYPES[dtype.str], stream.tell()


def _of_safetensors(path: Path, stream: Any, key: str | None) -> Place:
    try:
        length = int.from_bytes(stream.read(8), "little")
        if length > MOST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = {name: _entry(entry) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no .safetensors file, or a damaged one ({error})") from None
    names = sorted(entries)
    dtype, shape, first, end = entries[named(path, key, names, names, "matrix")]
    if dtype not in TYPES:
        raise InputError(f"{path} holds {dtype}; features are read from {', '.join(TYPES)}")
    if end - first != math.prod(shape) * TYPES[dtype].itemsize:
        raise InputError(
            f"{path} is damaged: its header gives {end - first} bytes to numbers of shape "
            f"{shape}; write it again"
        )
    return shape, TYPES[dtype], 8 + length + first


def named(
    holder: Path | str, key: str | None, names: Sequence[str], suited: Sequence[str], what: str
) -> str:
    """Return the name in a file that the user gave, or the only one that is suited.

    Raises:
        InputError: there is no such name, or without one not exactly one that is suited.
    """
    if key is not None and key not in names:
        raise InputError(f"{holder} has no {key!r}; it holds {', '.join(names)}")
    if key is None and len(suited) != 1:
        listed = ", ".join(names) or "nothing"
        raise InputError(f"{holder} holds {listed}; say which {what} with key=")
    return key or suited[0]


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return type, shape, first byte and the byte after the last, as the file's header has them.

    Bytes count from the header's end. Wrong types or values raise Python's own errors.
    """
    shape, (first, end) = tuple(entry["shape"]), entry["data_offsets"]
    numbers = *shape, first, end
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"the numbers {numbers}")
    return str(entry["dtype"]), shape, first, end
