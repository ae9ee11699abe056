"""Runs mutants, each in a process of its own that starts with everything heavy imported."""

from __future__ import annotations

import importlib.machinery
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutation.drawing import Mutant

# A test that takes so many times as long as it did, and this in seconds, does not end.
TIMES, SECONDS = 5, 10


class Verdict(NamedTuple):
    """What became of a mutant: killed, hangs, survived or not executed; by which test; seconds."""

    status: str
    by: str
    seconds: float


class _Told:
    """Writes the names of tests that start and fail into a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def _tell(self, what: str, name: str) -> None:
        os.write(self._pipe, f"{what}{name}\n".encode())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell("S", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell("F", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell("F", report.nodeid)


def preload() -> None:
    """Import what tests need and mutants are not of; hypothesis forgets what it has seen."""
    import hypothesis
    import pandas
    import scipy.optimize
    import sklearn.datasets
    import torch
    import triton.language

    assert all((pandas, scipy.optimize, sklearn.datasets, torch, triton.language))
    hypothesis.settings.register_profile("mutants", database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")


def run(
    root: Path, mutant: Mutant, tests: Sequence[str], limit: float, known: dict[str, float]
) -> Verdict:
    """Run tests against a mutant until one fails, or for `limit` seconds.

    Args:
        root: the checkout, where this process is.
        mutant: of the checkout as it is.
        tests: in this order.
        limit: in seconds, after which the mutant has survived if no test hangs.
        known: seconds that tests took before.
    """
    if not tests:
        return Verdict("not executed", "", 0.0)
    reading, writing = os.pipe()
    started = time.monotonic()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _child(root, mutant, tests, writing)
    os.close(writing)
    failed, current, since, ended = _watch(reading, started + limit)
    if not ended:
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    os.close(reading)
    took = time.monotonic() - started
    if failed:
        return Verdict("killed", failed, took)
    if ended:
        code = os.waitstatus_to_exitcode(status)
        return Verdict("survived" if code == 0 else "killed", f"exit code {code}", took)
    hangs = time.monotonic() - since > SECONDS + TIMES * known.get(current, 1.0)
    return Verdict("hangs" if hangs else "survived", current, took)


def _watch(reading: int, deadline: float) -> tuple[str, str, float, bool]:
    """The test that failed, the one that ran last, since when, and whether all have ended."""
    rest, current, since = b"", "", time.monotonic()
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            break
        part = os.read(reading, 1 << 16)
        if not part:
            return "", current, since, True
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            name = line[1:].decode()
            if line[:1] == b"F":
                return name, current, since, False
            current, since = name, time.monotonic()
    return "", current, since, False


def _child(root: Path, mutant: Mutant, tests: Sequence[str], pipe: int) -> None:
    """Run tests with the mutant in place of its file, and leave."""
    code = 1
    try:
        os.setpgid(0, 0)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        _replace(root, mutant)
        plugins = ("cacheprovider", "xdist", "cov")
        options = [part for name in plugins for part in ("-p", f"no:{name}")]
        code = int(pytest.main(["-x", "-q", *options, *tests], plugins=[_Told(pipe)]))
    finally:
        os._exit(code)


def _replace(root: Path, mutant: Mutant) -> None:
    """Whoever imports the mutant's file gets it with the replacement; the file stays as it is."""
    path = root / mutant.file
    content = path.read_bytes()
    if content[mutant.start : mutant.stop].decode() != mutant.old:
        sys.exit(f"{mutant.file} has changed since the mutants were drawn")
    source = content[: mutant.start] + mutant.new.encode() + content[mutant.stop :]
    loader = importlib.machinery.SourceFileLoader
    plain = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> object:
        if os.path.realpath(self.path) == os.path.realpath(path):
            return compile(source, str(path), "exec", dont_inherit=True)
        return plain(self, name)

    loader.get_code = get_code  # type: ignore[method-assign,assignment]
