"""Claims on output directories: each belongs to one living process, and results are kept.

A claim is a lock that the process holds (flock), so a killed process leaves none behind. It is
taken before Hydra writes its configuration into the directory. `commands.outcome` claims
directories, `commands.start` releases all claims at the end, and `commands.ranks` reads
`CHECKPOINT`. A directory with a result is only claimed if the user allows it to be replaced. The
module must not import torch, because `commands.start` imports it at the end of every command, also
after help; so it repeats some file names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from otdd_flash.errors import InputError
from otdd_flash.files.atomic import lock, unlock

LOCK_FILE = ".lock"
CHECKPOINT = "checkpoint.json"
# Files of a run, and of a multirun, that are worth keeping.
STUDY = "study.json"
OF_A_RUN = ("result.json", "result.safetensors", CHECKPOINT, STUDY)
OF_A_MULTIRUN = ("summary.csv", *(f"*/{name}" for name in OF_A_RUN))

# Space for the files that Hydra writes before a job starts.
PROBE_BYTES = 2**16

# The locks of this process, by directory.
_held: dict[Path, int] = {}


def claim(
    folder: Path, key: str, *, replace: bool, worth_keeping: Sequence[str] = OF_A_RUN
) -> None:
    """Claim a directory for this process until it is released or the process ends.

    Args:
        folder: created if it does not exist.
        key: the setting that names it, for messages.
        replace: whether files worth keeping may be replaced.
        worth_keeping: patterns of such files.

    Raises:
        InputError: another process holds it, it holds a result, or it cannot be written.
    """
    try:
        if (place := folder.resolve()) in _held:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
        descriptor = lock(folder / LOCK_FILE)
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError and ValueError: circular links, and names that no folder can have.
        raise InputError(
            f"cannot write to {key}={folder} ({getattr(error, 'strerror', None) or error}); "
            f"free space there or choose another folder with {key}=DIR"
        ) from error
    if descriptor is None:
        raise InputError(
            f"{key}={folder} is in use by another run that has not ended; choose another folder "
            f"with {key}=DIR, or wait"
        )
    _held[place] = descriptor
    found = chain.from_iterable(folder.glob(pattern) for pattern in worth_keeping)
    if not replace and (kept := next(found, None)):
        release(folder)
        goes_on = "".join(
            f", {setting}=true to go on"
            for file, setting in ((CHECKPOINT, "flow.resume"), (STUDY, "study.resume"))
            if (kept.parent / file).exists()
        )
        raise InputError(
            f"{key}={folder} holds a result already, {kept.relative_to(folder)}; choose another "
            f"folder with {key}=DIR, or give overwrite=true to replace it{goes_on}"
        )


def release(folder: Path) -> None:
    """Release a directory that this process claimed."""
    place = folder.resolve()
    descriptor = _held.pop(place)
    unlock(place / LOCK_FILE, descriptor)


def release_all() -> None:
    """Release every directory that this process claimed."""
    for place in [*_held]:
        release(place)


@contextmanager
def claimed(folder: Path, key: str, *, replace: bool) -> Iterator[None]:
    """Claim a directory within a context; a claim made before remains."""
    before = folder.resolve() in _held
    claim(folder, key, replace=replace)
    try:
        yield
    finally:
        if not before:
            release(folder)
