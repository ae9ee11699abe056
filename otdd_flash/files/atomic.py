"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from otdd_flash.errors import InputError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, else it is removed.

    An interruption at any moment leaves the old file, or none. Missing folders are made.

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
    """Yield an empty temporary folder beside `path`; on success it becomes `path`, else it is gone.

    What `path` was before stays until the new folder is complete, and is put back if the exchange
    fails. No system call exchanges two folders everywhere: a process killed between the two renames
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
                # What was a link to a folder elsewhere, which stays as it is.
                left.unlink()
            shutil.rmtree(left, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 with its line ends as they are, whole or not at all."""
    # Lone surrogates (undecodable file names as class names) become escapes instead of an error.
    content = text.encode("utf-8", errors="backslashreplace")
    with replacing(path) as partial:
        partial.write_bytes(content)


def reach_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk.

    Raises:
        OSError: they do not get there.
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
    """A hidden name in the same folder that nothing else has."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{ending}")
