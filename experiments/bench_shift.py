"""How long a shift test takes: 199 and 999 permutations of clouds without labels.

    python -m experiments.bench_shift [--device cuda] [--output DIR]

Medians of `shift_test` without parts, rows of both sides from one law in 64 dimensions, so that
many permutations are close to the statistic and bounds decide late. A call gets rows that it has
not seen, and ends when the p-value is there. Beside it is the same by `sinkhorn_losses`, which
stores the scores of every problem, for as many permutations as `--rival` says, scaled up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result

DIM = 64
# Rows a side, permutations, and the seconds wanted: on two cores, and on one H200.
CASES = {
    "cpu": ((200, 199, 10.0),),
    "cuda": ((500, 999, 1.5), (2000, 199, 2.0)),
}
CALLS = 3


def seconds_of(rows: int, permutations: int, device: str) -> float:
    """Median seconds of a test, after one that warms up."""
    times = []
    for seed in range(1 + CALLS):
        draw = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(rows, DIM, generator=draw, dtype=torch.float64) for _ in range(2))
        started = time.perf_counter()
        report = otdd.shift_test(
            x,
            y,
            labels="none",
            permutations=permutations,
            parts=False,
            compute=device,
            seed=seed,
        )
        times.append(time.perf_counter() - started)
        assert report.permutations == permutations
    return statistics.median(times[1:])


def rival_seconds(rows: int, permutations: int, count: int, device: str) -> float:
    """Seconds of as many divergences by `sinkhorn_losses`, from `count` of them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * rows, DIM, generator=draw).to(device)
    orders = [torch.randperm(2 * rows, generator=draw).to(device) for _ in range(count)]
    one = torch.stack([x[order[:rows]] for order in orders])
    other = torch.stack([x[order[rows:]] for order in orders])
    started = time.perf_counter()
    # The mean cost of standard normal rows, at weight 1/2, is their dimension.
    float(otdd.sinkhorn_losses(one, other, epsilon=0.1 * DIM, compute=device).sum())
    return (time.perf_counter() - started) * permutations / count


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="times of shift tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rival", type=int, default=20, help="permutations by sinkhorn_losses")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for size, permutations, wanted in CASES[torch.device(given.device).type]:
        took = seconds_of(size, permutations, given.device)
        other = rival_seconds(size, permutations, given.rival, given.device)
        rows.append(
            {
                "rows": size,
                "permutations": permutations,
                "dim": DIM,
                "seconds": took,
                "wanted": wanted,
                "sinkhorn_losses_seconds": other,
            }
        )
        print(rows[-1], flush=True)
    kind = torch.device(given.device).type
    write_result(f"bench_shift_{kind}", {"rows": rows, **environment("torch")}, given.output)


if __name__ == "__main__":
    main()
