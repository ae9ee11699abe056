"""Solves certified divergences on request: one side of `bench_certified`, of any checkout.

    PYTHONPATH=CHECKOUT python experiments/certified_solves.py DEVICE DATA_ROOT

It imports nothing but the library. Every line of the input is the index of a case; the answer is a
line of JSON with the seconds of one solve, its value, bounds and passes. A case is prepared, and
its kernels are compiled, when it is first asked for.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from typing import Any, NamedTuple

import torch

import otdd_flash as otdd
from otdd_flash.labels import measure_classes
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.solving import solve as solve_comparison

CLASSES = 10


class Case(NamedTuple):
    """A divergence of n points a side.

    Attributes:
        kind: `float` or `grey` for random clouds, or the two datasets of a pair.
        dim: of random clouds.
        relative: epsilon in mean costs; None is epsilon = 0.1.
    """

    kind: str
    n: int
    dim: int
    relative: float | None


PAIRS = ("mnist usps", "mnist fashion_mnist")
LEVELS = (0.1, 0.01, 0.001)
CASES = {
    "cpu": [
        *(Case(pair, n, 784, level) for pair in PAIRS for n in (500, 2_000) for level in LEVELS),
        *(Case(pair, 2_000, 784, None) for pair in PAIRS),
        *(Case("float", 2_000, dim, level) for dim in (64, 512) for level in (0.1, 0.01)),
    ],
    "cuda": [
        *(Case("float", 60_000, 512, level) for level in (0.1, 0.01)),
        *(Case("grey", 60_000, 784, level) for level in LEVELS),
        *(Case("float", n, 64, level) for n in (60_000, 5_000, 1_000) for level in LEVELS),
    ],
}


def random_clouds(
    case: Case, device: str
) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples, torch.Tensor]:
    """Gaussian classes around random means, or their grey values, and a random class table."""
    draw = torch.Generator(device).manual_seed(1)
    options: dict[str, Any] = {"generator": draw, "device": device}
    means = torch.randn(2 * CLASSES, case.dim, **options) / 2
    labels = [torch.randint(0, CLASSES, (case.n,), **options) for _ in range(2)]
    points = [torch.randn(case.n, case.dim, **options) for _ in range(2)]
    points = [
        side + means[side_labels + CLASSES * k]
        for k, (side, side_labels) in enumerate(zip(points, labels, strict=True))
    ]
    table = torch.rand(2 * CLASSES, 2 * CLASSES, **options).double() * case.dim * 0.3
    table = (table + table.T).fill_diagonal_(0)
    if case.kind == "grey":
        points = [(side * 80).clamp(0, 255).round() / 255 for side in points]
        table /= 10
    names = tuple(map(str, range(CLASSES)))
    source, target = (
        otdd.LabeledSamples(side, of_side, names)
        for side, of_side in zip(points, labels, strict=True)
    )
    return source, target, table


def load_pair(
    names: tuple[str, str], root: str, samples: int, device: str
) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples, torch.Tensor]:
    """Both sides' pixels at 28 x 28, and their gaussian class distances."""
    source, target = (
        otdd.embed(
            otdd.load(name, root=root, max_samples=samples),
            otdd.extractors.pixels(size=28),
            device=device,
        )
        for name in names
    )
    return source, target, measure_classes(source, target, otdd.labels.Gaussian()).full


def problem_of(case: Case, device: str, root: str) -> Comparison:
    """The problem of a case."""
    if " " in case.kind:
        first, second = case.kind.split()
        source, target, table = load_pair((first, second), root, case.n, device)
    else:
        source, target, table = random_clouds(case, device)
    cost, compute = otdd.GroundCost(), otdd.ComputeOptions(device=device)
    comparison = Comparison.prepare((source, target), cost, compute).with_classes(table)
    relative = case.relative
    return comparison.at(0.1 if relative is None else relative * comparison.mean_cost())


def solve(problem: Comparison) -> dict[str, Any]:
    """One solve; on a CPU the processor's time, which other work does not disturb."""
    gpu = problem.device.type == "cuda"
    clock = time.perf_counter if gpu else time.process_time
    if gpu:
        torch.cuda.synchronize()
    started = clock()
    found = solve_comparison(problem, otdd.Converged())
    if gpu:
        torch.cuda.synchronize()
    return {
        "seconds": clock() - started,
        "value": found.value,
        "bounds": list(found.bounds),
        "passes": found.passes,
        "converged": found.converged,
    }


def main() -> None:
    """Answer requests until the input ends."""
    device, root = sys.argv[1:3]
    if device == "cpu":
        torch.set_num_threads(1)

    @cache
    def prepared(index: int) -> Comparison:
        problem = problem_of(CASES[device][index], device, root)
        solve(problem)
        return problem

    for line in sys.stdin:
        sys.stdout.write(json.dumps(solve(prepared(int(line)))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
