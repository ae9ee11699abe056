"""The files beside a number: each is written for itself, and one that fails costs no other.

They come after `result.json` has been written and the number printed, so that a disk that fills, or
a picture that cannot be drawn, never loses what was computed.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from otdd_flash.errors import IncompleteError, InputError, MissingFileNotice
from otdd_flash.report.figures.fonts import own_style

logger = logging.getLogger(__name__)

# What a report consists of beside the number: nothing, tables, or pictures as well.
CONTENTS = ("none", "table", "full")
PICTURES = (".png", ".gif")

# What draws or writes a file, called as writer(path), by its path.
Writers = dict[Path, Callable[[Path], object]]


@dataclass(frozen=True)
class Report:
    """What became of the files of a report.

    Attributes:
        written: the files that are there, in the order asked for.
        missing: those that could not be written; a notice has said why.
    """

    written: tuple[Path, ...] = ()
    missing: tuple[Path, ...] = ()

    def __add__(self, other: Report) -> Report:
        """What both have written, and what either lacks."""
        return Report(self.written + other.written, self.missing + other.missing)

    def require_complete(self) -> None:
        """Raise an `IncompleteError` that names what is missing, if anything is."""
        if self.missing:
            raise IncompleteError(
                "the result was written, but not "
                f"{', '.join(path.name for path in self.missing)}; the notices say why"
            )


def wanted(writers: Writers, content: str) -> Writers:
    """Return the writers of the files that a report of this content, one of `CONTENTS`, has."""
    if content == "none":
        return {}
    return {
        path: writer
        for path, writer in writers.items()
        if content == "full" or path.suffix not in PICTURES
    }


def write_each(writers: Writers) -> Report:
    """Call every writer with its path; one that fails is a notice, and the next one's turn.

    A file of an earlier report under the same name goes first: beside a new result it would lie.

    Args:
        writers: called one after the other.

    Warns:
        MissingFileNotice: a file could not be written, and why.
    """
    for path in writers:
        # A file that cannot be removed cannot be replaced either, which its writer will say.
        with suppress(OSError):
            path.unlink(missing_ok=True)
    report = Report()
    for path, writer in writers.items():
        try:
            with own_style() if path.suffix in PICTURES else nullcontext():
                writer(path)
        except Exception as error:
            # Of any kind: drawing is not worth the run.
            logger.debug("%s", traceback.format_exc())
            warnings.warn(_reason(path, error), MissingFileNotice, stacklevel=2)
            report += Report(missing=(path,))
        else:
            report += Report(written=(path,))
    return report


def _reason(path: Path, error: Exception) -> str:
    if isinstance(error, InputError):
        return str(error)
    return f"cannot draw {path} ({type(error).__name__}: {error})"
