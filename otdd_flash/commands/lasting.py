"""Standard output that outlasts its reader, as in `python -m otdd_flash.distance | head -1`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let standard output and standard error outlast their readers."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (Lasting(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


class Lasting(io.TextIOBase):
    """A text stream; once nobody reads it any more, what is written to it goes nowhere.

    A run goes on, and its files are written.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, or nothing without a reader."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Flush the stream, or nothing without a reader."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._give_up()

    def _give_up(self) -> None:
        """Lead the stream nowhere, also for what it still holds and for processes started later."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As the stream's."""
        return self._stream.encoding

    def fileno(self) -> int:
        """As the stream's."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """As the stream's."""
        return self._stream.isatty()
