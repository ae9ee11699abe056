"""A small content-addressed store of tensors on disk, for results that are expensive to recompute.

Each entry is one safetensors file, named after the hash of its key. It is written under a temporary
name and renamed, so a reader never sees half an entry and two writers cannot mix theirs. A checksum
over the content is stored with it: a damaged entry is deleted and counts as missing. A cache that
cannot be written warns once and steps aside; it never stops a run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from otdd_flash.checks import path
from otdd_flash.files.tensor_file import DamagedFileError, read_tensors, save_tensors

# Part of every file name: entries of another layout are never read.
ENTRY_FORMAT = 2

logger = logging.getLogger(__name__)


class TensorCache:
    """Named tensors by key, under one folder.

    Args:
        cache_dir: the folder, made on the first write. None turns the cache off.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] | None) -> None:
        self._folder = None if cache_dir is None else Path(path("cache_dir", cache_dir))

    @property
    def active(self) -> bool:
        """Whether entries can be found or kept; False after a failure of the folder."""
        return self._folder is not None

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The tensors last put under `key`, on the CPU, or None."""
        if self._folder is None:
            return None
        path = self._folder / _file_name(key)
        try:
            return _read(path, key)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._step_aside("read", error)
        except DamagedFileError as error:
            logger.warning("deleting the damaged cache entry %s (%s); recomputing", path, error)
            path.unlink(missing_ok=True)
        return None

    def put(
        self, key: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Keep `tensors` under `key`; `metadata` is for a person who looks into the file."""
        if self._folder is None:
            return
        path = self._folder / _file_name(key)
        partial = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_tensors(partial, tensors, {**(metadata or {}), "key": key})
            os.replace(partial, path)
        except OSError as error:
            self._step_aside("write", error)
        finally:
            _remove(partial)

    def _step_aside(self, action: str, error: OSError) -> None:
        logger.warning(
            "cannot %s the cache in %s (%s); going on without it. Free space there, or choose "
            "another folder with cache_dir=DIR (cache_dir=null turns the cache off)",
            action,
            self._folder,
            error,
        )
        self._folder = None


def _file_name(key: str) -> str:
    return f"{hashlib.sha256(f'{ENTRY_FORMAT} {key}'.encode()).hexdigest()[:40]}.safetensors"


def _read(path: Path, key: str) -> dict[str, Tensor]:
    stored = read_tensors(path)
    if not stored.checked or stored.texts.get("key") != key:
        raise DamagedFileError("it is not what its name says")
    return stored.tensors


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("could not remove %s: %s", path, error)
