"""What the first call costs: a dataset distance in a fresh process with nothing compiled.

    python -m experiments.bench_cold_start [--samples 60000] [--dimension 512] [--output DIR]

Two random labelled clouds on a GPU, the distance three times in one process whose Triton cache is
an empty folder; then the same in a second process that finds the cache filled. Imports are not
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result

CLASSES = 10


def calls(n: int, d: int) -> list[float]:
    """Seconds of three equal calls."""
    draw = torch.Generator("cuda").manual_seed(0)
    names = tuple(map(str, range(CLASSES)))
    sides = [
        otdd.LabeledSamples(
            torch.randn(n, d, generator=draw, device="cuda") + side,
            torch.arange(n, device="cuda") % CLASSES,
            names,
        )
        for side in range(2)
    ]
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        otdd.dataset_distance(*sides, epsilon_relative=0.05, labels="means")
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return taken


def child(n: int, d: int, cache: str) -> list[float]:
    """The same in a new process with this Triton cache."""
    command = [sys.executable, "-m", "experiments.bench_cold_start", "--child"]
    command += ["--samples", str(n), "--dimension", str(d)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRITON_CACHE_DIR": cache},
    )
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    """Write bench_cold_start.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    n, d = arguments.samples, arguments.dimension
    if arguments.child:
        sys.stdout.write(json.dumps(calls(n, d)) + "\n")
        return
    with tempfile.TemporaryDirectory() as cache:
        empty, filled = (child(n, d, cache) for _ in range(2))
    result = {
        "environment": environment("torch", "triton"),
        "n": n,
        "d": d,
        "classes": 2 * CLASSES,
        "seconds_empty_cache": empty,
        "seconds_filled_cache": filled,
        "extra_seconds_of_the_first_call": {
            "empty_cache": empty[0] - min(empty[1:]),
            "filled_cache": filled[0] - min(filled[1:]),
        },
    }
    path = write_result("bench_cold_start", result, arguments.output)
    sys.stdout.write(f"{result}\nwritten to {path}\n")


if __name__ == "__main__":
    main()
