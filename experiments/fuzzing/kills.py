"""Runs that are killed at random moments, also while resuming and while pictures are drawn.

Children are forks of a server that has imported everything and done nothing else: a start would
take seconds, and a process that has taken gradients cannot be forked.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.fuzzing.commands import run_here
from experiments.fuzzing.verdict import Attempt
from otdd_flash.commands.outcome import RESULT_FILE

SMALL = (
    "source=blobs", "target=blobs", "target.split=test", "extractor=identity", "max_samples=40",
    "cache_dir=cache", "hydra.run.dir=run",
)  # fmt: skip
RUNS = {
    "distance": ("distance", ()),
    "distance, saved": ("distance", ("save_result=true",)),
    **{
        f"flow, {mode}": ("flow", (f"flow.mode={mode}", "flow.steps=6", "flow.checkpoint_every=1"))
        for mode in ("features", "attached", "joint", "augmented")
    },
    "flow, minibatches": ("flow", ("flow.minibatch=20", "flow.steps=6", "flow.checkpoint_every=2")),
    "flow, noise": ("flow", ("flow.noise=0.1", "flow.steps=6", "flow.checkpoint_every=1")),
}
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["experiments.fuzzing.commands"])
# Numbers of a result that do not depend on when it was computed.
KEPT = ("value", "bounds", "epsilon")


class Killer:
    """Kills runs and compares what later ones make of the rest.

    Args:
        folder: an empty one.
        random: when runs are killed.
    """

    def __init__(self, folder: Path, random: np.random.Generator) -> None:
        self._folder, self._random = folder, random
        self._whole: dict[str, tuple[dict[str, Any], float]] = {}
        self._count = 0

    def kill(self) -> Attempt:
        """Kill a run, up to three times in a row, and let the next one end."""
        title = list(RUNS)[int(self._random.integers(len(RUNS)))]
        name, settings = RUNS[title]
        expected, seconds = self._undisturbed(title)
        folder = self._new()
        moments = []
        for _ in range(int(self._random.integers(1, 4))):
            moments.append(float(self._random.uniform(0, 1.2 * seconds)))
            arguments = self._arguments(name, settings, folder)
            if not self._started(name, arguments, folder, moments[-1]):
                break
        what = f"{title}: killed after " + ", ".join(f"{moment:.2f} s" for moment in moments)
        ended = run_here(name, self._arguments(name, settings, folder), folder)
        if ended.code != 0:
            failure = f"exit code {ended.code} afterwards: {ended.err[-300:]}"
            return Attempt("kill", what, f"exit {ended.code}", failure)
        found = _numbers(folder)
        return Attempt(
            "kill", what, "same" if found == expected else "changed",
            None if found == expected else f"{found} instead of {expected}",
        )  # fmt: skip

    def _undisturbed(self, title: str) -> tuple[dict[str, Any], float]:
        if title not in self._whole:
            name, settings = RUNS[title]
            folder = self._new()
            started = time.perf_counter()
            self._started(name, self._arguments(name, settings, folder), folder, None)
            self._whole[title] = _numbers(folder), time.perf_counter() - started
        return self._whole[title]

    @staticmethod
    def _arguments(name: str, settings: tuple[str, ...], folder: Path) -> list[str]:
        resume = name == "flow" and (folder / "run" / "checkpoint.json").exists()
        again = ["flow.resume=true"] if resume else ["overwrite=true"]
        return [*SMALL, *settings, *again]

    @staticmethod
    def _started(name: str, arguments: list[str], folder: Path, moment: float | None) -> bool:
        """Run in a child; whether it was killed at that moment, before it had ended."""
        child = SERVER.Process(target=_run, args=(name, arguments, folder))
        child.start()
        child.join(moment)
        child.kill()
        child.join()
        return child.exitcode == -signal.SIGKILL

    def _new(self) -> Path:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir(parents=True)
        return folder


def _run(name: str, arguments: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    sys.exit(run_here(name, arguments, folder).code & 0xFF)


def _numbers(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "run" / RESULT_FILE).read_text(encoding="utf-8"))
    return {key: content[key] for key in KEPT if key in content}
