"""Commands in this process, which has imported once, or in processes of their own."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from experiments.fuzzing.verdict import EXIT_CODES, SECONDS, Attempt
from otdd_flash import distance, flow
from otdd_flash.commands import start
from otdd_flash.commands.outcome import RESULT_FILE
from otdd_flash.commands.start import run_command

# What a terminal reads as colours and movements.
STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

MAINS = {"distance": distance.main, "flow": flow.main}


@dataclass(frozen=True)
class Ended:
    """How a command ended, what it said, and what its directory holds."""

    code: int
    out: str
    err: str
    result: dict[str, Any] | None


class Hung(BaseException):
    """A command took too long; no `except Exception` is to catch it."""


def run_here(name: str, arguments: Sequence[str], folder: Path) -> Ended:
    """Run a command in this process, in a folder; it may take `SECONDS`."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, argv = Path.cwd(), sys.argv
    os.chdir(folder)
    sys.argv, start.highest = [f"{name}.py", *arguments], 0
    try:
        with _limit(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run_command(MAINS[name])
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        err.write(f"Traceback: {type(error).__name__}: {error}")
        code = -1
    finally:
        os.chdir(before)
        sys.argv = argv
    return Ended(code, out.getvalue(), err.getvalue(), _result(arguments, folder))


def run_apart(
    name: str,
    arguments: Sequence[str],
    folder: Path,
    redirection: str = "",
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command as a user does, in a shell that redirects its streams."""
    command = shlex.join([sys.executable, "-m", f"otdd_flash.{name}", *arguments])
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **(variables or {})}
    shell = ["bash", "-c", f"{command} {redirection}; exit ${{PIPESTATUS[0]}}"]
    try:
        done = subprocess.run(
            shell,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Ended(-1, "", "Traceback: Hung", None)
    return Ended(done.returncode, done.stdout, done.stderr, _result(arguments, folder))


def judged(
    kind: str, name: str, arguments: Sequence[str], ended: Ended, streams: str = ""
) -> Attempt:
    """A traceback, an unknown exit code and a success without its numbers are failures.

    So is bad input without a sentence, unless `streams`, as a shell redirects them, lose it.
    """
    failure = None
    if ended.code not in EXIT_CODES:
        failure = f"exit code {ended.code}: {ended.err[-400:]}"
    elif "Traceback" in _readable(ended):
        failure = f"a traceback: {ended.err[-400:]}"
    elif ended.code == 2 and "2>" not in streams and not _has_sentence(ended):
        failure = f"no sentence: {ended.err[-400:]}"
    elif ended.code in (0, 3, 4) and not _is_help(arguments):
        failure = _without_numbers(ended, arguments)
    shown = " ".join((name, *arguments, streams)).strip()
    return Attempt(kind, shown, f"exit {ended.code}", failure)


def _has_sentence(ended: Ended) -> bool:
    """Whether the last line on standard error says what was wrong."""
    return (_readable(ended).strip().splitlines() or [""])[-1].startswith("error: ")


def _readable(ended: Ended) -> str:
    """Return standard error without colours, and without what UTF-16 adds to ASCII.

    FORCE_COLOR asks for the first, PYTHONIOENCODING for the second, beside which libraries go on
    writing ASCII, so that the whole is in no encoding.
    """
    return STYLE.sub("", ended.err).translate({0: None, 0xFFFD: None})


def _without_numbers(ended: Ended, arguments: Sequence[str]) -> str | None:
    if ended.result is None:
        return f"exit code {ended.code} without a result"
    numbers = ended.result.get("value"), *ended.result.get("bounds", ())
    if any(not isinstance(number, float | int) or math.isnan(number) for number in numbers):
        return f"a result that is no number: {numbers}"
    value, lower, upper = numbers
    # The value of geomloss's schedule stands beside bounds of the converged distance.
    if not lower <= value <= upper and "solver=geomloss" not in arguments:
        return f"a value outside of its bounds: {numbers}"
    return None


def _is_help(arguments: Sequence[str]) -> bool:
    return any(argument.startswith("-") for argument in arguments)


def _result(arguments: Sequence[str], folder: Path) -> dict[str, Any] | None:
    named = [a.partition("=")[2] for a in arguments if a.startswith("hydra.run.dir=")]
    path = folder / (named[-1] if named else ".") / RESULT_FILE
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hung(f"more than {SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
