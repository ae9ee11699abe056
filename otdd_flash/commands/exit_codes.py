"""The exit codes of a command's process, and limits of the system that end it; 0 means done.

`commands.outcome` notes the code of each job, and `commands.start` ends the process with the
highest. `commands.ranks` and `commands.study` use the codes too, and `study.units` repeats three of
them. `commands.outcome` and `commands.hydra_errors` call `limit_of_the_system`. Users' scripts rely
on the numbers, which must not change.
"""

from __future__ import annotations

import errno
import os

# A defect, which is printed with its traceback.
DEFECT = 1
BAD_INPUT = 2
# `solver.require_convergence` was set and not met.
NOT_CONVERGED = 3
# The result was written, but a picture, another file or output could not be.
INCOMPLETE = 4
INTERRUPTED = 130

# The highest exit code of the jobs that this process ran. A multirun also reads the codes in the
# error.json of its jobs, which cannot be written on a full disk.
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
# Words in errors of libraries, of other types than OSError, that come from these limits.
WORDS = {os.strerror(number): number for number in (errno.EMFILE, errno.ENFILE, errno.ENOSPC)} | {
    os.strerror(errno.ENOMEM): errno.ENOMEM,
    "failed to map segment from shared object": errno.ENOMEM,
    "can't start new thread": errno.ENOMEM,
}


def note(code: int) -> None:
    """Record a job's exit code if it is the highest so far."""
    global highest
    highest = max(highest, code)


def limit_of_the_system(error: BaseException) -> str | None:
    """Return the limit of the system that an error comes from and the way out; None for others.

    Libraries report such limits by errors of other types, such as an ImportError, with the system's
    words.
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
