"""Ctrl-C at rank 0, which waits until ranks are done with what they do together.

An exception in the middle of an order leaves the other ranks there, where they wait for what does
not come. So Ctrl-C is noted meanwhile and comes when the order is done; pressed twice, it comes at
once. `exchange` makes `Interrupts`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Holds Ctrl-C back while ranks do something together; in the main thread, which hears it."""

    def __init__(self) -> None:
        self._before: Any = None
        self._pressed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Note Ctrl-C, which comes at the end."""
        before = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        if self._before is not None or before is None or not main:
            yield
            return
        self._before = before
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            self._before = None
            signal.signal(signal.SIGINT, before)
            self._come()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Let Ctrl-C come at any time, in what is held."""
        if self._before is None:
            yield
            return
        signal.signal(signal.SIGINT, self._before)
        try:
            self._come()
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pressed:
            self._pressed = False
            raise KeyboardInterrupt
        self._pressed = True

    def _come(self) -> None:
        if self._pressed:
            self._pressed = False
            signal.raise_signal(signal.SIGINT)
