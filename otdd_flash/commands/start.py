"""The beginning and the end of a command's process: Hydra, exit codes and standard streams.

The entry points `otdd_flash.distance`, `.flow`, `.nearest`, `.mix`, `study.__main__` and
`shift.__main__` call `run_hydra`, `run_command` and `run_script`. `commands.messages` asks for the
running job and draws inside `dispensable`; `commands.outcome` records a job's exit code (`note`),
ends it (`job_ended`), puts into `at_the_end` what to undo, and asks `unheard`; `commands.ranks`
exits with INTERRUPTED; `commands.settings` calls `conceal_environment`; `commands.outcome` and
`commands.ranks` use `say_error`. Everything else is imported where it is needed: help is shown
without torch, and Ctrl-C works from the start, also while Hydra and torch are imported. So nothing
heavy may be imported at the top.

A command runs inside `guarded_streams`, where writing never raises. A reader that has gone, as in
`| head -1`, is no failure. Other failures to write are stored, and `unheard` reports them: a job or
command that would have ended with 0 then ends with 4, while codes of other failures stay. A closed
standard output is a failure once something is written to it; a closed standard error is a request
for silence.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import io
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from otdd_flash.errors import BAD_INPUT, DEFECT, INCOMPLETE, InputError

if TYPE_CHECKING:
    from omegaconf import DictConfig

# The exit code of a command that Ctrl-C ends; 0 means done, and `errors` has the others.
INTERRUPTED = 130

# The highest exit code of the jobs that this process ran. A multirun also reads the codes in the
# error.json of its jobs, which cannot be written on a full disk.
highest = 0

_job: Job | None = None

# Callbacks for the end of the command, such as the release of claims on directories.
at_the_end = ExitStack()

FULL_ERROR = "HYDRA_FULL_ERROR"

MULTIRUN = ("-m", "--multirun")


@dataclass
class Job:
    """The running job, with the clock that its progress and its results share.

    Attributes:
        started: its start by `time.perf_counter`; the first job starts with the command.
        seconds: wall time of its finished phases, by name.
    """

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)


def job_under_way() -> Job:
    """Return the running job, which starts now if there is none."""
    global _job
    _job = _job or Job()
    return _job


def job_ended() -> None:
    """End the running job; the next starts when it is first asked for."""
    global _job
    _job = None


def note(code: int) -> None:
    """Record a job's exit code if it is the highest so far."""
    global highest
    highest = max(highest, code)


def run_hydra(work: str, config_name: str) -> None:
    """Pass the arguments of this process to Hydra, which runs the work for each configuration.

    Args:
        work: as for `run_work`.
        config_name: of the command's file in conf.

    Raises:
        InputError: Hydra could not read an argument as it is meant.
    """
    import hydra
    from omegaconf import OmegaConf

    # The number of this process is a part of default directories. It is cached with the
    # configuration, so that jobs that a launcher runs in other processes use the same number.
    OmegaConf.register_new_resolver("process", os.getpid, use_cache=True, replace=True)
    conceal_environment()
    from otdd_flash.commands import arguments

    arguments.search_installed()
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        arguments.show_help(config_name, sys.argv[1:])
        return
    # Argparse accepts settings only if no flag stands between them: flags of a multirun go first.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in MULTIRUN)
    if (refusal := arguments.refused_argument(sys.argv[1:])) is not None:
        raise InputError(refusal)
    sys.argv[1:] = arguments.with_folders(sys.argv[1:])
    for notice in arguments.twice_given(sys.argv[1:]):
        # Imported here: with rich, the import takes as long as all the rest of --version.
        from otdd_flash.commands.messages import say

        say("notice", notice, "yellow")

    def job(config: DictConfig) -> int:
        return run_work(work, config)

    entry = hydra.main("pkg://otdd_flash.conf", config_name, version_base="1.3")
    with _errors_handed_on(), arguments.trusted_configurations(), warnings.catch_warnings():
        # Hydra's own warnings are shown by this function, too, because they repeat arguments.
        warnings.showwarning = _show_warning
        entry(job)()


