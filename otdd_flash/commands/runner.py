"""Runs a command's work as Hydra jobs and turns what happens into messages and exit codes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from otdd_flash.commands import exit_codes
from otdd_flash.commands.claims import claimed
from otdd_flash.commands.hydra_errors import check_references
from otdd_flash.commands.messages import messages, say_error, shown
from otdd_flash.commands.outcome import ERROR_FILE, Outcome, may_replace, may_share
from otdd_flash.commands.ranks import named
from otdd_flash.commands.start import job_ended
from otdd_flash.commands.streams import unheard
from otdd_flash.errors import ConvergenceError, IncompleteError, InputError, LostRankError
from otdd_flash.files.json_file import write_json
from otdd_flash.importing import user_traceback
from otdd_flash.shown import hidden

Work = Callable[[DictConfig, Path], None]


def run_job(work: Work, config: DictConfig) -> int:
    """Carry out one job in its run directory, and note its exit code for the process.

    Bad input is printed without a traceback, a defect with one. Every failure is written to
    error.json, and in a multirun the next job runs.

    Returns:
        The job's exit code.
    """
    try:
        code = _ended_with(work, config, Path(HydraConfig.get().runtime.output_dir))
    finally:
        job_ended()
    Outcome.exit_code = max(Outcome.exit_code, code)
    return code


def _ended_with(work: Work, config: DictConfig, directory: Path) -> int:
    try:
        if may_share(config):
            return _carried_out(work, config, directory)
        with claimed(directory, "hydra.sweep.subdir", replace=may_replace(config)):
            return _carried_out(work, config, directory)
    except InputError as error:
        # The directory is another job's, which writes there.
        say_error(error)
        return exit_codes.BAD_INPUT


def _carried_out(work: Work, config: DictConfig, directory: Path) -> int:
    try:
        # One that cannot be removed cannot be replaced either, as what follows will say.
        with suppress(OSError):
            (directory / ERROR_FILE).unlink(missing_ok=True)
        check_references(config)
        with shown(str(config.log_level)):
            work(config, directory)
        if (stream := unheard()) is not None:
            raise IncompleteError(
                f"the result was written to {directory}, but {stream} did not take all that was to "
                "be written to it"
            )
    except InputError as error:
        return _failed(directory, error, exit_codes.BAD_INPUT)
    except ConvergenceError as error:
        return _failed(directory, error, exit_codes.NOT_CONVERGED)
    except IncompleteError as error:
        return _failed(directory, error, exit_codes.INCOMPLETE)
    except LostRankError as error:
        return _failed(directory, named(error), exit_codes.DEFECT)
    except Exception as error:
        if (limit := exit_codes.limit_of_the_system(error)) is not None:
            return _failed(directory, InputError(limit), exit_codes.BAD_INPUT)
        messages.print_exception()
        return _failed(directory, error, exit_codes.DEFECT)
    return 0


def _failed(directory: Path, error: Exception, exit_code: int) -> int:
    say_error(error)
    if trace := user_traceback(error):
        messages.print(trace, soft_wrap=True)
    record = {"error": hidden(str(error)), "type": type(error).__name__, "exit_code": exit_code}
    if exit_code == exit_codes.DEFECT:
        record["traceback"] = hidden("".join(traceback.format_exception(error)))
    try:
        write_json(directory / ERROR_FILE, record)
    except InputError as unwritable:
        say_error(unwritable)
    return exit_code
