"""Time a solve whose threads spin or sleep while they wait, beside a busy process and alone.

    python -m experiments.bench_waiting [--threads 2] [--repeats 15] [--output DIR]

PyTorch's threads spin for a while when they have nothing to do, unless `OMP_WAIT_POLICY=PASSIVE`
puts them to sleep. Where another process wants their core, the thread that has work waits for one
that spins. A certified divergence, in a process for each policy, on as many cores as
threads, without and with one process that computes all the time. Policies take turns, twice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result

SIZES = ((500, 8),)
POLICIES: dict[str, dict[str, str]] = {
    "as PyTorch has it": {},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
# Seconds after which a size is repeated no more.
PATIENCE = 3.0


def times(repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a divergence, wall and processor, by size; all values are the same."""
    rows = []
    for n, d in SIZES:
        draw = torch.Generator().manual_seed(n)
        x, y = (torch.randn(n, d, generator=draw) + side / 2 for side in range(2))
        wall: list[float] = []
        cpu: list[float] = []
        started = time.perf_counter()
        value = otdd.sinkhorn_divergence(x, y, epsilon=d / 20, compute="cpu").value
        while len(wall) < repeats and (len(wall) < 3 or time.perf_counter() - started < PATIENCE):
            before, used = time.perf_counter(), time.process_time()
            otdd.sinkhorn_divergence(x, y, epsilon=d / 20, compute="cpu")
            wall.append(1e3 * (time.perf_counter() - before))
            cpu.append(1e3 * (time.process_time() - used))
        rows.append(
            {
                "n": n,
                "d": d,
                "value": value,
                "milliseconds": statistics.median(wall),
                "cpu_milliseconds": statistics.median(cpu),
            }
        )
    return rows


def child(policy: str, threads: int, repeats: int) -> list[dict[str, Any]]:
    """The same in a new process."""
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-m", "experiments.bench_waiting", "--child"]
    done = subprocess.run(
        [*command, "--repeats", str(repeats)],
        capture_output=True,
        text=True,
        check=True,
        env={**kept, "OMP_NUM_THREADS": str(threads), **POLICIES[policy]},
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    """Write bench_waiting.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.stdout.write(json.dumps(times(arguments.repeats)) + "\n")
        return
    # Children and the neighbour inherit it.
    cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
    os.sched_setaffinity(0, cores)
    rows = []
    for turn in range(2):
        for neighbours in (0, 1):
            for policy in POLICIES:
                busy = [
                    subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    for _ in range(neighbours)
                ]
                try:
                    found = child(policy, arguments.threads, arguments.repeats)
                finally:
                    for process in busy:
                        process.kill()
                        process.wait()
                head = {"turn": turn, "neighbours": neighbours, "policy": policy}
                rows += [{**head, **row} for row in found]
    for n, _ in SIZES:
        values = [row["value"] for row in rows if row["n"] == n]
        spread = max(values) - min(values)
        if spread > 1e-4 * abs(values[0]):
            raise SystemExit(f"values of {n} points differ by {spread}")
    result = {"environment": environment("torch"), "threads": arguments.threads, "rows": rows}
    write_result("bench_waiting", result, arguments.output)


if __name__ == "__main__":
    main()
