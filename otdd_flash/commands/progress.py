"""Progress of a command on a terminal: one line per phase, none when output goes to a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from otdd_flash.commands.messages import messages
from otdd_flash.flows.history import StepRecord
from otdd_flash.solver.options import SolverOptions


class Phases:
    """Shows what a command is doing and measures how long each phase takes.

    Attributes:
        seconds: wall time of every finished phase, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=messages,
            transient=True,
            disable=not messages.is_terminal,
        )

    def __enter__(self) -> Phases:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def phase(self, name: str, title: str) -> Iterator[Callable[[int, int], None]]:
        """Run a phase, which reports (done, total); phases of one name add up their seconds."""
        task = self._bars.add_task(title, total=None, note="")
        started = time.perf_counter()
        try:
            yield lambda done, total: self._bars.update(
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
            yield lambda done, total: self._bars.update(
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
            yield lambda record: self._bars.update(
                task,
                completed=record.step,
                note=f"step {record.step:,} of {steps:,}: {record.described}",
            )
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def solving(
        self, title: str, options: SolverOptions
    ) -> Iterator[Callable[[str, int, float], None]]:
        """Show the solver's progress: term, iteration and marginal error."""
        task = self._bars.add_task(title, total=None, note="")
        goal = f" (to {options.asked_tolerance:.0e})" if options.bound_width is None else ""
        try:
            yield lambda term, iteration, error: self._bars.update(
                task,
                note=f"{term} {iteration:,}: marginal error {error:.1e}{goal}",
            )
        finally:
            self._bars.remove_task(task)
