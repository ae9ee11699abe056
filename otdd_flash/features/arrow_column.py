"""A column of Arrow files, such as those of a Hugging Face dataset, as a matrix of features.

Record batches store the numbers of lists of one length contiguously and uncompressed. Each batch is
a `Piece` of the matrix: this module finds its byte offset, and `features.file_features`, the only
caller, reads it. pyarrow takes long to import, so `file_features` imports this module only when it
is needed. The files are read by position. So a dataset must be refused unless it has all rows of
its files, in their order, and the column under the files' name
(`tests/features/test_arrow_column.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from otdd_flash.errors import InputError
from otdd_flash.features.file_features import FeatureFile, Piece, Stamp, named, stamp_of

TYPES = {pa.float16(): torch.float16, pa.float32(): torch.float32, pa.float64(): torch.float64}

# Operations of `datasets` that keep the order of rows and the names of columns; that all rows are
# present is checked by their number.
HARMLESS = {"replace_schema_metadata", "drop", "remove_column", "select", "slice"}

# For numbers whose bytes in the file are not those in memory.
NOT_AS_IT_IS = (
    "compressed or not aligned; write it with the options that datasets takes, which do neither"
)

# The first bytes of the file format, and the last ones of a complete stream.
FILE_MAGIC, STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"


def file_of_dataset(dataset: Any, key: str | None) -> FeatureFile:
    """Locate a column of a `datasets.Dataset` whose files hold it unchanged.

    Raises:
        InputError: it is in memory, or is not what its files hold.
    """
    key = _column("the dataset", dataset.data.schema, key)
    # The table's parts that contain the column, row by row.
    blocks = getattr(dataset.data, "blocks", [[dataset.data]])
    parts = [part for row in blocks for part in row if key in part.schema.names]
    if not any(hasattr(part, "path") for part in parts):
        raise InputError(
            "the dataset lies in memory; save it with save_to_disk and give its folder, or give "
            "its column as an array"
        )
    whole = dataset._indices is None and all(_is_as_in_its_file(part) for part in parts)
    found = _of_files([Path(part.path) for part in parts], key) if whole else None
    if found is None or len(dataset) != found.shape[0]:
        raise InputError(
            "the dataset is not what its files hold, but a selection or another order of their "
            "rows, or has renamed columns or rows in memory; save it with save_to_disk and give "
            "its folder"
        )
    return found


def _is_as_in_its_file(part: Any) -> bool:
    """Return whether a part of a dataset's table has rows of a file in order, under its names.

    Its `replays` are the operations that `datasets` applied to the file's table.
    """
    return hasattr(part, "path") and all(name in HARMLESS for name, *_ in part.replays)


def file_of_arrow(path: Path, key: str | None) -> FeatureFile:
    """Locate a column of an .arrow file, or of a folder that `Dataset.save_to_disk` wrote.

    Raises:
        InputError: there is no such column, or a file is damaged.
    """
    return _of_files(_files_of(path) if path.is_dir() else [path], key)


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a dataset, in their order."""
    if (folder / "dataset_dict.json").exists():
        splits = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
        raise InputError(f"{folder} holds several splits; give the folder of one ({splits})")
    try:
        state = json.loads((folder / "state.json").read_text())
        names = [entry["filename"] for entry in state["_data_files"]]
    except OSError:
        raise InputError(
            f"{folder} has no state.json; features are read from folders of Dataset.save_to_disk"
        ) from None
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{folder}/state.json is damaged ({error}); save it again") from None
    if not names:
        raise InputError(f"{folder} holds no rows")
    return [folder / name for name in names]


def _of_files(files: list[Path], key: str | None) -> FeatureFile:
    pieces: list[Piece] = []
    stamps: dict[Path, Stamp] = {}
    kind: tuple[int, torch.dtype] | None = None
    for path in files:
        try:
            stamps[path] = stamp_of(path)
            for place, found, piece in _pieces(path, key):
                if kind not in (None, found):
                    raise InputError(
                        f"{path} holds lists of {found[0]} {found[1]} from row {place} on, and of "
                        f"{kind[0]} {kind[1]} before; features are lists of one length"
                    )
                kind = found
                pieces.append(piece)
        except InputError:
            raise
        except OSError as error:
            # pyarrow's own messages are long.
            says = error.strerror or str(error).splitlines()[0]
            raise InputError(f"cannot read {path}: {says}") from None
        except (pa.ArrowException, ValueError) as error:
            says = str(error).splitlines()[0]
            raise InputError(f"{path} is no Arrow file, or a damaged one ({says})") from None
    if kind is None or kind[0] == 0:
        raise InputError(f"{files[0]} holds no rows of features")
    return FeatureFile(*kind, pieces, stamps)


