"""Thousands of random commands, calls, damaged files, images and kills: `make fuzz`.

    python -m experiments.fuzz [--commands 1200 --processes 100 --calls 700 --files 700 --images 300
        --kills 50]

Fails on a traceback of ours, an exit code that the README does not promise, a success without its
numbers, and a success whose numbers differ from the undamaged or undisturbed ones. An attempt
depends on the seed alone. Writes fuzz.json with counts and every failure.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from experiments.environment import environment, write_result
from experiments.fuzzing.calls import call
from experiments.fuzzing.commands import judged, run_apart, run_here
from experiments.fuzzing.damage import damaged, specimens
from experiments.fuzzing.grammar import Grammar
from experiments.fuzzing.images import image
from experiments.fuzzing.kills import Killer
from experiments.fuzzing.verdict import Attempt, summary


def commands(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Commands in this process."""
    for index in range(count):
        name, arguments = Grammar(np.random.default_rng([seed, 0, index])).draw()
        arguments = [*arguments, f"hydra.run.dir=command-{index}"]
        yield judged("command", name, arguments, run_here(name, arguments, folder))


def processes(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Commands in processes of their own, whose streams may fail or lack characters."""
    for index in range(count):
        grammar = Grammar(np.random.default_rng([seed, 1, index]))
        name, arguments = grammar.draw()
        redirection, variables = grammar.streams()
        arguments = [*arguments, f"hydra.run.dir=process-{index}"]
        ended = run_apart(name, arguments, folder, redirection, variables)
        shown = " ".join([redirection, *(f"{key}={value}" for key, value in variables.items())])
        yield judged("process", name, arguments, ended, shown)


def calls(seed: int, count: int) -> Iterator[Attempt]:
    """Calls of the public functions."""
    for index in range(count):
        yield call(np.random.default_rng([seed, 2, index]))


def files(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Damaged files of every kind in turn."""
    kinds = specimens(folder)
    for index in range(count):
        yield damaged(kinds[index % len(kinds)], np.random.default_rng([seed, 3, index]))


def images(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Images of every mode of PIL, by several readers."""
    for index in range(count):
        yield image(np.random.default_rng([seed, 5, index]), folder)


def kills(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Runs killed at random moments."""
    killer = Killer(folder, np.random.default_rng([seed, 4]))
    for _ in range(count):
        yield killer.kill()


def run(seed: int, counts: dict[str, int], folder: Path) -> Iterator[Attempt]:
    """All attempts, one after the other."""
    for name in ("files", "kills", "work"):
        (folder / name).mkdir()
    # Before anything starts threads, which forks would miss.
    yield from kills(seed, counts["kills"], folder / "kills")
    yield from calls(seed, counts["calls"])
    yield from files(seed, counts["files"], folder / "files")
    yield from images(seed, counts["images"], folder / "images")
    yield from commands(seed, counts["commands"], folder / "work")
    yield from processes(seed, counts["processes"], folder / "work")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    defaults = {
        "commands": 1200, "processes": 100, "calls": 700, "files": 700, "images": 300, "kills": 50
    }  # fmt: skip
    for name, count in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    given = vars(parser.parse_args(arguments))
    torch.set_num_threads(1)
    attempts, started = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for attempt in run(given["seed"], given, Path(folder)):
            attempts.append(attempt)
            if attempt.failure is not None:
                print(f"{attempt.kind}: {attempt.what}\n    {attempt.failure}", flush=True)
    content = {
        "environment": environment("numpy", "torch"),
        "arguments": given,
        "seconds": time.perf_counter() - started,
        **summary(attempts),
    }
    path = write_result("fuzz", content)
    failures = sum(attempt.failure is not None for attempt in attempts)
    print(f"{len(attempts)} attempts, {failures} failures, {path.name}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
