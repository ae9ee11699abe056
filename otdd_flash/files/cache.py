"""A content-addressed store of tensors on disk, for results that are expensive to compute.

`extractors.embedding` caches features in a `TensorCache`; `labels.pair_cache` uses `check_owner`,
`make_folder` and `share_as_folder` for its database. An entry is one safetensors file, named after
the hash of its key. It is written under a temporary name and renamed, so that no reader sees half
an entry and two writers cannot mix theirs. An entry whose checksum or key does not match is deleted
and counts as missing. A cache that fails warns once and is not used again; it must never stop a run
(`tests/files/test_files.py`).

Checksums detect accidents, not attacks: whoever can write a folder can write valid entries. So a
folder is made for its owner alone, and one that everybody may write is not used. A folder that the
user names may be shared by a group; `USUAL_FOLDER` may not. Entries are data, never code. A change
of the layout must raise ENTRY_FORMAT, so that entries of the old layout are not read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from otdd_flash import __version__
from otdd_flash.checks import path
from otdd_flash.errors import InputError
from otdd_flash.files.atomic import replacing
from otdd_flash.files.tensor_file import (
    DamagedFileError,
    LaterFormatError,
    read_tensors,
    save_tensors,
)

# The folder of the commands' caches by default.
USUAL_FOLDER = "~/.cache/otdd_flash"

# Part of every file name: entries of another layout are never read.
ENTRY_FORMAT = 2

logger = logging.getLogger(__name__)


class TensorCache:
    """Named tensors by key, in one folder.

    Args:
        cache_dir: the folder, made on the first write. None turns the cache off.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] | None) -> None:
        self._folder = None if cache_dir is None else Path(path("cache_dir", cache_dir))

    @property
    def active(self) -> bool:
        """Whether entries can be read or written; False after a failure of the folder."""
        return self._folder is not None

    def get(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors last put under `key`, on the CPU, or None."""
        if self._folder is None:
            return None
        path = self._folder / _file_name(key, ENTRY_FORMAT)
        try:
            check_owner(path)
            stored = read_tensors(path)
            if stored.texts.get("key") != key:
                raise DamagedFileError("it is not what its name says")
            return stored.tensors
        except FileNotFoundError:
            for earlier in range(1, ENTRY_FORMAT):
                if (other := self._folder / _file_name(key, earlier)).exists():
                    logger.warning(
                        "the cache entry %s has format %d, and otdd_flash %s reads format %d; "
                        "computing it again",
                        other,
                        earlier,
                        __version__,
                        ENTRY_FORMAT,
                    )
            return None
        except LaterFormatError as error:
            logger.warning("%s; computing it again", error)
        except OSError as error:
            self._step_aside("read", error)
        except DamagedFileError as error:
            logger.warning("deleting the damaged cache entry %s (%s); recomputing", path, error)
            try:
                path.unlink(missing_ok=True)
            except OSError as kept:
                self._step_aside("delete from", kept)
        return None

    def put(
        self, key: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write `tensors` under `key`; `metadata` is for people who look into the file."""
        if self._folder is None:
            return
        path = self._folder / _file_name(key, ENTRY_FORMAT)
        try:
            make_folder(self._folder)
            check_owner(path)
            with replacing(path) as partial:
                save_tensors(partial, tensors, {**(metadata or {}), "key": key})
                share_as_folder(partial)
        except OSError as error:
            self._step_aside("write", error)
        except InputError as error:
            # Raised by `replacing` from the error of the system.
            self._step_aside("write", error.__cause__)

    def _step_aside(self, action: str, error: BaseException | None) -> None:
        logger.warning(
            "cannot %s the cache in %s (%s); going on without it. Correct that, or choose "
            "another folder with cache_dir=DIR (cache_dir=null turns the cache off)",
            action,
            self._folder,
            error,
        )
        self._folder = None


def make_folder(folder: Path) -> None:
    """Make the folder of a cache for its owner alone, unless it exists.

    Raises:
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def share_as_folder(path: Path) -> None:
    """Give a new file the read and write permissions of its folder.

    Raises:
        OSError: the file's mode cannot be changed.
    """
    path.chmod(path.parent.stat().st_mode & 0o666)


def check_owner(path: Path) -> None:
    """Refuse an entry that other users may have written: writable by everybody, or a link.

    In `USUAL_FOLDER` also refuse what a group may write, or what belongs to another user.

    Args:
        path: an entry, which need not exist, in the folder of a cache.

    Raises:
        PermissionError: the entry is refused; the message says why and what to do.
        NotADirectoryError: the folder is something else, such as a device.
    """
    if not hasattr(os, "getuid"):
        return
    if path.parent.exists() and not path.parent.is_dir():
        raise NotADirectoryError(f"{path.parent} is no folder")
    usual = path.parent == Path(USUAL_FOLDER).expanduser()
    if path.is_symlink():
        raise PermissionError(f"{path.name} is a link to elsewhere; delete it")
    for place in (path.parent, path):
        try:
            state = place.stat()
        except FileNotFoundError:
            continue
        if state.st_mode & (0o022 if usual else 0o002):
            mode = stat.S_IMODE(state.st_mode)
            raise PermissionError(
                f"other users may write {place}, mode {mode:o}: chmod go-w it, after deleting what "
                "they may have put there"
            )
        if usual and state.st_uid != os.getuid():
            raise PermissionError(f"{place} belongs to another user")


def _file_name(key: str, entry_format: int) -> str:
    return f"{hashlib.sha256(f'{entry_format} {key}'.encode()).hexdigest()[:40]}.safetensors"
