"""Features that stay in a file: a matrix that looks like a tensor and is read as it is used.

The file is a .npy array or a matrix in a .safetensors file. It is mapped into memory, so that any
operation on the tensor reads what it touches; long passes read blocks of rows from the file itself
(`FeatureFile.read`). A file that is shorter than its header says, or that changes while it is open,
is an error in one sentence.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash import arguments
from otdd_flash.checks import takes
from otdd_flash.errors import InputError

# Types of safetensors and of numpy that hold features.
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
NUMPY_TYPES = {"<f8": torch.float64, "<f4": torch.float32, "<f2": torch.float16}

# A header beyond it is damage.
MOST_HEADER = 100 << 20


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


class Matrix(NamedTuple):
    """Where in a file a matrix is."""

    shape: tuple[int, int]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


class FeatureFile:
    """A matrix (n, d) in a file.

    Args:
        path: a .npy or .safetensors file.
        key: the matrix of a .safetensors file; its only one by default.

    Raises:
        InputError: there is no such file or matrix, or it is truncated.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        self.path = path
        try:
            self._stamp = Stamp.of(path)
            with path.open("rb") as stream:
                self.matrix = _matrix(path, stream, key)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from None
        end = self.matrix.offset + self.matrix.nbytes
        if self._stamp.size < end:
            raise InputError(
                f"{path} is truncated: its header promises {end} bytes and it has "
                f"{self._stamp.size}; write it again"
            )

    def check(self) -> None:
        """Refuse a file that is another one than when it was opened.

        Raises:
            InputError: as said.
        """
        try:
            same = Stamp.of(self.path) == self._stamp
        except OSError:
            same = False
        if not same:
            raise InputError(
                f"{self.path} changed while it was in use; leave it alone until the run has ended, "
                "and start again"
            )

    def read(self, rows: slice, out: Tensor) -> None:
        """Fill `out`, contiguous on the CPU, with some rows.

        Raises:
            InputError: the file changed, or cannot be read.
        """
        width = self.matrix.shape[1] * self.matrix.dtype.itemsize
        buffer = memoryview(out.view(torch.uint8).numpy().data).cast("B")
        try:
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(self.matrix.offset + rows.start * width)
                done = 0
                while done < len(buffer) and (count := stream.readinto(buffer[done:])):
                    done += count
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror or error}") from None
        self.check()

    def mapped(self) -> Tensor:
        """All of it, mapped into memory; what is written to it stays in memory."""
        n, d = self.matrix.shape
        content: Any = np.memmap(self.path, np.uint8, "c", self.matrix.offset, self.matrix.nbytes)
        return torch.from_numpy(content).view(self.matrix.dtype).view(n, d)


class FileFeatures(Tensor):
    """A mapped matrix that knows its file; what operations make of it are plain tensors.

    Attributes:
        file: where it is.
    """

    file: FeatureFile

    __torch_function__: Any = torch._C._disabled_torch_function_impl


@takes(arguments.FEATURES_FILE)
def features_file(path: str | os.PathLike[str], *, key: str | None = None) -> Tensor:
    """Features (n, d) in a file, to be given wherever features are, that are not read at once.

    Args:
        path: a .npy or .safetensors file with a matrix of floating-point numbers.
        key: the name of the matrix in a .safetensors file; needed if it holds several.

    Returns:
        (n, d), mapped into memory. Distances stream it to the device in blocks of rows where it
        does not fit there.

    Raises:
        InputError: there is no such file or matrix, it is truncated, or its type is another.
    """
    file = FeatureFile(Path(path).expanduser(), key)
    features = file.mapped().as_subclass(FileFeatures)
    features.file = file
    return features


def _matrix(path: Path, stream: Any, key: str | None) -> Matrix:
    match path.suffix.lower():
        case ".npy":
            return _of_npy(path, stream)
        case ".safetensors":
            return _of_safetensors(path, stream, key)
    raise InputError(f"features are read from .npy and .safetensors files, got {path}")


def _of_npy(path: Path, stream: Any) -> Matrix:
    try:
        version = np.lib.format.read_magic(stream)
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        shape, by_columns, dtype = read[version[0]](stream)
    except (ValueError, KeyError) as error:
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
        entries = {
            name: (entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no .safetensors file, or a damaged one ({error})") from None
    names = ", ".join(sorted(entries))
    if key is None and len(entries) != 1:
        raise InputError(f"{path} holds {names or 'nothing'}; say which matrix with key=")
    if key is not None and key not in entries:
        raise InputError(f"{path} has no {key!r}; it holds {names}")
    dtype, shape, offset = entries[key or names]
    if dtype not in TYPES:
        raise InputError(f"{path} holds {dtype}; features are read from {', '.join(TYPES)}")
    return _checked(path, shape, TYPES[dtype], offset)


def _checked(path: Path, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Matrix:
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{path} holds an array of shape {shape}; features are a matrix (n, d)")
    if offset % dtype.itemsize:
        raise InputError(
            f"the numbers of {path} are not aligned; write it with a newer safetensors"
        )
    return Matrix((shape[0], shape[1]), dtype, offset)
