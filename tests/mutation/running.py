"""Run tests against a mutant, in a process of its own that starts with everything heavy imported.

The mutant is a file of a copy of the checkout, so that kernels, whose source the interpreter reads,
and processes that tests start have it as well.
"""

from __future__ import annotations

import compileall
import math
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutation.listed import SOURCES, Mutant

# A test that takes so many times as long as it did, and this in seconds, does not end: the first of
# a process may compile and import, and other processes take their time.
TIMES, SECONDS = 5, 30

# What of a checkout no test reads. Bytecode is taken along: to compile the package takes seconds.
LEFT_OUT = (".*", "build", "dist", "site", "outputs", "multirun", "mutants.json")


class Verdict(NamedTuple):
    """What became of a mutant, by which test, and in how many seconds.

    `killed`; `hangs`, which is killed as well; `survived` all tests; `timed out` where tests were
    left, of which none hung; `not covered` where no test executes it; `no such test` where pytest
    does not know those that it is to run.
    """

    status: str
    by: str
    seconds: float


class _Reporter:
    """Writes the names of tests that start and fail into a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self._pipe, f"S{nodeid}\n".encode())

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            os.write(self._pipe, f"F{report.nodeid}\n".encode())

    pytest_collectreport = pytest_runtest_logreport


def copied(root: Path, folder: Path) -> Path:
    """A copy of a checkout, compiled, beside which is what was beside the checkout."""
    copy = folder / root.name
    shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name in SOURCES:
        compileall.compile_dir(copy / name, quiet=2)
    if (root.parent / "shared").exists():
        (folder / "shared").symlink_to(root.parent / "shared")
    return copy


def preload() -> None:
    """Import what tests need and mutants are not of; hypothesis forgets what it has seen."""
    # Kernels of a processor run in the interpreter, of which Triton's own functions know at once.
    os.environ.setdefault("TRITON_INTERPRET", "1")
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
    copy: Path, mutant: Mutant, tests: Sequence[str], limit: float, known: dict[str, float]
) -> Verdict:
    """Run tests against a mutant until one fails, or for `limit` seconds.

    Args:
        copy: of the checkout; its file is as before afterwards.
        mutant: of the checkout.
        tests: in this order.
        limit: in seconds.
        known: seconds that tests took before; of others it cannot be said whether they hang.
    """
    if not tests:
        return Verdict("not covered", "", 0.0)
    path = copy / mutant.file
    content, times = path.read_bytes(), path.stat()
    path.write_bytes(mutant.applied(content))
    # Bytecode is told from its source by size and second alone, and may be as old as this.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    try:
        verdict = _verdict(copy, tests, limit, known)
    finally:
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if verdict.by in ("exit code 4", "exit code 5") and failing(copy, tests, collect=True):
        return verdict._replace(status="no such test")
    return verdict


def failing(copy: Path, tests: Sequence[str], *, collect: bool = False) -> set[str]:
    """Of these tests those that fail without a mutant, or all if pytest does not know them."""
    if not tests:
        return set()
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _child(copy, tests, writing, "--collect-only" if collect else "--maxfail=0")
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as lines:
        found = {line[1:].rstrip("\n") for line in lines if line[0] == "F"}
    _, status = os.waitpid(process, 0)
    return found or (set(tests) if os.waitstatus_to_exitcode(status) else set())


def _verdict(copy: Path, tests: Sequence[str], limit: float, known: dict[str, float]) -> Verdict:
    reading, writing = os.pipe()
    started = time.monotonic()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _child(copy, tests, writing, "--exitfirst")
    os.close(writing)
    status = "interrupted"
    try:
        failed, current, status = _watch(reading, started + limit, known)
    finally:
        if status != "ended":
            os.killpg(process, signal.SIGKILL)
    _, code = os.waitpid(process, 0)
    os.close(reading)
    took = time.monotonic() - started
    if failed:
        return Verdict("killed", failed, took)
    if status == "ended":
        code = os.waitstatus_to_exitcode(code)
        return Verdict("killed" if code else "survived", f"exit code {code}", took)
    return Verdict(status, current, took)


def _watch(reading: int, deadline: float, known: dict[str, float]) -> tuple[str, str, str]:
    """The test that failed, the one that ran last, and how it ended: of itself, late or never."""
    rest, current, hangs_at = b"", "", math.inf
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            return "", current, "hangs" if hangs_at < time.monotonic() else "timed out"
        part = os.read(reading, 1 << 16)
        if not part:
            return "", current, "ended"
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            current = line[1:].decode()
            if line[:1] == b"F":
                return current, current, "failed"
            hangs_at = time.monotonic() + SECONDS + TIMES * known.get(current, math.inf)


def _child(copy: Path, tests: Sequence[str], pipe: int, option: str) -> None:
    """Run tests in the copy, and leave."""
    code = 1
    try:
        os.setpgid(0, 0)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.chdir(copy)
        # Of a file that changes twice a second, bytecode may be that of before.
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode, root = True, Path(__file__).resolve().parents[2]
        sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() != root)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        # Without xdist its marks are unknown, and files with them are not collected.
        plugins = ("cacheprovider", "cov")
        options = [part for name in plugins for part in ("-p", f"no:{name}")]
        options += ["-c", str(copy / "pyproject.toml"), "--rootdir", str(copy), option]
        code = int(pytest.main([*options, *tests], plugins=[_Reporter(pipe)]))
    finally:
        os._exit(code)
