"""Processes that are ranks of one gloo group, kept for many tests: to start them takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.quicker_interpreter import quicken_interpreter

# Seconds after which ranks that wait for each other are given up; a busy machine has taken 90.
TIMEOUT = 400


class RankPool:
    """So many ranks, each of which runs what it is given."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "otdd_flash.otdd"])
        self._folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self._folder.name) / "ranks")
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, meeting, rank, size), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns on every rank, or the exception that it raised there."""
        for pipe in self._pipes:
            pipe.send((_test(), function, arguments))
        try:
            return [_answer(pipe) for pipe in self._pipes]
        except (TimeoutError, EOFError):
            # Whatever comes next needs ranks that are in step.
            pool.cache_clear()
            self.close()
            raise

    def led(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What every rank hears of work(ranks, ...) that rank 0 leads."""
        return self.run(lead, work, *arguments)

    def answer_of(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """What it returns, or raises, on one rank; others may never answer."""
        for pipe in self._pipes:
            pipe.send((_test(), function, arguments))
        return _answer(self._pipes[rank])

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT):
        raise TimeoutError("a rank has not answered; ranks may wait for each other")
    return pipe.recv()


def _work(pipe: Connection, meeting: str, rank: int, size: int) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    import torch

    torch.set_num_threads(1)
    where = f"file://{meeting}"
    torch.distributed.init_process_group("gloo", where, rank=rank, world_size=size)
    while True:
        try:
            test, function, arguments = pipe.recv()
        except EOFError:
            return
        if "triton" in sys.modules:
            quicken_interpreter()
        with _covered(test):
            try:
                answer = function(*arguments)
            except Exception as error:
                answer = error
        try:
            pipe.send(answer)
        except Exception as error:
            # An answer that cannot be pickled.
            pipe.send(error)


def _test() -> str:
    """Return the name of the test that runs, as pytest tells processes that tests start."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


@contextlib.contextmanager
def _covered(test: str) -> Iterator[None]:
    """Under `make coverage`, save which lines a test executes here: this process is killed."""
    coverage = sys.modules.get("coverage")
    measuring = coverage and coverage.Coverage.current()
    if not measuring:
        yield
        return
    measuring.switch_context(f"{test}|run")
    yield
    measuring.save()


def lead(work: Callable[..., Any], *arguments: Any) -> Any:
    """Work(ranks, ...), which rank 0 leads; called on every rank."""
    from otdd_flash.distributed.ranks import led

    return led(lambda ranks: work(ranks, *arguments))


@cache
def pool(size: int) -> RankPool:
    """The pool of so many ranks of this process."""
    return RankPool(size)
