"""The messages of a running command on standard error, its progress, and Ctrl-C.

`commands.start`, `commands.outcome` and `commands.ranks` print errors, warnings, notices and log
records through it; `commands.results`, `commands.adapt` and `commands.study` print tables and lines
of results by `Terminal`. conf/runtime.yaml and `commands.arguments` name `SafeFormatter` by its
path, which must stay. Standard output holds the result only, because scripts read it. Texts may
come from data or arguments, so nothing printed here may act on the terminal: no markup, no escapes.

`Phases` shows progress: bars on a terminal; elsewhere a line when a stage begins, and then at most
one per minute. The work of the six commands, `commands.sides` and `commands.results` use it;
`commands.start.run_work` enters `importing` for all six entry points. All seconds, in these lines,
in tables and in result.json, come from one clock, which starts with the command or, for later jobs
of a multirun, with the job. The phases `import`, `load`, `extract` and `sampling` are keys of
result.json, and must have the same names here and at the callers.

`commands.adapt` and `commands.study` enter `interrupts_noted` and hand the function that it yields
to the run. The run calls it between two steps and ends early if it returns True, so that what was
reached can be written: the first Ctrl-C ends a run after the current step, the second at once.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from otdd_flash.commands.start import dispensable, job_under_way
from otdd_flash.errors import DataNotice, InputError, MissingFileNotice, NotConvergedWarning
from otdd_flash.shown import display, sentence

if TYPE_CHECKING:
    from otdd_flash.flows.result import StepRecord
    from otdd_flash.solver.schedules import Schedule


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


# Seconds between two lines of text of one stage.
SECONDS_APART = 60.0
# The seconds over which the speed of counted work is measured.
SPEED_SECONDS = 600.0


class Phases:
    """The display of what a command is doing, which also times each phase.

    Attributes:
        seconds: wall time of every finished phase of the job, by name, shared by all `Phases` of
            the job.
    """

    def __init__(self) -> None:
        self._job = job_under_way()
        self.seconds = self._job.seconds
        self._last_line = -math.inf
        # By task, the seconds that a solve still takes; those of counted work are estimated by
        # the bars.
        self._rest: dict[TaskID, float] = {}
        self._bars = Progress(
            # ASCII characters if the encoding lacks others.
            SpinnerColumn("line" if messages.options.ascii_only else "dots"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            console=messages,
            transient=True,
            disable=not messages.is_interactive,
            get_time=time.perf_counter,
            speed_estimate_period=SPEED_SECONDS,
        )

    def __enter__(self) -> Phases:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def all_seconds(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of the job until now, in the order of the work.

        Args:
            parts: seconds of the computation by name; imports, loading and sampling are known.
        """
        loading, done = ("import", "load", "extract"), self.seconds
        known = {name: done[name] for name in loading if name in done} | dict(parts)
        if "sampling" in done:
            known["sampling"] = done["sampling"]
        spent = time.perf_counter() - self._job.started
        return {**known, "other": max(spent - sum(known.values()), 0.0)}

    @contextmanager
    def phase(self, name: str, title: str) -> Iterator[Callable[[int, int], None]]:
        """Time a phase and yield a function for reports (done, total).

        Phases of the same name add their seconds.
        """
        started = time.perf_counter()
        try:
            with self._task(title) as task:
                self._say()
                yield lambda done, total: self._update(
                    task, completed=done, total=total, note=f"{done:,} of {total:,}"
                )
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def counting(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """Show a part of a phase, from the first to the last call of the yielded function."""
        begun = False

        def report(done: int, total: int) -> None:
            nonlocal begun
            begins, begun = not begun and done < total, True
            note = f"{done:,} of {total:,}"
            self._update(task, completed=done, total=total, note=note, visible=done < total)
            if begins:
                self._say()

        with self._task(title, visible=False) as task:
            yield report

    @contextmanager
    def flowing(self, steps: int) -> Iterator[Callable[[StepRecord], None]]:
        """Show the steps of a flow: their number, and the current objective."""
        with self._task("flowing", total=steps) as task:
            self._say()
            yield lambda record: self._update(
                task,
                completed=record.step,
                note=f"step {record.step:,} of {steps:,}: {record.described}",
            )

    @contextmanager
    def solving(self, title: str, options: Schedule) -> Iterator[Callable[[str, int, float], None]]:
        """Show the solver's progress: term, iteration and marginal error, or round and width."""
        from otdd_flash.solver.schedules import Converged, Exact

        alone = not self._bars.tasks
        exact = isinstance(options, Exact)
        to_width = exact or (isinstance(options, Converged) and options.bound_width is not None)
        shown = "width" if exact else "marginal error"
        goal = "" if to_width else f" (to {options.asked_tolerance:.0e})"
        solved = ""
        errors: list[tuple[float, float]] = []

        def report(term: str, iteration: int, error: float) -> None:
            nonlocal solved, errors
            if term != solved:
                solved, errors = term, []
            errors.append((time.perf_counter(), error))
            self._rest[task] = math.nan if to_width else _rest(errors, options.asked_tolerance)
            self._update(task, note=f"{term} {iteration:,}: {shown} {error:.1e}{goal}")

        with self._task(title) as task:
            if alone:
                self._say()
            yield report

    @contextmanager
    def _task(
        self, title: str, total: int | None = None, *, visible: bool = True
    ) -> Iterator[TaskID]:
        """Show a task of the bars within a context."""
        task = self._bars.add_task(display(title), total=total, visible=visible, note="")
        try:
            yield task
        finally:
            self._rest.pop(task, None)
            self._bars.remove_task(task)

    def _update(self, task: TaskID, **fields: Any) -> None:
        self._bars.update(task, **fields)
        if time.perf_counter() - self._last_line >= SECONDS_APART:
            self._say()

    def _say(self) -> None:
        """Print the current stages as a line, if there is no terminal."""
        if messages.is_interactive:
            return
        self._last_line = time.perf_counter()
        with dispensable():
            say("progress", f"{self._last_line - self._job.started:.0f} s, {self._line()}", "dim")

    def _line(self) -> str:
        parts = []
        for task in self._bars.tasks:
            if task.visible:
                part = f"{task.description} {task.fields['note']}".strip()
                left = self._rest.get(task.id, task.time_remaining) or math.nan
                # Finished work has no rest, and NaN is not positive.
                parts.append(f"{part}, {_duration(left)} left at this rate" if left > 0 else part)
        return "; ".join(parts)


@contextmanager
def importing() -> Iterator[None]:
    """Show what a job imports while it does so, which takes seconds the first time."""
    with Phases() as phases:
        if "torch" in sys.modules:
            yield
            return
        with phases.phase("import", "importing torch"):
            import torch  # noqa: F401
        with phases.phase("import", "importing scipy and otdd_flash"):
            yield


def _rest(errors: list[tuple[float, float]], goal: float) -> float:
    """Estimate how many seconds a solve still takes, from (time, error) so far; NaN if unknown.

    The logarithm of the error decreases about linearly, more slowly towards the end. The rate of
    the second half of the time since the term began is extrapolated.
    """
    now, error = errors[-1]
    half = (errors[0][0] + now) / 2
    then, before = next(entry for entry in reversed(errors) if entry[0] <= half)
    if not (0 < goal < error < before < math.inf) or now <= then:
        return math.nan
    return (now - then) * math.log(error / goal) / math.log(before / error)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


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
