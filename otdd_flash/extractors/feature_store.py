"""Features written to a .npy file while they are extracted, resumable after an interruption.

`extractors.embedding` uses `FeatureStore` for `features_path`. While `features.npy` is incomplete,
rows are appended to `features.npy.partial`. `features.npy.json` records what the features are of,
how many rows have reached the disk, and the sum of their digests. The last step renames the partial
file.

A change must keep the rule that existing rows are read again and compared with that sum before they
are used: damaged or foreign rows are never continued (`tests/extractors/test_feature_store.py`).
Rows reach the disk before the record says so, because the machine may stop in between. The record
carries the version of its format (`files.tensor_file`). A change that an earlier version would
misread must increase that number.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.extractors.plain import require_same_shape
from otdd_flash.features.file_features import features_file
from otdd_flash.files.atomic import lock, unlock, write_json
from otdd_flash.files.tensor_file import (
    STAMP,
    LaterFormatError,
    check_format,
    other_version,
)
from otdd_flash.fingerprint import MODULUS, digest_of_rows

# Bytes after which rows are synchronised to the disk and recorded.
NOTED_BYTES = 1 << 26
# Largest difference between a stored batch and the same batch computed again that is taken for
# rounding, as a share of the stored batch's norm.
ROUNDING = 1e-3

# blocks(first): blocks of all rows from `first` on. Their number is not checked before the file is
# renamed, but `_complete` refuses a file with fewer.
Blocks = Callable[[int], Iterator[Tensor]]
# again(row): computes the batch that contains `row` once more; returns the number of its first row
# and the batch.
Again = Callable[[int], tuple[int, Tensor]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Note:
    """The record of rows on the disk.

    Attributes:
        key: identifies the data and the network.
        rows: number of rows.
        shape: shape of one row before it was flattened, such as that of an image.
        dtype: their type by NumPy's name.
        digest: sum of the digests of the rows, in hexadecimal.
    """

    key: str
    rows: int
    shape: list[int]
    dtype: str
    digest: str

    @property
    def columns(self) -> int:
        """The number of features d."""
        return math.prod(self.shape)

    def describes(self, features: Tensor) -> bool:
        """Return whether features (n, d) are the recorded rows."""
        alike = tuple(features.shape) == (self.rows, self.columns)
        alike = alike and _name(features.dtype) == self.dtype
        return alike and f"{digest_of_rows(features):x}" == self.digest

    def followed_by(self, part: Tensor) -> Note:
        """Return the record of these rows with more rows (k, d) appended."""
        digest = int(self.digest, 16) + digest_of_rows(part, first=self.rows)
        return replace(self, rows=self.rows + len(part), digest=f"{digest % MODULUS:x}")


class FeatureStore:
    """A .npy file of features that may be incomplete.

    Args:
        path: path of the file; its folder is created.
        key: identifies the data and the network of the features.
        count: number of rows n.
        name: the dataset's, for messages.
        again: for features that the key does not identify, such as a function's: computes a batch
            again. The first and the last batch in the file are compared with it.

    Raises:
        InputError: the file's name does not end in .npy.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        key: str,
        count: int,
        name: str,
        again: Again | None = None,
    ) -> None:
        self.path = Path(path)
        if self.path.suffix != ".npy":
            raise InputError(f"features_path must end in .npy, got {self.path}")
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self._note_file = self.path.with_name(f"{self.path.name}.json")
        self._key, self._count = key, count
        self._name, self._again = name, again
        # Version and format that the record was written with.
        self._written: dict[str, Any] = {}

    def write(self, blocks: Blocks, progress: Callable[[int, int], None] | None) -> None:
        """Write the rows that are missing, if any.

        Raises:
            InputError: the file holds something else, is damaged, is of a later version or cannot
                be written, another process writes it, or a feature is not finite.
        """
        if self._complete():
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._held():
                # Another process may have finished while this one waited for the folder and the
                # lock.
                if not self._complete():
                    self._write(blocks, progress)
                    os.replace(self._partial, self.path)
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror or error}; free space there or choose "
                "another features_path"
            ) from error

    @property
    def features(self) -> Tensor:
        """The features (n, d), mapped from the file."""
        return features_file(self.path)

    def _complete(self) -> bool:
        """Return whether all rows are written.

        Raises:
            InputError: the file is of something else, or is not what was written.
        """
        if not self.path.exists():
            return False
        note = self._note()
        if note is None or note.key != self._key:
            by = "" if note is None else other_version(self._written)
            raise InputError(
                f"{self.path} holds features of other data or of another network{by}; choose "
                "another features_path, or delete it"
            )
        if note.rows != self._count or not note.describes(features := self.features):
            raise InputError(
                f"{self.path} is not what was written there: it was damaged or replaced; restore "
                "it, delete it, or choose another features_path"
            )
        self._check_again(features)
        return True

    def _note(self) -> Note | None:
        try:
            content = json.loads(self._note_file.read_text(encoding="utf-8"))
            self._written = {key: content.pop(key) for key in STAMP if key in content}
            check_format(self._note_file, self._written)
            note = Note(**content)
            numbers, texts = (note.rows, *note.shape), (note.key, note.dtype, note.digest)
        except LaterFormatError:
            raise
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        sound = all(isinstance(each, int) for each in numbers)
        return note if sound and all(isinstance(each, str) for each in texts) else None

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock that keeps other processes from writing the file."""
        place = self.path.with_name(f"{self.path.name}.lock")
        descriptor = lock(place)
        if descriptor is None:
            raise InputError(
                f"another process writes {self.path}; wait, or choose another features_path"
            )
        try:
            yield
        finally:
            unlock(place, descriptor)

    def _write(self, blocks: Blocks, progress: Callable[[int, int], None] | None) -> None:
        # Refused first: `_begun` may truncate the file.
        if self._partial.is_symlink():
            raise InputError(
                f"{self._partial} is a link, and would be written elsewhere; delete it, or choose "
                "another features_path"
            )
        note = self._begun()
        if note is None:
            # An old record would vouch for rows that do not exist.
            self._note_file.unlink(missing_ok=True)
        unnoted = 0
        done = 0 if note is None else note.rows
        # A generator, so that `closing` can end it at once and not when an error's traceback is
        # freed; see `embedding._gather`.
        missing = (block for block in (blocks(done) if done < self._count else ()))
        begun: Literal["wb", "ab"] = "wb" if note is None else "ab"
        with self._partial.open(begun, buffering=0) as file, closing(missing):
            for block in missing:
                if note is None:
                    note = Note(self._key, 0, [*block.shape[1:]], _name(block.dtype), "0")
                    _write_all(file, _header(self._count, note))
                require_same_shape(torch.Size(note.shape), block.shape[1:], self._name)
                dtype = getattr(torch, note.dtype)
                if torch.promote_types(block.dtype, dtype) != dtype:
                    raise InputError(
                        f"features from row {note.rows} on are {block.dtype}, and {self.path} "
                        f"holds {dtype} since its first; give all of one type"
                    )
                part = block.flatten(1).to(dtype).contiguous()
                if not bool(torch.isfinite(part).all()):
                    raise InputError(
                        f"features from row {note.rows} on are not finite; use "
                        "mixed_precision=false, or leave those inputs out"
                    )
                _write_all(file, part.numpy().data.cast("B"))
                note = note.followed_by(part)
                unnoted += part.nbytes
                if unnoted >= NOTED_BYTES or note.rows == self._count:
                    os.fsync(file.fileno())
                    write_json(self._note_file, {**asdict(note), **STAMP})
                    unnoted = 0
                if progress is not None:
                    progress(note.rows, self._count)

    def _begun(self) -> Note | None:
        """Return the record of rows to continue after; None to start anew."""
        note = self._note()
        if note is None or note.key != self._key or not self._partial.exists():
            return None
        try:
            start, shape = len(_header(self._count, note)), (note.rows, note.columns)
            there = torch.from_numpy(np.memmap(self._partial, note.dtype, "c", start, shape))
            intact = 0 < note.rows <= self._count and note.describes(there)
        except (OSError, ValueError, TypeError):
            # NumPy raises these for a file that is too short, and for a record that makes no sense.
            intact = False
        if not intact:
            logger.warning("%s is not what was written there; extracting all again", self._partial)
            return None
        self._check_again(there)
        # How many rows were written after the last record, and whether the last is whole, is
        # unknown.
        os.truncate(self._partial, start + there.nbytes)
        return note

    def _check_again(self, stored: Tensor) -> None:
        """Refuse existing rows whose first or last batch is computed differently now."""
        if self._again is None:
            return
        for row in dict.fromkeys((0, len(stored) - 1)):
            first, batch = self._again(row)
            there = stored[first : first + len(batch)]
            now = batch.flatten(1)[: len(there)]
            alike = now.shape == there.shape and now.dtype == there.dtype
            if not alike or (now - there).norm() > ROUNDING * there.norm():
                raise InputError(
                    f"{self.path} holds features of another function of this name, as row {first} "
                    "shows, or of one that draws without a seed; choose another features_path, or "
                    f"delete {self.path.name}, {self._partial.name} and {self._note_file.name}"
                )


def _header(count: int, note: Note) -> bytes:
    """Return the header of a .npy file."""
    sink, dtype = BytesIO(), np.dtype(note.dtype)
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(sink, {**described, "shape": (count, note.columns)})
    return sink.getvalue()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_all(file: RawIOBase, content: bytes | memoryview) -> None:
    """Write without a buffer, so that a full disk raises here."""
    rest = memoryview(content)
    while len(rest):
        rest = rest[file.write(rest) or 0 :]
