"""Files and folders that appear whole or not at all; locks; and strict JSON.

Nearly everything that writes a file uses it: `files.tensor_file`, `files.cache`, `data.writing`,
`extractors.feature_store`, `flows.checkpoint`, `pairwise`, `ranking.index`, `study.study`,
`study.units`, `integrations.tracking`, modules of `report`, and `commands.nearest`,
`commands.outcome` and `commands.results`. The `to_dict` of results returns `json_content`.
`replacing` and `replacing_folder` write beside the target and rename. `lock` and `unlock` use
flock, so that a killed process leaves no lock behind.

A change must leave, at any interruption, the old content or the new one, never a mixture. The only
exception: a process killed between the two renames of a folder leaves the old one under a name that
ends in `.old`. A change must not write through links that lead elsewhere, because others may have
placed them (`tests/files/test_files.py`). JSON holds no NaN or infinity, which other readers of
JSON refuse.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from otdd_flash.errors import InputError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, else it is removed.

    An interruption at any moment leaves the old file, if there was one, or the new one. Missing
    folders are made.

    Raises:
        InputError: the folder or the file cannot be written.
    """
    path = Path(path)
    partial = _beside(path, "partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it becomes `path`, else it is removed.

    The old folder stays until the new one is complete, and is restored if the exchange fails. Not
    every system can exchange two folders in one step: a process killed between the two renames
    leaves the old one beside `path`, under a name that ends in `.old`.

    Raises:
        InputError: the folder or a file in it cannot be written.
    """
    path = Path(path)
    partial, old = _beside(path, "partial"), _beside(path, "old")
    try:
        partial.mkdir(parents=True)
        yield partial
        if path.exists():
            os.replace(path, old)
        os.replace(partial, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        if not path.exists() and old.exists():
            os.replace(old, path)
        for left in (partial, old):
            if left.is_symlink():
                # `path` was a link to another folder, which stays.
                left.unlink()
            shutil.rmtree(left, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 with its line ends unchanged, whole or not at all."""
    # Lone surrogates (undecodable file names as class names) become escapes instead of an error.
    content = text.encode("utf-8", errors="backslashreplace")
    with replacing(path) as partial:
        partial.write_bytes(content)


def reach_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk.

    Raises:
        OSError: they cannot be written.
    """
    folder = path.is_dir()
    if folder and sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> InputError:
    """Return the error for a file that cannot be written."""
    return InputError(
        f"cannot write {path}: {error.strerror or error}; free space there or choose another folder"
    )


def _beside(path: Path, ending: str) -> Path:
    """Return a hidden, unique name in the same folder."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{ending}")


NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def lock(path: Path) -> int | None:
    """Lock a file for this process; the file is created if it does not exist.

    Returns:
        The descriptor that holds the lock, for `unlock`; None if another process holds it.

    Raises:
        OSError: the file cannot be opened.
    """
    while True:
        # Not through a link, which would create a file elsewhere.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o644)
        if not _taken(descriptor):
            os.close(descriptor)
            return None
        # The last holder may have removed the file just before: a lock on a removed file excludes
        # nobody.
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def unlock(path: Path, descriptor: int) -> None:
    """Remove a file that this process locked, and release its lock."""
    # Removed before the release, while no other process can hold this very file.
    with suppress(OSError):
        path.unlink()
    os.close(descriptor)


def _taken(descriptor: int) -> bool:
    """Return whether this process got the lock; always true on systems without locks."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error: a file system without locks.
        return not isinstance(error, BlockingIOError)
    return True


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write `data` as indented JSON in its own order, ending with a newline.

    Paths become text; NumPy scalars and 0-d tensors become numbers, arrays and tensors lists.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold; the message names its key.
        TypeError: a value has no JSON form; the message names its key.
        InputError: the file cannot be written.
    """
    text = json.dumps(_plain(data, ""), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def json_content(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` in JSON's own types, as `write_json` writes it.

    A number that is not finite, which JSON cannot hold, becomes None.

    Raises:
        TypeError: a value has no JSON form; the message names its key.
    """
    content: dict[str, Any] = _plain(data, "", finite=False)
    return content


def _plain(value: Any, where: str, *, finite: bool = True) -> Any:
    """Convert `value` to JSON's own types; `where` is its dotted key for messages.

    A number that is not finite raises if `finite` is true, else it becomes None.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        if finite:
            raise ValueError(f"{where or 'the value'} is {value}, which JSON cannot hold")
        return None
    if isinstance(value, Mapping):
        return {
            str(key): _plain(item, f"{where}.{key}".strip("."), finite=finite)
            for key, item in value.items()
        }
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, bytes):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [_plain(item, f"{where}[{i}]", finite=finite) for i, item in enumerate(items)]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where, finite=finite)
    raise TypeError(f"{where or 'the value'} is a {type(value).__name__}, which has no JSON form")
