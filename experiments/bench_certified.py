"""Certified divergences of random labelled clouds on a GPU: seconds, passes and widths.

    python -m experiments.bench_certified [--name after]

Float features (d = 512, 64) and grey values of 8 bits (d = 784), ten classes a side, epsilon 0.1,
0.01 and 0.001 of the mean cost, the default tolerance. Two checkouts that are run in turn on one
card tell what a change of the certificate costs; `--name` keeps their rows apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import environment, write_result
from otdd_flash.operators.build import labelled_cost
from otdd_flash.solver.problem import Problem

CLASSES = 10
# Kind, points a side, dimension, multiples of the mean cost.
CASES = (
    ("float", 60_000, 512, (0.1, 0.01)),
    ("grey", 60_000, 784, (0.1, 0.01, 0.001)),
    ("float", 60_000, 64, (0.1, 0.01, 0.001)),
    ("float", 5_000, 64, (0.1, 0.01, 0.001)),
    ("float", 1_000, 64, (0.1, 0.01, 0.001)),
)
REPEATS = 5


def clouds(
    kind: str, n: int, dim: int
) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples, torch.Tensor]:
    """Gaussian classes around random means, or their grey values, and a random class table."""
    draw = torch.Generator("cuda").manual_seed(1)
    options: dict[str, Any] = {"generator": draw, "device": "cuda"}
    means = torch.randn(2 * CLASSES, dim, **options) / 2
    labels = [torch.randint(0, CLASSES, (n,), **options) for _ in range(2)]
    points = [torch.randn(n, dim, **options) for _ in range(2)]
    points = [
        side + means[side_labels + CLASSES * k]
        for k, (side, side_labels) in enumerate(zip(points, labels, strict=True))
    ]
    table = torch.rand(2 * CLASSES, 2 * CLASSES, **options).double() * dim * 0.3
    table = (table + table.T).fill_diagonal_(0)
    if kind == "grey":
        points = [(side * 80).clamp(0, 255).round() / 255 for side in points]
        table /= 10
    names = tuple(map(str, range(CLASSES)))
    source, target = (
        otdd.LabeledSamples(side, of_side, names)
        for side, of_side in zip(points, labels, strict=True)
    )
    return source, target, table


def measure(kind: str, n: int, dim: int, relative: float) -> dict[str, Any]:
    """One row."""
    source, target, table = clouds(kind, n, dim)
    block = table[:CLASSES, CLASSES:]
    weights, device = otdd.GroundCost(), torch.device("cuda")
    epsilon = relative * labelled_cost(source, target, block, weights, device).mean_cost
    compute = otdd.ComputeOptions(device="cuda")
    problem = Problem(source, target, epsilon, table, weights, compute)
    found, seconds = problem.solve(otdd.SolverOptions()), []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        found = problem.solve(otdd.SolverOptions())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    width = found.bounds[1] - found.bounds[0]
    return {
        "kind": kind,
        "n": n,
        "d": dim,
        "epsilon_relative": relative,
        "milliseconds": 1e3 * statistics.median(seconds),
        "value": found.value,
        "relative_width": width / abs(found.value),
        "terms": {name: term.summary() for name, term in found.terms.items()},
    }


def main() -> None:
    """Write bench_certified_NAME.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--name", default="cuda")
    given = parser.parse_args()
    rows = []
    for kind, n, dim, relatives in CASES:
        for relative in relatives:
            rows.append(measure(kind, n, dim, relative))
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
    write_result(f"bench_certified_{given.name}", {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
