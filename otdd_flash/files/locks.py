"""Locks that a process holds on files (flock), so that a killed one leaves none behind."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def lock(path: Path) -> int | None:
    """Lock a file, made if it does not exist, for this process.

    Returns:
        The descriptor that holds the lock, for `unlock`; None where another process has it.

    Raises:
        OSError: the file cannot be opened.
    """
    while True:
        # Not through a link, which would make a file elsewhere.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o644)
        if not _taken(descriptor):
            os.close(descriptor)
            return None
        # Its last holder may have removed the file just before: such a lock keeps nobody out.
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def unlock(path: Path, descriptor: int) -> None:
    """Let others have a file that this process locked, and remove it."""
    # While it is held: nobody else can have locked this very file.
    with suppress(OSError):
        path.unlink()
    os.close(descriptor)


def _taken(descriptor: int) -> bool:
    """Whether nobody else has the lock; where there are no locks, nobody has."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks.
        return True
    return True
