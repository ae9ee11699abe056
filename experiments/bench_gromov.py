"""Gromov-Wasserstein distances by us and by others, on the same points, at the same epsilon.

    python -m experiments.bench_gromov [--device cuda] [--sizes N ...] [--data-root DATA]

Digits of 64 pixels against their first 40 principal components up to 1,700 points, else MNIST of
784 pixels against 512 principal components of Fashion-MNIST. `ours` has one start, along principal
axes, and `ours, 4 starts` the default; seconds include bounds and the plan with corrected sums.
Others run where they are installed:

- POT: `entropic_gromov_wasserstein` by PGD from the independent plan, to its default tolerances,
  from both matrices of squared distances, whose time counts; by PyTorch on a GPU.
- OTT: `GromovWasserstein` of two point clouds. Its linearised cost is half of ours, and so is its
  epsilon. `OTT, low rank`: `LRGromovWasserstein` of rank 20, which has no epsilon here.
- torchgw: `sampled_gw` of both matrices, by its default numbers of samples. It divides each matrix
  by its largest entry, and so looks for the plan of another energy; epsilon is in that unit.

Plans of others are no couplings to the last digit, and E falls where sums are wrong. So their
energy is E, by our formulas, of their plan with sums corrected as ours are, and their objective is
that plus epsilon KL; `raw_energy` is of their plan as it is, with the L1 errors of its sums.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ot
import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows
from otdd_flash.extractors import reduce_pca
from otdd_flash.gromov.energy import Cloud, Energy

Sides = tuple[otdd.LabeledSamples, otdd.LabeledSamples]

SIZES = {"cpu": (300, 1000), "cuda": (1000, 10_000, 60_000)}
STARTS = {"ours": 1, "ours, 4 starts": 4}
# Of E(a b^T).
EPSILON = 0.01
# Rows of others' matrices above which three of them do not fit.
MOST_DENSE = 20_000
DIGITS, FEW, MANY = 1700, 40, 512
# By the default gamma of 10 it ends near the independent plan; of 10, 100 and 1,000 this is best.
RANK, GAMMA = 20, 1000.0


def datasets(n: int, root: Path | None) -> Sides:
    """Both datasets, of n points each; the second is reduced."""
    pixels = otdd.extractors.pixels()
    names, kept = (("digits", "digits"), FEW) if n <= DIGITS else (("mnist", "fashion_mnist"), MANY)
    source, target = (
        otdd.embed(otdd.load(name, root=root, split="all", seed=seed, max_samples=n), pixels)
        for seed, name in enumerate(names)
    )
    return source, reduce_pca(target, target, kept, 0)[1]


def ours(sides: Sides, starts: int, device: str) -> dict[str, Any]:
    """Our energy, its lower bounds and what it took."""
    result = otdd.dataset_distance(
        *sides,
        ground="gromov",
        labels="none",
        debias=False,
        lambda_x=1.0,
        epsilon_relative=EPSILON,
        starts=starts,
        compute=device,
    )
    assert result.gromov is not None
    return {
        "energy": result.value,
        "objective": min(start.objective for start in result.gromov.starts),
        "bounds": list(result.bounds),
        "starts": [start._asdict() for start in result.gromov.starts],
        "iterations": result.divergence.xy.iterations,
        "converged": result.converged,
    }


def pot(sides: Sides, epsilon: float, device: str) -> Tensor:
    """POT's plan."""
    first, second = (_squares(side.features.to(device).double()) for side in sides)
    a, b = (side.masses.to(device) for side in sides)
    plan: Tensor = ot.gromov.entropic_gromov_wasserstein(
        first, second, a, b, "square_loss", epsilon=epsilon, solver="PGD"
    )
    return plan


def ott(sides: Sides, epsilon: float, device: str) -> Tensor:
    """The plan of OTT-JAX, on the device that JAX finds."""
    from ott.solvers.linear.sinkhorn import Sinkhorn
    from ott.solvers.quadratic.gromov_wasserstein import GromovWasserstein

    solver = GromovWasserstein(Sinkhorn(max_iterations=10_000), epsilon=epsilon / 2)
    return _ott(sides, solver)


def ott_low_rank(sides: Sides, epsilon: float, device: str) -> Tensor:
    """The plan of rank 20 of OTT-JAX."""
    from ott.solvers.quadratic.gromov_wasserstein_lr import LRGromovWasserstein

    return _ott(sides, LRGromovWasserstein(rank=RANK, gamma=GAMMA))


