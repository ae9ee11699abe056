"""The exit codes of a command's process, and limits of the system that end it; 0 means done.

Start, outcome, ranks and the study command use the codes; outcome and the sentences about Hydra's
errors use `limit_of_the_system`. Users' scripts rely on the numbers, which must not change.
"""

from __future__ import annotations

import errno
import os

DEFECT = 1
BAD_INPUT = 2
NOT_CONVERGED = 3
# The result was written, but another file could not be.
INCOMPLETE = 4
INTERRUPTED = 130

# The highest exit code of the jobs of this process: a full disk takes no error.json to say it.
highest = 0

# Limits of the system that can end a process anywhere, with what to do about them.
LIMITS = {
    errno.EMFILE: "allow this process more open files (ulimit -n 1024)",
    errno.ENFILE: "end other processes, or raise the limit of the system",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.ENOMEM: "end what else takes memory, or take fewer rows with max_samples=N",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose another folder, or allow it",
    errno.EPERM: "choose another folder, or allow it",
    errno.EIO: "look after the disk",
}
# Texts by which errors of other types, from libraries, refer to these limits.
WORDS = {os.strerror(number): number for number in (errno.EMFILE, errno.ENFILE, errno.ENOSPC)} | {
    os.strerror(errno.ENOMEM): errno.ENOMEM,
    "failed to map segment from shared object": errno.ENOMEM,
    "can't start new thread": errno.ENOMEM,
}


def note(code: int) -> None:
    """Raise the exit code of the process to that of a job."""
    global highest
    highest = max(highest, code)


def limit_of_the_system(error: BaseException) -> str | None:
    """Return which limit of the system an error comes from, and the way out; None for others.

    Libraries raise other errors for it, such as an ImportError, with the system's words.
    """
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        words = f"memory is short ({text})" if text else "memory is short"
        return f"{words}; {LIMITS[errno.ENOMEM]}"
    if isinstance(error, OSError) and error.errno in LIMITS:
        where = f" at {error.filename}" if error.filename else ""
        return f"{os.strerror(error.errno)}{where}; {LIMITS[error.errno]}"
    if isinstance(error, OSError | ImportError | RuntimeError):
        for words, number in WORDS.items():
            if words in text:
                return f"{text}; {LIMITS[number]}"
    return None
