"""Files that appear whole or not at all."""

from __future__ import annotations

import os
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
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; "
            "free space there or choose another folder"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 with its line ends as they are, whole or not at all."""
    # Lone surrogates (undecodable file names as class names) become escapes instead of an error.
    content = text.encode("utf-8", errors="backslashreplace")
    with replacing(path) as partial:
        partial.write_bytes(content)
