"""The folder of a study: study.json holds its tasks and resolved settings.

`enter` makes a folder a study's folder or checks that it belongs to the same study; `Study.run`
(`study.study`) calls it. `study.setup` writes VERSION_KEY into the summary, and `commands.study`
looks for STUDY_FILE.

Several processes may enter at once, so the check and the write of study.json happen under a lock.
study.json also keeps what `auto` was resolved to, so that a resumed run uses the same values. Later
runs read the keys of study.json and the names of both files, so these must stay.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from otdd_flash.errors import InputError
from otdd_flash.files.atomic import lock, unlock, write_json
from otdd_flash.files.written_by import other_version
from otdd_flash.solver.term.epsilon import once_default

STUDY_FILE = "study.json"
LOCK_FILE = ".study.lock"
# Key of study.json: the version of `otdd_flash.fingerprint` that digested the tasks.
VERSION_KEY = "fingerprint_version"
SECONDS_APART = 0.05
# What is in a folder before a study begins: Hydra's folder, the lock of `commands.outcome`, and the
# lock of this module.
NO_CONTENT = (".hydra", ".lock", LOCK_FILE)


def enter(
    folder: str | Path,
    summarize: Callable[[Mapping[str, Any] | None], dict[str, Any]],
    *,
    shared: bool,
) -> dict[str, Any]:
    """Make a folder the folder of a study, or check that it is.

    Args:
        folder: created if it does not exist.
        summarize: called with the content of study.json, or with None for a new study; returns
            the summary of the study to run, the content that study.json must have. Settings that
            are `auto` take the values of the given content.
        shared: whether the folder may already hold a study, to be continued.

    Returns:
        The summary of the study.

    Raises:
        InputError: the folder holds a study and may not, holds something else, or holds a study
            with other settings.
    """
    folder = Path(folder)
    with _alone(folder):
        known = read_study(folder)
        if known is None:
            _check_empty(folder)
        elif not shared:
            raise InputError(
                f"{folder} holds a study already; give study.resume=true (resume=True) to go on "
                "with it, or another folder"
            )
        # In JSON's own types, with lists for tuples, so that it can equal what was read.
        summary = json.loads(json.dumps(summarize(known)))
        if known is None:
            write_json(folder / STUDY_FILE, summary)
        elif known.get(VERSION_KEY) != summary.get(VERSION_KEY):
            by = other_version(known.get("versions", {}))
            raise InputError(
                f"{folder} holds a study of another version of otdd_flash, whose fingerprints of "
                f"datasets cannot be compared with today's{by}; choose another folder"
            )
        elif different := sorted(_different(known, summary)):
            shown = ", ".join(different[:6]) + (", ..." if len(different) > 6 else "")
            # If only the default of earlier versions differs, the message says how to give it.
            earlier = once_default(known.get("epsilon")) if "epsilon" in different else ""
            raise InputError(
                f"{folder} holds a study with other settings: {shown} differ; give it the same, "
                f"or another folder{earlier}"
            )
    return dict(summary)


def read_study(folder: Path) -> dict[str, Any] | None:
    """Return the content of study.json; None if there is no such file.

    Raises:
        InputError: it is damaged.
    """
    path = folder / STUDY_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); choose another folder") from error
    return content


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process has locked the folder, and lock it."""
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while (descriptor := lock(path)) is None:
            time.sleep(SECONDS_APART)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror or error}); free space there or choose another "
            "folder"
        ) from error
    try:
        yield
    finally:
        unlock(path, descriptor)


def _check_empty(folder: Path) -> None:
    found = sorted(path.name for path in folder.iterdir() if path.name not in NO_CONTENT)
    # A failed command leaves error.json; a new attempt may begin in its folder.
    if found and found != ["error.json"]:
        raise InputError(
            f"{folder} is not a study: it holds {found[0]} and no {STUDY_FILE}; choose an empty "
            "folder"
        )


def _different(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield the dotted keys at which two summaries differ; for versions of software both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {*one, *other}:
            yield from _different(one.get(key), other.get(key), f"{where}.{key}".strip("."))
    elif one != other:
        yield f"{where} ({one} then, {other} now)" if where.startswith("versions.") else where
