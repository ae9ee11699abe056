"""The messages of a command: errors, warnings, notices and log records, on standard error.

`commands.start`, `commands.outcome`, `commands.progress` and `commands.ranks` print messages
through it; `commands.results` and the work of the commands (`commands.adapt`, `commands.mix`, ...)
print tables and lines of results by `Terminal`. conf/runtime.yaml names `SafeFormatter` by its
path, which must stay. Standard output holds the result only, because scripts read it. Texts may
come from data or arguments, so nothing printed here may act on the terminal: no markup, no escapes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from otdd_flash.errors import DataNotice, InputError, MissingFileNotice, NotConvergedWarning
from otdd_flash.shown import display, sentence


class Terminal(Console):
    """A console that ignores markup and shows control and invisible characters as escapes."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render an object as rich does, with text that is safe to print."""
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=_safe(part.text))


def _safe(text: str) -> str:
    """Return text with its line ends, but without other control characters."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "\n".join(display(line, None) for line in text.split("\n"))


# Messages go to stderr, so that stdout holds the result only.
messages = Terminal(stderr=True)

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
STYLES = {"debug": "dim", "info": "dim", "warning": "yellow"}


def say(label: str, text: object, style: str) -> None:
    """Print one message in one line, however long, so that paths stay whole."""
    line = Text.assemble((f"{label}:", style), f" {sentence(text)}")
    messages.print(line, soft_wrap=True)


@contextmanager
def shown(level: str) -> Iterator[None]:
    """Print notices, warnings and log records of the package while a job runs.

    Raises:
        InputError: `level` is not one of `LOG_LEVELS`, in upper or lower case.
    """
    if level.upper() not in LOG_LEVELS:
        raise InputError(f"unknown log_level {level!r}; choose one of: {', '.join(LOG_LEVELS)}")
    logger, handler = logging.getLogger("otdd_flash"), _Shown()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    # Hydra's handler at the root would print every record again.
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            for said in (MissingFileNotice, NotConvergedWarning):
                warnings.simplefilter("always", said)
            # Equal notices, such as those about many rows, are shown once.
            warnings.simplefilter("default", DataNotice)
            warnings.showwarning = show_warning
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class SafeFormatter(logging.Formatter):
    """The formatter of Hydra's log lines, which repeat arguments, that is safe for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return _safe(super().format(record).expandtabs(4))


class _Shown(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        label = record.levelname.lower()
        say(label, record.getMessage(), STYLES.get(label, "bold red"))


def show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print a warning in one line; it replaces `warnings.showwarning`."""
    match message:
        case NotConvergedWarning():
            say("warning", message, "bold red")
        case DataNotice() | MissingFileNotice():
            say("notice", message, "yellow")
        case _:
            say(category.__name__, message, "dim")