def _pieces(path: Path, key: str | None) -> Iterator[tuple[int, tuple[int, torch.dtype], Piece]]:
    """Yield each batch's first row in the file, its list length and type, and its piece."""
    content: Any = np.memmap(path, np.uint8, "r")
    row = 0
    for batch in _batches(path, content):
        name = _column(path, batch.schema, key)
        if not batch.num_rows:
            continue
        array = batch.column(name)
        where = f"column {name} of {path}"
        length, values = _values(where, row, array)
        dtype = TYPES.get(values.type)
        if dtype is None:
            raise InputError(
                f"{where} holds lists of {values.type}; features are read from lists of float16, "
                "float32 or float64"
            )
        if array.null_count or values.null_count:
            nulls = array.is_null() if array.null_count else values.is_null()
            first = nulls.index(True).as_py() // (1 if array.null_count else length)
            raise InputError(
                f"{where} holds nulls, the first in row {row + first}; leave those rows out"
            )
        offset = _offset(where, content, values, batch.num_rows * length * dtype.itemsize)
        if offset % dtype.itemsize:
            raise InputError(f"{where} is {NOT_AS_IT_IS}")
        yield row, (length, dtype), Piece(path, offset, batch.num_rows)
        row += batch.num_rows


def _offset(where: str, content: Any, values: Any, size: int) -> int:
    """Return the byte offset in the file of a batch's numbers, which take `size` bytes."""
    width: int = values.type.byte_width
    buffer, first = values.buffers()[1], values.offset * width
    if len(values) * width != size or first + size > buffer.size:
        raise InputError(f"{where} is damaged: it lacks some of its numbers; write it again")
    offset: int = buffer.address + first - content.ctypes.data
    if not 0 <= offset <= len(content) - size:
        raise InputError(f"{where} is {NOT_AS_IT_IS}")
    return offset


def _batches(path: Path, content: Any) -> Iterator[Any]:
    source = pa.BufferReader(pa.py_buffer(content))
    if content[: len(FILE_MAGIC)].tobytes() == FILE_MAGIC:
        reader = pa.ipc.open_file(source)
        yield from (reader.get_batch(place) for place in range(reader.num_record_batches))
        return
    reader = pa.ipc.open_stream(source)
    yield from reader
    if source.tell() < len(content) or content[-len(STREAM_END) :].tobytes() != STREAM_END:
        raise InputError(f"{path} is truncated: the end of its stream is missing; write it again")


def _column(holder: Path | str, schema: Any, key: str | None) -> str:
    """Return the column asked for, or the only column of lists."""
    lists = [field.name for field in schema if _is_list(field.type)]
    return named(holder, key, schema.names, lists, "column")


def _values(where: str, row: int, array: Any) -> tuple[int, Any]:
    """Return the length of all lists of a column, and their numbers as one array."""
    kind = array.type
    if not _is_list(kind):
        raise InputError(f"{where} holds {kind}; features are lists of one length")
    if pa.types.is_fixed_size_list(kind):
        length = kind.list_size
        return length, array.values.slice(array.offset * length, len(array) * length)
    ends = array.offsets.to_numpy(zero_copy_only=False)
    lengths = np.diff(ends)
    length = int(lengths[0])
    other = np.flatnonzero(lengths != length)
    if len(other) and not array.null_count:
        raise InputError(
            f"{where} is ragged: row {row} holds {length} numbers and row {row + other[0]} "
            f"{lengths[other[0]]}; features are lists of one length"
        )
    return length, array.values.slice(int(ends[0]), int(ends[-1] - ends[0]))


def _is_list(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind))
