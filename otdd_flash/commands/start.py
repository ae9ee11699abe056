"""How the process of a command begins and ends.

Nothing is imported before it is needed: help is shown without torch, and Ctrl-C is heard from the
start, also while Hydra and torch are imported.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from otdd_flash.commands import exit_codes
from otdd_flash.commands.ranks import launched, together
from otdd_flash.commands.streams import guarded_streams, unheard
from otdd_flash.errors import InputError

if TYPE_CHECKING:
    from omegaconf import DictConfig

FULL_ERROR = "HYDRA_FULL_ERROR"
MULTIRUN = ("-m", "--multirun")


@dataclass
class Job:
    """The running job, with the clock that its progress and its results share.

    Attributes:
        started: when it began, by `time.perf_counter`: the first with the command.
        seconds: wall time of its finished phases, by name.
    """

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)


_job: Job | None = None


def job_under_way() -> Job:
    """Return the job under way, which begins now if there is none."""
    global _job
    _job = _job or Job()
    return _job


def job_ended() -> None:
    """The next job begins when it is first asked for."""
    global _job
    _job = None


def run_hydra(job: Callable[[DictConfig], int], config_name: str) -> None:
    """Hand the arguments of this process to Hydra, which runs `job` for every configuration.

    Raises:
        InputError: an argument is none that Hydra could understand as it is meant.
    """
    import hydra
    from omegaconf import OmegaConf

    # Part of default directories. Kept with the configuration, so that jobs that a launcher runs in
    # other processes agree on it.
    OmegaConf.register_new_resolver("process", os.getpid, use_cache=True, replace=True)
    conceal_environment()
    from otdd_flash.commands.trusted import search_installed, trusted_configurations

    search_installed()
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        from otdd_flash.commands.help import show_help

        show_help(config_name, sys.argv[1:])
        return
    from otdd_flash.commands.choices import refused_argument, twice_given, with_folders

    # Argparse takes settings only where no flag parts them.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in MULTIRUN)
    if (refusal := refused_argument(sys.argv[1:])) is not None:
        raise InputError(refusal)
    sys.argv[1:] = with_folders(sys.argv[1:])
    for notice in twice_given(sys.argv[1:]):
        # Imported here: it takes as long as the rest of --version.
        from otdd_flash.commands.messages import say

        say("notice", notice, "yellow")
    entry = hydra.main("pkg://otdd_flash.conf", config_name, version_base="1.3")
    with _errors_handed_on(), trusted_configurations(), warnings.catch_warnings():
        # Hydra's own too, as they repeat what was given.
        warnings.showwarning = _show_warning
        entry(job)()


def _show_warning(
    message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    from otdd_flash.commands.messages import show_warning

    show_warning(message, category)


def conceal_environment() -> None:
    """Make `${oc.env:NAME}` give values that nothing in this process prints or keeps."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("oc.env", concealed_variable, replace=True)


def concealed_variable(name: str, *default: str | None) -> str | None:
    """Return the value of `${oc.env:NAME}`, which nothing prints or keeps from now on."""
    from omegaconf.resolvers import oc

    from otdd_flash.shown import conceal

    value: str | None = oc.env(name, *default)
    if value is not None and name in os.environ:
        conceal(value, f"${{oc.env:{name}}}")
    return value


def run_script(main: Callable[[], None]) -> None:
    """Call an entry point from a console command such as `otdd-distance`, as `python -m` does."""
    import otdd_flash

    if not sys.flags.safe_path:
        # Not in sys.path, where a console command has its own folder instead; functions that the
        # user names are found there all the same.
        with suppress(OSError):
            otdd_flash._started_in = str(Path.cwd())
    run_command(main)


def run_command(main: Callable[[], None]) -> None:
    """Call an entry point and leave the process with its jobs' exit code."""
    job_ended()
    job_under_way()
    # The backends of notebooks and desktops exist neither here nor in worker processes.
    os.environ["MPLBACKEND"] = "agg"
    # Threads of OpenMP that spin while they wait take the cores that others would work on.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with guarded_streams():
        try:
            _check_folder()
            shared = launched()
        except InputError as error:
            sys.exit(_refused(error))
        with together() if shared else nullcontext():
            code = _exit_code(main)
            if code == 0 and (stream := unheard()) is not None:
                from otdd_flash.commands.messages import say_error

                say_error(f"{stream} did not take all that was to be written to it")
                code = exit_codes.INCOMPLETE
            sys.exit(code)


def _check_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise InputError(
            f"the working directory is not to be had ({error.strerror}); change to one that exists"
        ) from error


def _exit_code(main: Callable[[], None]) -> int:
    try:
        main()
        from otdd_flash.commands.outcome import Outcome

        return Outcome.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        print("interrupted; what had been written is whole", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except Exception as error:
        return _refused(error)
    finally:
        from otdd_flash.commands.claims import release_all

        release_all()


@contextmanager
def _errors_handed_on() -> Iterator[None]:
    """Make Hydra raise what it would print, with advice that does not hold here."""

    def refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise InputError(f"{message}; --help and --hydra-help say which flags there are")

    before, error = os.environ.get(FULL_ERROR), argparse.ArgumentParser.error
    os.environ[FULL_ERROR] = "1"
    argparse.ArgumentParser.error = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = error  # type: ignore[method-assign]
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before


def _refused(error: Exception) -> int:
    """Print what is wrong with the arguments in a sentence, or the traceback of a defect."""
    from otdd_flash.commands.hydra_errors import sentence
    from otdd_flash.commands.messages import say_error

    said = None if os.environ.get(FULL_ERROR) else sentence(error, sys.argv[1:])
    if said is None:
        sys.excepthook(type(error), error, error.__traceback__)
        return exit_codes.DEFECT
    say_error(said)
    return exit_codes.BAD_INPUT
