"""Exact distances, epsilon 0, by us and by peers, on the same machine and the same cost.

    python -m experiments.bench_exact --data-root DATA [--sizes N ...] [--cap SECONDS]

MNIST against Fashion-MNIST test images of 784 pixels, or digits of 64 where there are 600 points.
`ours` is `dataset_distance` with labels, class distances included, at a width of 1e-4 and proven
(0). POT's `emd2`, SciPy's `linear_sum_assignment` and `lapjv` of lapx get the matrix of labelled
costs, whose time counts; POT's `emd2_lazy` knows squared distances alone and gets points without
labels. Each runs in a process of its own and is stopped after the cap. A value that is wrong is not
timed. The package `wasserstein` wraps a network simplex as well; its 1.1.0 needs an older NumPy.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ot
import torch
from scipy.optimize import linear_sum_assignment

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows

SIZES = (600, 4000, 10_000)
METHODS = (
    *("ours, width 1e-4", "ours, proven"),
    *("POT emd2", "POT emd2_lazy", "SciPy assignment", "lapx lapjv"),
)
CAP, WRONG = 300.0, 1e-6


def datasets(n: int, root: Path | None) -> list[otdd.LabeledSamples]:
    """Both datasets, of n points each."""
    if n <= 600:
        digits = otdd.load("digits", max_samples=n), otdd.load("digits", rotate=30, max_samples=n)
        return [otdd.embed(side, otdd.extractors.pixels()) for side in digits]
    images = (
        otdd.load(name, root=root, split="test", max_samples=n)
        for name in ("mnist", "fashion_mnist")
    )
    return [otdd.embed(side, otdd.extractors.pixels()) for side in images]


def ours(sides: list[otdd.LabeledSamples], width: float) -> dict[str, Any]:
    """The distance, its interval and what it took."""
    found = otdd.dataset_distance(*sides, epsilon=0, solver=otdd.Exact(bound_width=width))
    term = found.divergence.xy
    return {
        "value": found.value,
        "bounds": list(found.bounds),
        "stopped_by": term.stopped_by,
        "programs": term.iterations,
        "passes": term.passes,
        "phases": dict(found.seconds),
    }


def matrix(sides: list[otdd.LabeledSamples]) -> np.ndarray[Any, Any]:
    """The labelled ground cost."""
    x, y = (side.features.double() for side in sides)
    table = otdd.class_distances(sides).between(0, 1).xy / 2
    assert sides[0].labels is not None
    assert sides[1].labels is not None
    squares = x.square().sum(1)[:, None] + y.square().sum(1)
    costs = squares.addmm_(x, y.T, alpha=-2).div_(2)
    return costs.add_(table[sides[0].labels][:, sides[1].labels]).numpy()


def peer(method: str, sides: list[otdd.LabeledSamples]) -> dict[str, Any]:
    """The value of a peer."""
    if method == "POT emd2_lazy":
        x, y = (side.features.double().numpy() for side in sides)
        return {"value": float(ot.emd2_lazy(x, y, numItermax=10**9)[0]) / 2}
    costs = matrix(sides)
    if method == "POT emd2":
        return {"value": float(ot.emd2([], [], costs, numItermax=10**9))}
    if method == "lapx lapjv":
        # Of no extra of ours: `pip install lapx`.
        import lap

        return {"value": float(lap.lapjv(costs, return_cost=True)[0]) / len(costs)}
    rows, columns = linear_sum_assignment(costs)
    return {"value": float(costs[rows, columns].mean())}


def run(method: str, n: int, root: Path | None, out: Any) -> None:
    """Measure one method, in a process of its own."""
    sides = datasets(n, root)
    call: Callable[[], dict[str, Any]] = lambda: peer(method, sides)  # noqa: E731
    if method.startswith("ours"):
        call = lambda: ours(sides, 1e-4 if "width" in method else 0.0)  # noqa: E731
        # Imports and the first call of a library do not count.
        small = [side.take(torch.arange(40)) for side in sides]
        ours(small, 0.0)
    started, used = time.perf_counter(), time.process_time()
    try:
        found = call()
    except Exception as error:
        out.put({"failed": repr(error)})
        raise
    # Of a machine that others use, the processor's time is the fairer one.
    took = {
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - used,
    }
    out.put({**took, **found})


def measured(method: str, n: int, root: Path | None, cap: float) -> dict[str, Any]:
    """The entries of a row."""
    context = mp.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=run, args=(method, n, root, out))
    process.start()
    try:
        found: dict[str, Any] = out.get(timeout=cap)
    except queue.Empty:
        found = {"not_done_after": cap}
    process.kill()
    process.join()
    return found


def main() -> None:
    """Write bench_exact_cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--cap", type=float, default=CAP, help="seconds of a run at the most")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure what is there again")
    given = parser.parse_args()
    packages = "torch", "POT", "scipy", "lapx"
    keys, folder = ("method", "n"), given.output
    rows = Rows("bench_exact_cpu", keys, *packages, folder=folder, again=given.again)
    for n in given.sizes:
        truth: float | None = None
        for method in given.methods:
            if rows.has(method=method, n=n):
                continue
            found = measured(method, n, given.data_root, given.cap)
            value = found.get("value")
            if method == "ours, proven":
                truth = value
            labelled = method in ("POT emd2", "SciPy assignment", "lapx lapjv")
            if labelled and truth and value is not None and abs(value - truth) > WRONG * truth:
                found = {"wrong": value}
            rows.add({"method": method, "n": n, "d": 64 if n <= 600 else 784, **found})


if __name__ == "__main__":
    main()
