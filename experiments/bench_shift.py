"""How long a shift test takes: 199 and 999 permutations of clouds without labels.

    python -m experiments.bench_shift [--device cuda] [--rival 20] [--output DIR]

Medians of `shift_test` without parts, rows of both sides from one law in 64 dimensions, so that
many permutations are close to the statistic and bounds decide late. A call gets rows that it has
not seen, and ends when the p-value is there. Beside it is the same by `sinkhorn_losses`, which
stores the scores of every problem, for as many permutations as `--rival` says, scaled up; 0 leaves
it out. Each number is printed and written as soon as it is there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.cost.ground import GroundCost
from otdd_flash.labels import NoLabels
from otdd_flash.samples import LabeledSamples
from otdd_flash.shift.effect import measure_effect
from otdd_flash.shift.joint import DEFAULT_RELATIVE
from otdd_flash.shift.parts import describe
from otdd_flash.shift.pooled import PooledCost, draws, permutation_test
from otdd_flash.shift.rows import PooledRows

T = TypeVar("T")

DIM = 64
# Rows a side, permutations, and the seconds wanted: on two cores, and on one H200.
CASES = {
    "cpu": ((200, 199, 10.0),),
    "cuda": ((500, 999, 1.5), (2000, 199, 2.0)),
}
CALLS = 3


def clouds(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, DIM, generator=draw, dtype=torch.float64) for _ in range(2))
    return x, y


def seconds_of(rows: int, permutations: int, device: str) -> float:
    """Median seconds of a test, after one that warms up."""
    times = []
    for seed in range(1 + CALLS):
        x, y = clouds(rows, seed)
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


def seconds_by_part(rows: int, permutations: int, device: str) -> dict[str, float]:
    """Seconds of each part of a test, on warm hardware, each waited for."""
    found: dict[str, float] = {}
    place, metric, cost = torch.device(device), NoLabels(), GroundCost()

    def timed(part: str, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = work()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        found[part] = time.perf_counter() - started
        return result

    sides = [LabeledSamples(x, None, ()) for x in clouds(rows, 1 + CALLS)]
    pool = timed("rows", lambda: PooledRows.of(sides[0], sides[1], metric, None))
    costs = timed("costs", lambda: pool.cost(cost, metric, place))
    pooled = timed(
        "kernels", lambda: PooledCost(costs, pool.samples.masses, None, DEFAULT_RELATIVE)
    )
    drawn = timed("draws", lambda: list(draws(pool, permutations, 1, pooled.batch)))
    timed("masses", lambda: [pool.sides(units, place) for units in drawn])
    ours = pool.unit_in_reference[:, None]
    timed("statistic", lambda: pooled.statistics(*pool.sides(ours, place)))
    test = timed(
        "statistic and permutations", lambda: permutation_test(pooled, pool, permutations, 1)
    )
    timed("effect", lambda: measure_effect(pooled, pool, test, alpha=1.0, seed=1))
    timed("shares and contributions", lambda: describe(pooled, pool))
    return found


def rival_seconds(rows: int, permutations: int, count: int, device: str) -> float:
    """Seconds of as many divergences by `sinkhorn_losses`, from `count` of them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * rows, DIM, generator=draw).to(device)
    orders = [torch.randperm(2 * rows, generator=draw).to(device) for _ in range(count)]
    one = torch.stack([x[order[:rows]] for order in orders])
    other = torch.stack([x[order[rows:]] for order in orders])
    took = 0.0
    # The first call compiles and does not count.
    for _ in range(2):
        started = time.perf_counter()
        # The mean cost of standard normal rows, at weight 1/2, is their dimension.
        float(otdd.sinkhorn_losses(one, other, epsilon=0.1 * DIM, compute=device).sum())
        took = time.perf_counter() - started
    return took * permutations / count


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="times of shift tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rival", type=int, default=20, help="permutations by sinkhorn_losses")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    kind, rows = torch.device(given.device).type, list[dict[str, Any]]()

    def add(**values: Any) -> None:
        """Print what was measured, and write all of it at once."""
        rows[-1] |= values
        print(values, flush=True)
        write_result(f"bench_shift_{kind}", {"rows": rows, **environment("torch")}, given.output)

    for size, permutations, wanted in CASES[kind]:
        case = size, permutations, given.device
        rows.append({"rows": size, "permutations": permutations, "dim": DIM, "wanted": wanted})
        add(seconds=seconds_of(*case))
        add(by_part=seconds_by_part(*case))
        if given.rival:
            add(
                sinkhorn_losses_seconds=rival_seconds(size, permutations, given.rival, given.device)
            )


if __name__ == "__main__":
    main()