def _show_warning(
    message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    from otdd_flash.commands.messages import show_warning

    show_warning(message, category)


def conceal_environment() -> None:
    """Conceal the values of `${oc.env:NAME}` in all that this process prints or stores."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("oc.env", concealed_variable, replace=True)


def concealed_variable(name: str, *default: str | None) -> str | None:
    """Return the value of `${oc.env:NAME}`, and conceal it from now on."""
    from omegaconf.resolvers import oc

    from otdd_flash.shown import conceal

    value: str | None = oc.env(name, *default)
    if value is not None and name in os.environ:
        conceal(value, f"${{oc.env:{name}}}")
    return value


def run_work(name: str, config: DictConfig) -> int:
    """Run one job with the work of a command: the function of a module's name here.

    Heavy modules are imported here, with their progress, and not before Hydra runs the job.

    Returns:
        The job's exit code.
    """
    from otdd_flash.commands.messages import importing

    with importing():
        from otdd_flash.commands.outcome import run_job

        module = import_module(f"otdd_flash.commands.{name}")
    return run_job(getattr(module, name), config)


def run_script(main: Callable[[], None]) -> None:
    """Call an entry point from a console command such as `otdd-distance`, as `python -m` does."""
    import otdd_flash

    if not sys.flags.safe_path:
        # Python puts the folder of the console command into sys.path, where `python -m` puts the
        # working directory. Functions that the user names are looked for in the working directory
        # all the same.
        with suppress(OSError):
            otdd_flash._started_in = str(Path.cwd())
    run_command(main)


def run_command(main: Callable[[], None]) -> None:
    """Call an entry point and exit the process with the exit code of its jobs."""
    job_ended()
    job_under_way()
    # Backends of notebooks and desktops work neither here nor in worker processes.
    os.environ["MPLBACKEND"] = "agg"
    # OpenMP threads that spin while they wait would occupy cores that others need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with guarded_streams():
        try:
            _check_folder()
            from otdd_flash.commands.ranks import launched, together

            shared = launched()
        except InputError as error:
            sys.exit(_refused(error))
        # Started by torchrun: rank 0 runs the command and the others follow it (`commands.ranks`).
        with together() if shared else nullcontext():
            code = _exit_code(main)
            if code == 0 and (stream := unheard()) is not None:
                say_error(f"{stream} did not take all that was to be written to it")
                code = INCOMPLETE
            sys.exit(code)


def say_error(text: object) -> None:
    """Print an error, without importing rich before there is one."""
    from otdd_flash.commands.messages import say

    say("error", text, "bold red")


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
        return highest
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        print("interrupted; what had been written is whole", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _refused(error)
    finally:
        at_the_end.close()


@contextmanager
def _errors_handed_on() -> Iterator[None]:
    """Let errors of Hydra through, which it would print with advice that is wrong here."""

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
    """Print what is wrong with the arguments, or a defect's traceback; return the exit code."""
    from otdd_flash.commands.arguments import sentence

    # The variable is as the user set it: `_errors_handed_on` has restored it by now.
    said = None if os.environ.get(FULL_ERROR) else sentence(error, sys.argv[1:])
    if said is None:
        sys.excepthook(type(error), error, error.__traceback__)
        return DEFECT
    say_error(said)
    return BAD_INPUT


STREAMS = (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))

NAMES = {"stdout": "standard output", "stderr": "standard error"}

# The symbols of tables and titles in ASCII, for encodings that lack them.
SUBSTITUTES = {"→": "->", "×": "x", "≤": "<=", "±": "+-", "−": "-", "…": "..."}

SUBSTITUTE = "otdd_flash.substitute"