def _ott(sides: Sides, solver: Any) -> Tensor:
    import jax.numpy as jnp
    import numpy as np
    from ott.geometry.pointcloud import PointCloud
    from ott.problems.quadratic.quadratic_problem import QuadraticProblem

    clouds = (PointCloud(jnp.asarray(side.features.numpy())) for side in sides)
    found = solver(QuadraticProblem(*clouds))
    return torch.from_numpy(np.array(found.matrix))


def torchgw(sides: Sides, epsilon: float, device: str) -> Tensor:
    """The plan of torchgw."""
    from torchgw import sampled_gw

    first, second = (_squares(side.features.to(device).double()) for side in sides)
    plan: Tensor = sampled_gw(
        distance_mode="precomputed",
        dist_source=first,
        dist_target=second,
        epsilon=epsilon / 2 / float(first.max() * second.max()),
        device=torch.device(device),
    )
    return plan


# The package that has to be installed, and what it runs.
OTHERS: dict[str, tuple[str, Callable[[Sides, float, str], Tensor]]] = {
    "POT": ("ot", pot),
    "OTT": ("ott", ott),
    "OTT, low rank": ("ott", ott_low_rank),
    "torchgw": ("torchgw", torchgw),
}
METHODS = (*STARTS, *OTHERS)


def evaluated(sides: Sides, plan: Tensor, epsilon: float) -> dict[str, Any]:
    """E of another one's plan, as it is and with its sums corrected."""
    plan = plan.double().cpu()
    energy, (a, b) = Energy(*map(Cloud.of, sides)), (side.masses for side in sides)
    errors = float((plan.sum(1) - a).abs().sum()), float((plan.sum(0) - b).abs().sum())
    rounded = plan * (a / plan.sum(1)).clamp_max(1)[:, None]
    rounded = rounded * (b / rounded.sum(0)).clamp_max(1)
    missing = (a - rounded.sum(1)).clamp_min(0), (b - rounded.sum(0)).clamp_min(0)
    rounded = rounded + missing[0][:, None] * missing[1] / missing[1].sum().clamp_min(1e-300)
    value = _energy(energy, rounded)
    entropy = float(torch.xlogy(rounded, rounded / (a[:, None] * b)).sum())
    return {
        "energy": value,
        "objective": value + epsilon * entropy,
        "raw_energy": _energy(energy, plan),
        "row_error": errors[0],
        "column_error": errors[1],
    }


def _energy(energy: Energy, plan: Tensor) -> float:
    x, y = energy.x, energy.y
    norms = float(x.centred_norms @ plan @ y.centred_norms)
    return energy.value(norms, x.points.T @ plan @ y.points)


def _squares(points: Tensor) -> Tensor:
    return torch.cdist(points, points).square()


def measured(method: str, n: int, root: Path | None, device: str) -> dict[str, Any]:
    """The entries of a row."""
    sides, plan = datasets(n, root), None
    epsilon = EPSILON * Energy(*map(Cloud.of, sides)).independent
    if method in OTHERS and n > MOST_DENSE:
        return {"not_done": f"matrices of {n} x {n}"}
    # Imports, compilation and the first call do not count; kernels are compiled for sizes.
    few = (sides[0].take(torch.arange(40)), sides[1].take(torch.arange(40)))
    for of in (few if device == "cpu" else sides, sides):
        started, used = time.perf_counter(), time.process_time()
        if method in STARTS:
            found = ours(of, STARTS[method], device)
        else:
            plan = OTHERS[method][1](of, epsilon, device)
            float(plan.sum())
        # Of a machine that others use, the processor's time is the fairer one.
        took = {
            "seconds": time.perf_counter() - started,
            "processor_seconds": time.process_time() - used,
        }
    if plan is not None:
        found = evaluated(sides, plan, epsilon)
    return {**took, **found}


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
    rows = Rows(name, keys, "torch", "POT", "ott-jax", folder=given.output, again=given.again)
    for n in given.sizes or SIZES[given.device]:
        for method in given.methods:
            if rows.has(method=method, n=n):
                continue
            if method in OTHERS and find_spec(OTHERS[method][0]) is None:
                print(f"{method} is not installed")
                continue
            found = measured(method, n, given.data_root, given.device)
            rows.add({"method": method, "n": n, **found})


if __name__ == "__main__":
    main()
