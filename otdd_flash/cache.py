"""A small content-addressed store of tensors on disk, for results that are dear to recompute.

Each entry is one safetensors file, named after the hash of its key. It is written under a temporary
name and renamed, so a reader never sees half an entry and two writers cannot mix theirs. A checksum
over the content is stored with it: a damaged entry is deleted and counts as missing. A cache that
cannot be written warns once and steps aside; it never stops a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, uint8

# Part of every file name: entries of another layout are never read.
ENTRY_FORMAT = 1

logger = logging.getLogger(__name__)


class TensorCache:
    """Named tensors by key, under one folder.

    Args:
        cache_dir: the folder, made on the first write; `~` is expanded. None turns the cache off.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] | None) -> None:
        self._folder = None if cache_dir is None else Path(cache_dir).expanduser()

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
        except _DamagedEntryError as error:
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
            _write(partial, key, tensors, metadata or {})
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


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}{tuple(tensor.shape)}\0".encode())
        # Through bytes: numpy has no bfloat16.
        digest.update(tensor.reshape(-1).view(uint8).numpy().data)
    return digest.hexdigest()


class _DamagedEntryError(Exception):
    """An entry's file does not hold what was written."""


def _file_name(key: str) -> str:
    return f"{hashlib.sha256(f'{ENTRY_FORMAT} {key}'.encode()).hexdigest()[:40]}.safetensors"


def _read(path: Path, key: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    # Read through one open file: safetensors' own reader opens the path once more for the values,
    # and another writer may have renamed a new entry there in between.
    content = path.read_bytes()
    try:
        tensors: dict[str, Tensor] = load(content)
    except SafetensorError as error:
        raise _DamagedEntryError(str(error)) from error
    metadata = _metadata(content)
    if metadata.get("checksum") != content_hash(tensors) or metadata.get("key") != key:
        raise _DamagedEntryError("its checksum does not match")
    return tensors


def _metadata(content: bytes) -> dict[str, str]:
    """The metadata of a valid safetensors file: a length, then that many bytes of JSON."""
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return metadata


def _write(
    path: Path, key: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Cloned: safetensors refuses views of one storage.
    content = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    header = {**metadata, "key": key, "checksum": content_hash(content)}
    try:
        save_file(content, path, metadata=header)
    except SafetensorError as error:
        # A full disk arrives in this form.
        raise OSError(str(error)) from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("could not remove %s: %s", path, error)