# The numbers of columns in which a table is readable; a terminal wraps wider lines.
NARROWEST, WIDEST = 40, 10_000


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Guard standard output and standard error, and open closed standard streams.

    Without that, the next file to be opened would get the number of a standard stream, and what
    other libraries print would be written into it.
    """
    closed = _open_closed()
    _settle_width()
    before = sys.stdin, sys.stdout, sys.stderr
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    # Nobody reads a closed standard error, so nothing is lost there.
    missing = OSError(errno.EBADF, os.strerror(errno.EBADF)) if "stdout" in closed else None
    try:
        with _guarded("stdout", missing), _guarded("stderr", None):
            yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def unheard() -> str | None:
    """Return which stream has lost output, and why; None if neither has."""
    for key, name in NAMES.items():
        stream = getattr(sys, key)
        if isinstance(stream, Guarded):
            stream.flush()
            if stream.lost is not None:
                return f"{name} ({getattr(stream.lost, 'strerror', None) or stream.lost})"
    return None


@contextmanager
def dispensable() -> Iterator[None]:
    """Do not count as lost what is written to standard error here, such as progress."""
    stream = sys.stderr
    before = stream.lost if isinstance(stream, Guarded) else None
    yield
    if isinstance(stream, Guarded):
        stream.lost = before


class Guarded(io.TextIOBase):
    """A text stream that stores failures instead of raising them, and then discards output.

    Attributes:
        lost: why something was not written; None if all was, or if only a reader has gone.

    Args:
        stream: the stream to write to.
        failure: why all output is lost, if that is so from the start.
    """

    def __init__(self, stream: TextIO, failure: Exception | None) -> None:
        self._stream = stream
        self._failure = failure
        self.lost: Exception | None = None

    def write(self, text: str) -> int:
        """Write text as far as possible."""
        if text:
            self.lost = self.lost or self._failure
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._lead_nowhere(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream as far as possible."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lead_nowhere(error)

    def _lead_nowhere(self, error: Exception) -> None:
        """Redirect the stream to the null device.

        The content of its buffer and the output of later processes go there too.
        """
        if not isinstance(error, ConnectionError):
            self._failure = self.lost = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self._stream.fileno())
        except (OSError, ValueError):
            # The stream has no file number, or is closed.
            self._stream = os.fdopen(nowhere, "w", encoding="utf-8")
        else:
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


def _open_closed() -> set[str]:
    """Open the null device in place of closed standard streams; return their names."""
    closed = set()
    for number, (name, flags) in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            # `open` takes the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, flags), True)
            closed.add(name)
    return closed


def _settle_width() -> None:
    """Correct values of COLUMNS and LINES with which rich could show nothing."""
    for name, least in (("COLUMNS", NARROWEST), ("LINES", 1)):
        given = os.environ.get(name)
        if given is None:
            continue
        try:
            number = int(given)
        except ValueError:
            number = 0
        if number < 1 or number > WIDEST:
            del os.environ[name]
        elif number < least:
            os.environ[name] = str(least)


@contextmanager
def _guarded(name: str, failure: Exception | None) -> Iterator[None]:
    """Guard one stream, and replace characters that its encoding lacks."""
    stream: Any = getattr(sys, name)
    number = 1 if name == "stdout" else 2
    if stream is None:
        stream = os.fdopen(number, "w", encoding="utf-8", closefd=False)
    handler = getattr(stream, "errors", None)
    with suppress(AttributeError, OSError, ValueError):
        stream.reconfigure(errors=SUBSTITUTE)
    guarded = Guarded(stream, failure)
    setattr(sys, name, guarded)
    try:
        yield
    finally:
        guarded.flush()
        with suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors=handler)


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that cannot be encoded by ASCII: a similar symbol, or an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    texts = (
        SUBSTITUTES.get(one, one.encode("ascii", "backslashreplace").decode()) for one in characters
    )
    return "".join(texts), error.end


codecs.register_error(SUBSTITUTE, _substitute)
