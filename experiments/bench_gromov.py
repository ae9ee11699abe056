"""Gromov-Wasserstein distances by us and by POT, on the same points, at the same epsilon.

    python -m experiments.bench_gromov [--device cuda] [--sizes N ...] [--data-root DATA]

Digits of 64 pixels against their first 40 principal components up to 1,700 points, else MNIST of
784 pixels against 512 principal components of Fashion-MNIST. `ours` has one start, along principal
axes, and `ours, 4 starts` the default; seconds include bounds and the corrected plan. POT's
`entropic_gromov_wasserstein` starts at the independent plan, to its default tolerance, and gets
both matrices of squared distances, whose time counts. Energies are of the plans found, those of POT
with its sums as they are. On a GPU, `--device cuda`, POT runs by PyTorch where the matrices fit.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import ot
import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows
from otdd_flash.extractors import reduce_pca

SIZES = {"cpu": (300, 1000), "cuda": (1000, 10_000, 60_000)}
METHODS = ("ours", "ours, 4 starts", "POT")
STARTS = {"ours": 1, "ours, 4 starts": 4}
# Of E(a b^T).
EPSILON = 0.01
# Rows of POT's matrices above which three of them do not fit.
MOST_DENSE = 20_000
DIGITS, FEW, MANY = 1700, 40, 512


def datasets(n: int, root: Path | None) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    """Both datasets, of n points each; the second is reduced."""
    pixels = otdd.extractors.pixels()
    names, kept = (("digits", "digits"), FEW) if n <= DIGITS else (("mnist", "fashion_mnist"), MANY)
    source, target = (
        otdd.embed(otdd.load(name, root=root, split="all", seed=seed, max_samples=n), pixels)
        for seed, name in enumerate(names)
    )
    return source, reduce_pca(target, target, kept, 0)[1]


def ours(
    sides: tuple[otdd.LabeledSamples, otdd.LabeledSamples], starts: int, device: str
) -> dict[str, Any]:
    """Our energy, its lower bounds and what it took."""
    found = otdd.dataset_distance(
        *sides,
        ground="gromov",
        labels="none",
        debias=False,
        lambda_x=1.0,
        epsilon_relative=EPSILON,
        starts=starts,
        compute=device,
    )
    assert found.gromov is not None
    return {
        "energy": found.value,
        "bounds": list(found.bounds),
        "starts": [start._asdict() for start in found.gromov.starts],
        "iterations": found.divergence.xy.iterations,
        "converged": found.converged,
    }


def pot(
    sides: tuple[otdd.LabeledSamples, otdd.LabeledSamples], epsilon: float, device: str
) -> dict[str, Any]:
    """The energy of POT's plan."""
    first, second = (_squares(side.features.to(device).double()) for side in sides)
    a, b = (side.masses.to(device) for side in sides)
    plan, log = ot.gromov.entropic_gromov_wasserstein(
        first, second, a, b, "square_loss", epsilon=epsilon, solver="PGD", log=True
    )
    rows, columns = plan.sum(1), plan.sum(0)
    energy = rows @ first.square() @ rows + columns @ second.square() @ columns
    energy -= 2 * (first @ plan @ second * plan).sum()
    error = float((rows - a).abs().sum())
    return {"energy": float(energy), "row_error": error, "reported": float(log["gw_dist"])}


def _squares(points: Tensor) -> Tensor:
    return torch.cdist(points, points).square()


def measured(method: str, n: int, root: Path | None, device: str) -> dict[str, Any]:
    """The entries of a row."""
    sides = datasets(n, root)
    if method == "POT":
        if n > MOST_DENSE:
            return {"not_done": f"matrices of {n} x {n}"}
        epsilon = _epsilon(sides)
        call: Any = lambda: pot(sides, epsilon, device)  # noqa: E731
    else:
        # Imports and the first call do not count.
        some = [side.take(torch.arange(40)) for side in sides]
        ours((some[0], some[1]), 1, device)
        call = lambda: ours(sides, STARTS[method], device)  # noqa: E731
    started, used = time.perf_counter(), time.process_time()
    found = call()
    # Of a machine that others use, the processor's time is the fairer one.
    took = {
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - used,
    }
    return {**took, **found}


def _epsilon(sides: tuple[otdd.LabeledSamples, otdd.LabeledSamples]) -> float:
    """The epsilon of ours, from dense sums."""
    first, second = (_squares(side.features.double()) for side in sides)
    a, b = (side.masses for side in sides)
    mean = a @ first.square() @ a + b @ second.square() @ b
    return EPSILON * float(mean - 2 * (a @ first @ a) * (b @ second @ b))


def main() -> None:
    """Write bench_gromov_cpu.json or bench_gromov_cuda.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure what is there again")
    given = parser.parse_args()
    keys, name = ("method", "n"), f"bench_gromov_{given.device}"
    rows = Rows(name, keys, "torch", "POT", folder=given.output, again=given.again)
    for n in given.sizes or SIZES[given.device]:
        for method in given.methods:
            if not rows.has(method=method, n=n):
                found = measured(method, n, given.data_root, given.device)
                rows.add({"method": method, "n": n, **found})


if __name__ == "__main__":
    main()
