"""Features written to a file as they are extracted, to go on with after an interruption.

Beside `features.npy` two files exist while it is incomplete: `features.npy.partial`, which has its
form and size from the start, and `features.npy.json`, which says what the features are of and how
many rows are on the disk. The last step renames the first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.features.file_features import features_file
from otdd_flash.files.json_file import write_json

# Bytes after which what was written is made to reach the disk, and noted.
NOTED_BYTES = 1 << 26

# blocks(first): blocks of rows from `first` on.
Blocks = Callable[[int], Iterator[Tensor]]


class FeatureStore:
    """A .npy file of features that may be incomplete.

    Args:
        path: of the file; its folder is made.
        key: what the features are of: data and network.
        count: rows n.

    Raises:
        InputError: the file's name is another, or it holds something else.
    """

    def __init__(self, path: str | os.PathLike[str], key: str, count: int) -> None:
        self.path = Path(path).expanduser()
        if self.path.suffix != ".npy":
            raise InputError(f"features_path must end in .npy, got {self.path}")
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self._note = self.path.with_name(f"{self.path.name}.json")
        self._key, self._count = key, count
        noted = self._noted()
        self.complete = self.path.exists()
        if self.complete and noted.get("key") != key:
            raise InputError(
                f"{self.path} holds features of other data or of another network; choose another "
                "features_path, or delete it"
            )
        known = noted.get("key") == key and self._partial.exists()
        self.rows = int(noted["rows"]) if known else 0

    def _noted(self) -> dict[str, Any]:
        try:
            noted = json.loads(self._note.read_text())
        except (OSError, ValueError):
            return {}
        return noted if isinstance(noted, dict) else {}

    def write(self, blocks: Blocks, progress: Callable[[int, int], None] | None) -> None:
        """Write the rows that are missing, unless there are none.

        Raises:
            InputError: the file cannot be written, or a feature is not finite.
        """
        if self.complete:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(blocks, progress)
            os.replace(self._partial, self.path)
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror or error}; free space there or choose "
                "another features_path"
            ) from error

    def _write(self, blocks: Blocks, progress: Callable[[int, int], None] | None) -> None:
        content: Any = None
        if self.rows:
            content = np.lib.format.open_memmap(self._partial, "r+")
        unnoted = 0
        for block in blocks(self.rows) if self.rows < self._count else ():
            rows = block.flatten(1)
            if not bool(torch.isfinite(rows).all()):
                raise InputError(
                    f"features from row {self.rows} on are not finite; use mixed_precision=false, "
                    "or leave those inputs out"
                )
            if content is None:
                shape, dtype = (self._count, rows.shape[1]), rows.numpy().dtype
                content = np.lib.format.open_memmap(self._partial, "w+", dtype, shape)
            content[self.rows : self.rows + len(rows)] = rows.numpy()
            self.rows += len(rows)
            unnoted += rows.nbytes
            if unnoted >= NOTED_BYTES or self.rows == self._count:
                content.flush()
                write_json(self._note, {"key": self._key, "rows": self.rows})
                unnoted = 0
            if progress is not None:
                progress(self.rows, self._count)

    @property
    def features(self) -> Tensor:
        """(n, d), in the file."""
        return features_file(self.path)
