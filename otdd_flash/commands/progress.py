"""Progress of a command: a line per phase on a terminal, elsewhere a line of text a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from otdd_flash.commands.messages import messages, say
from otdd_flash.commands.streams import dispensable
from otdd_flash.flows.history import StepRecord
from otdd_flash.shown import display
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged

# Between two lines of text, and before the first: what is shorter says nothing.
SECONDS_APART = 1.0


class Phases:
    """Shows what a command is doing and measures how long each phase takes.

    Attributes:
        seconds: wall time of every finished phase, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = self._last_line = time.perf_counter()
        self._bars = Progress(
            # Of ASCII characters if the encoding lacks others.
            SpinnerColumn("line" if messages.options.ascii_only else "dots"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            console=messages,
            transient=True,
            disable=not messages.is_interactive,
        )

    def __enter__(self) -> Phases:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def phase(self, name: str, title: str) -> Iterator[Callable[[int, int], None]]:
        """Run a phase, which reports (done, total); phases of one name add up their seconds."""
        task = self._bars.add_task(display(title), total=None, note="")
        started = time.perf_counter()
        try:
            yield lambda done, total: self._update(
                task, completed=done, total=total, note=f"{done:,} of {total:,}"
            )
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self._bars.remove_task(task)

    @contextmanager
    def counting(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """Show a part of a phase from its first to its last report of (done, total)."""
        task = self._bars.add_task(title, total=None, visible=False, note="")
        try:
            yield lambda done, total: self._update(
                task,
                completed=done,
                total=total,
                note=f"{done:,} of {total:,}",
                visible=done < total,
            )
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def flowing(self, steps: int) -> Iterator[Callable[[StepRecord], None]]:
        """Show the steps of a flow: how many, and the objective so far."""
        task = self._bars.add_task("flowing", total=steps, note="")
        try:
            yield lambda record: self._update(
                task,
                completed=record.step,
                note=f"step {record.step:,} of {steps:,}: {record.described}",
            )
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def solving(self, title: str, options: Schedule) -> Iterator[Callable[[str, int, float], None]]:
        """Show the solver's progress: term, iteration and marginal error."""
        task = self._bars.add_task(title, total=None, note="")
        to_width = isinstance(options, Converged) and options.bound_width is not None
        goal = "" if to_width else f" (to {options.asked_tolerance:.0e})"
        try:
            yield lambda term, iteration, error: self._update(
                task,
                note=f"{term} {iteration:,}: marginal error {error:.1e}{goal}",
            )
        finally:
            self._bars.remove_task(task)

    def _update(self, task: TaskID, **fields: Any) -> None:
        self._bars.update(task, **fields)
        now = time.perf_counter()
        if not messages.is_interactive and now - self._last_line >= SECONDS_APART:
            self._last_line = now
            with dispensable():
                say("progress", f"{now - self._started:.0f} s, {self._line()}", "dim")

    def _line(self) -> str:
        """What all parts of the work are doing."""
        shown = [task for task in self._bars.tasks if task.visible]
        return "; ".join(f"{task.description} {task.fields['note']}".strip() for task in shown)
