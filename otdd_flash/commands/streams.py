"""Standard streams that cost no result: without a reader, full, closed, or of a narrow encoding.

A command runs inside `guarded_streams`, where writing never raises. A reader that has gone, as in
`| head -1`, is no failure. What any other failure keeps from being written, `unheard` reports, and
the command ends with exit code 4 at least. A closed standard output is a failure once something is
to be written there; a closed standard error is a request for silence.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

STREAMS = (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))
NAMES = {"stdout": "standard output", "stderr": "standard error"}

# The symbols of tables and titles in ASCII, for encodings that lack them.
SUBSTITUTES = {"→": "->", "×": "x", "≤": "<=", "±": "+-", "−": "-", "…": "..."}
SUBSTITUTE = "otdd_flash.substitute"

# Numbers of columns that a table can be read in; the terminal wraps what is wider than itself.
NARROWEST, WIDEST = 40, 10_000


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Guard standard output and standard error, and open what is closed of all three streams.

    Without that, the next file that is opened would get the number of a standard stream, and what
    other libraries print would be written into it.
    """
    closed = _open_closed()
    _settle_width()
    before = sys.stdin, sys.stdout, sys.stderr
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    # Nobody reads a closed standard error, so nothing is lost there.
    missing = OSError(errno.EBADF, os.strerror(errno.EBADF)) if "stdout" in closed else None
    try:
        with _guarded("stdout", missing), _guarded("stderr", None):
            yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def unheard() -> str | None:
    """Return which stream has not written all that it was given, and why; None if both have."""
    for key, name in NAMES.items():
        stream = getattr(sys, key)
        if isinstance(stream, Guarded):
            stream.flush()
            if stream.lost is not None:
                return f"{name} ({getattr(stream.lost, 'strerror', None) or stream.lost})"
    return None


@contextmanager
def dispensable() -> Iterator[None]:
    """Count nothing as lost that is not written to standard error here, such as progress."""
    stream = sys.stderr
    before = stream.lost if isinstance(stream, Guarded) else None
    yield
    if isinstance(stream, Guarded):
        stream.lost = before


class Guarded(io.TextIOBase):
    """A text stream whose failures are kept instead of raised; the rest then goes nowhere.

    Attributes:
        lost: why something was not written; None while all was, or only a reader has gone.

    Args:
        stream: what is written to.
        failure: why all that is written is lost, if that is so from the start.
    """

    def __init__(self, stream: TextIO, failure: Exception | None) -> None:
        self._stream = stream
        self._failure = failure
        self.lost: Exception | None = None

    def write(self, text: str) -> int:
        """Write text as far as that is possible."""
        if text:
            self.lost = self.lost or self._failure
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._lead_nowhere(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream as far as that is possible."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lead_nowhere(error)

    def _lead_nowhere(self, error: Exception) -> None:
        """Lead the stream nowhere, also for what it still holds and for processes started later."""
        if not isinstance(error, ConnectionError):
            self._failure = self.lost = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self._stream.fileno())
        except (OSError, ValueError):
            # It has no number, or has been closed.
            self._stream = os.fdopen(nowhere, "w", encoding="utf-8")
        else:
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


def _open_closed() -> set[str]:
    """Open the null device in place of closed standard streams; return which these are."""
    closed = set()
    for number, (name, flags) in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, flags), True)
            closed.add(name)
    return closed


def _settle_width() -> None:
    """Drop a COLUMNS or LINES in which nothing can be shown, which rich would take at its word."""
    for name, least in (("COLUMNS", NARROWEST), ("LINES", 1)):
        given = os.environ.get(name)
        if given is None:
            continue
        try:
            number = int(given)
        except ValueError:
            number = 0
        if number < 1 or number > WIDEST:
            del os.environ[name]
        elif number < least:
            os.environ[name] = str(least)


@contextmanager
def _guarded(name: str, failure: Exception | None) -> Iterator[None]:
    """Guard one stream, in which characters that its encoding lacks are replaced."""
    stream: Any = getattr(sys, name)
    number = 1 if name == "stdout" else 2
    if stream is None:
        stream = os.fdopen(number, "w", encoding="utf-8", closefd=False)
    handler = getattr(stream, "errors", None)
    with suppress(AttributeError, OSError, ValueError):
        stream.reconfigure(errors=SUBSTITUTE)
    guarded = Guarded(stream, failure)
    setattr(sys, name, guarded)
    try:
        yield
    finally:
        guarded.flush()
        with suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors=handler)


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """Replace what cannot be encoded by ASCII: symbols by similar ones, the rest by its escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    texts = (
        SUBSTITUTES.get(one, one.encode("ascii", "backslashreplace").decode()) for one in characters
    )
    return "".join(texts), error.end


codecs.register_error(SUBSTITUTE, _substitute)
