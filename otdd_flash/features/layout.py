"""Where in files the numbers of a matrix are: .npy, .safetensors, and a column of Arrow files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
import torch

from otdd_flash.errors import InputError
from otdd_flash.features.pieces import Matrix, Piece

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


def matrix_of(given: Any, key: str | None) -> Matrix:
    """Where the matrix of a file, a folder or a `datasets.Dataset` is.

    Args:
        given: a path, or the dataset.
        key: which matrix of several: a name in a .safetensors file, a column of a dataset.

    Raises:
        InputError: there is no such file or matrix, or it is damaged.
    """
    if not isinstance(given, Path):
        # pyarrow is heavy.
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
    """What the header of a .safetensors file says of a tensor; its bytes count from the header."""

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
