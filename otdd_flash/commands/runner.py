"""Runs a command's work as Hydra jobs and turns what happens into messages and exit codes."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from otdd_flash.commands.outcome import ERROR_FILE, Outcome
from otdd_flash.errors import ConvergenceError, DataNotice, InputError, NotConvergedWarning
from otdd_flash.json_file import write_json

# Messages go to stderr, so that stdout holds the result only.
messages = Console(stderr=True)

EXIT_DEFECT = 1
EXIT_INPUT = 2
EXIT_NOT_CONVERGED = 3
EXIT_INTERRUPTED = 130

Work = Callable[[DictConfig, Path], None]


def run_job(work: Work, config: DictConfig) -> int:
    """Carry out one job in its run directory.

    Bad input is printed without a traceback. In a multirun every failure is written to error.json
    and the next job runs; in a single run a defect goes on to Hydra, which prints the traceback.

    Returns:
        The job's exit code.
    """
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir)
    (directory / ERROR_FILE).unlink(missing_ok=True)
    with _messages_shown(str(config.log_level)):
        try:
            work(config, directory)
        except InputError as error:
            return _failed(directory, error, EXIT_INPUT)
        except ConvergenceError as error:
            return _failed(directory, error, EXIT_NOT_CONVERGED)
        except Exception as error:
            if hydra.mode == RunMode.RUN:
                raise
            messages.print_exception()
            return _failed(directory, error, EXIT_DEFECT)
    return 0


def run_command(main: Callable[[], None]) -> None:
    """Call Hydra's entry point and leave the process with the jobs' exit code."""
    try:
        main()
    except KeyboardInterrupt:
        messages.print("[bold]interrupted[/]; what had been written is whole")
        sys.exit(EXIT_INTERRUPTED)
    except InputError as error:
        # Raised outside any job: a multirun's summary could not be written.
        messages.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(EXIT_INPUT)
    sys.exit(Outcome.exit_code)


def _failed(directory: Path, error: Exception, exit_code: int) -> int:
    messages.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    record = {"error": str(error), "type": type(error).__name__, "exit_code": exit_code}
    if exit_code == EXIT_DEFECT:
        record["traceback"] = "".join(traceback.format_exception(error))
    try:
        write_json(directory / ERROR_FILE, record)
    except InputError as unwritable:
        messages.print(f"[bold red]error:[/] {escape(str(unwritable))}", highlight=False)
    return exit_code


@contextmanager
def _messages_shown(level: str) -> Iterator[None]:
    """Print notices, warnings and log records on stderr while a job runs."""
    if level not in logging.getLevelNamesMapping():
        known = ", ".join(logging.getLevelNamesMapping())
        messages.print(f"[yellow]notice:[/] unknown log_level {level!r}; known: {known}")
        level = "WARNING"
    handler = RichHandler(console=messages, show_path=False, show_time=False)
    logger = logging.getLogger("otdd_flash")
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", DataNotice)
            warnings.simplefilter("always", NotConvergedWarning)
            warnings.showwarning = _show_warning
            yield
    finally:
        logger.removeHandler(handler)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    match message:
        case NotConvergedWarning():
            label = "[bold red]warning:[/]"
        case DataNotice():
            label = "[yellow]notice:[/]"
        case _:
            label = f"[dim]{escape(category.__name__)}:[/]"
    messages.print(f"{label} {escape(str(message))}", highlight=False, soft_wrap=True)
