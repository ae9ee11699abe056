"""Ctrl-C in a long command: the first ends it after the current step, the second at once.

`commands.adapt` and `commands.study` enter `interrupts_noted` and hand its function to the run,
which asks it between steps whether to end, so that what was reached can be written.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from otdd_flash.commands.messages import say


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; pressed twice, it interrupts."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread receives signals.
        yield lambda: False
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        say("notice", "ending after this step; Ctrl-C again ends at once", "yellow")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
