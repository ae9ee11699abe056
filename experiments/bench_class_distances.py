"""Class distances of real label sets: all pairs at once, pair by pair, and geomloss pair by pair.

    python -m experiments.bench_class_distances --data-root DIR [--device cuda] [--samples 60000]
        [--source mnist] [--target fashion_mnist] [--sampled-pairs 19] [--many-classes 1000]
        [--output DIR]

Pixels of two image sets, n images of each, 784 dimensions, twenty classes: 190 pairs and 20 self
terms. Gaussian distances, and debiased Sinkhorn divergences at an epsilon in units of ||x - y||^2
to a marginal error of 1e-3. Beside them, on evenly spread pairs and scaled up to all 190,

- pair_by_pair: the same solver called once per pair;
- divergences: `sinkhorn_divergence` called once per pair, with both self terms, to the same error;
- geomloss: its `SamplesLoss` called once per pair as the original OTDD code does, without
  debiasing, tensorized, at the same epsilon. It has no stopping rule but a schedule: its own of
  scaling 0.5, and finer ones that come nearer, on fewer pairs. The error that each ends with is
  in the result, by float64 sums over its plan.

`--many-classes K` adds K + K Gaussian classes of 64 points in 512 dimensions. Every time of ours is
of the second of two calls, the first of which compiles; no cache. A solve of ours that does not
converge ends the script.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.labels.gaussian import gaussian_table
from otdd_flash.labels.pairs import ClassCloud, PairDistances, all_pairs, pool
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances

TOLERANCE = 1e-3
# geomloss' scalings, and on how many pairs each is tried.
SCALINGS = {0.5: 19, 0.95: 10, 0.99: 5, 0.999: 1}
MANY_CLASS_SIZE, MANY_CLASS_DIM = 64, 512


def seconds_of(run: Callable[[], Any], *, once: bool = False) -> tuple[float, Any]:
    """Time and result of the second of two calls, or of the only one."""
    if not once:
        run()
    _wait()
    start = time.perf_counter()
    result = run()
    _wait()
    return time.perf_counter() - start, result


def images(name: str, samples: int, data_root: Path, device: str) -> otdd.LabeledSamples:
    """Pixels of n training images, 28 x 28."""
    data = otdd.load(name, root=data_root, max_samples=samples)
    return otdd.embed(data, otdd.extractors.pixels(size=28)).to(torch.device(device))


def pair_by_pair(clouds: list[ClassCloud], pairs: Tensor, epsilon: float) -> Tensor:
    """The divergence of every pair by the same solver, one after the other."""
    alone = [sinkhorn_distances(clouds, pair[None], epsilon, TOLERANCE) for pair in pairs]
    return torch.cat([distances.values for distances in alone])


def divergences(clouds: list[ClassCloud], pairs: Tensor, epsilon: float) -> Tensor:
    """The same by `sinkhorn_divergence`."""
    options = otdd.Converged(tolerance=TOLERANCE)
    cost = otdd.GroundCost(lambda_x=1.0, lambda_y=0.0)
    values = [
        otdd.sinkhorn_divergence(
            clouds[i].points, clouds[j].points, epsilon=epsilon, cost=cost, options=options
        ).value
        for i, j in pairs.tolist()
    ]
    return torch.tensor(values)


def geomloss(
    clouds: list[ClassCloud], pairs: Tensor, epsilon: float, scaling: float
) -> list[tuple[Tensor, Tensor]]:
    """Potentials of every pair by geomloss, whose cost is half of ours."""
    from geomloss import SamplesLoss

    loss = SamplesLoss(
        "sinkhorn",
        p=2,
        blur=(epsilon / 2) ** 0.5,
        scaling=scaling,
        debias=False,
        potentials=True,
        backend="tensorized",
    )
    return [loss(clouds[i].points, clouds[j].points) for i, j in pairs.tolist()]


def marginal_error(one: ClassCloud, two: ClassCloud, f: Tensor, g: Tensor, epsilon: float) -> float:
    """L1 error of the worse marginal of the plan that geomloss' potentials make."""
    x, y = one.points.double(), two.points.double()
    f, g = 2 * f.reshape(-1, 1).double(), 2 * g.reshape(1, -1).double()
    plan = ((f + g - torch.cdist(x, y).square()) / epsilon).exp_() / (len(x) * len(y))
    return max(float((plan.sum(k) - 1 / plan.shape[1 - k]).abs().sum()) for k in (0, 1))


def bench_images(clouds: list[ClassCloud], epsilon: float, sampled: int) -> dict[str, Any]:
    """All methods on the classes of two image sets."""
    pairs = all_pairs(len(clouds))
    chosen = torch.linspace(0, len(pairs) - 1, min(sampled, len(pairs))).long()
    scale = len(pairs) / len(chosen)
    gaussian, _ = seconds_of(partial(gaussian_table, clouds, pairs))
    ours, distances = seconds_of(partial(sinkhorn_distances, clouds, pairs, epsilon, TOLERANCE))
    alone, values = seconds_of(partial(pair_by_pair, clouds, pairs[chosen], epsilon))
    _check(distances, chosen, values)
    one_by_one, values = seconds_of(partial(divergences, clouds, pairs[chosen], epsilon))
    _check(distances, chosen, values)
    # Theirs compile nothing, but the device does wake up once.
    geomloss(clouds, pairs[:1], epsilon, 0.5)
    theirs = {}
    for scaling, most in SCALINGS.items():
        some = pairs[chosen[torch.linspace(0, len(chosen) - 1, min(most, len(chosen))).long()]]
        seconds, potentials = seconds_of(
            partial(geomloss, clouds, some, epsilon, scaling), once=True
        )
        errors = [
            marginal_error(clouds[i], clouds[j], f, g, epsilon)
            for (i, j), (f, g) in zip(some.tolist(), potentials, strict=True)
        ]
        seconds *= len(pairs) / len(some)
        theirs[f"scaling {scaling}"] = {
            "sampled_pairs": len(some),
            "seconds": seconds,
            "times_faster": seconds / ours,
            "median_marginal_error": sorted(errors)[len(errors) // 2],
            "largest_marginal_error": max(errors),
        }
    width = (distances.upper - distances.lower) / distances.values
    return {
        "classes": len(clouds),
        "points": sum(map(len, clouds)),
        "dim": clouds[0].points.shape[1],
        "pairs": len(pairs),
        "epsilon": epsilon,
        "tolerance": TOLERANCE,
        "gaussian_seconds": gaussian,
        "sinkhorn_seconds": ours,
        "relative_width_of_bounds": float(width.median()),
        "sampled_pairs": len(chosen),
        "pair_by_pair_seconds": alone * scale,
        "times_faster_than_pair_by_pair": alone * scale / ours,
        "divergences_seconds": one_by_one * scale,
        "times_faster_than_divergences": one_by_one * scale / ours,
        "geomloss": theirs,
    }


def _check(distances: PairDistances, chosen: Tensor, values: Tensor) -> None:
    """Nothing is reported where both ways disagree by more than the bounds allow."""
    width = (distances.upper - distances.lower)[chosen]
    gap = (distances.values[chosen] - values.to(distances.values)).abs()
    if bool((gap > width + 2e-3 * distances.values[chosen]).any()):
        raise SystemExit(f"values differ by up to {float(gap.max()):.3g}: nothing is reported")


def bench_many(classes: int, device: str, epsilon_relative: float = 0.05) -> dict[str, Any]:
    """Two datasets of `classes` Gaussian classes each."""
    draw = torch.Generator().manual_seed(0)
    means = torch.randn(2 * classes, 1, MANY_CLASS_DIM, generator=draw)
    points = means + torch.randn(2 * classes, MANY_CLASS_SIZE, MANY_CLASS_DIM, generator=draw)
    clouds = [ClassCloud(str(i), cloud.to(device), None) for i, cloud in enumerate(points)]
    pairs = all_pairs(len(clouds))
    # ||x - y||^2 is 4 d on average.
    epsilon = epsilon_relative * 4 * MANY_CLASS_DIM
    gaussian, _ = seconds_of(partial(gaussian_table, clouds, pairs))
    sinkhorn, distances = seconds_of(partial(sinkhorn_distances, clouds, pairs, epsilon, TOLERANCE))
    width = (distances.upper - distances.lower) / distances.values
    return {
        "classes": len(clouds),
        "points": len(clouds) * MANY_CLASS_SIZE,
        "dim": MANY_CLASS_DIM,
        "pairs": len(pairs),
        "epsilon": epsilon,
        "tolerance": TOLERANCE,
        "gaussian_seconds": gaussian,
        "sinkhorn_seconds": sinkhorn,
        "relative_width_of_bounds": float(width.median()),
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Write bench_class_distances_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--source", default="mnist")
    parser.add_argument("--target", default="fashion_mnist")
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0])
    parser.add_argument("--sampled-pairs", type=int, default=19)
    parser.add_argument("--many-classes", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    # A solve of ours that stops early is an error here: nothing is reported.
    warnings.simplefilter("error", otdd.NotConvergedWarning)
    sides = [
        images(name, arguments.samples, arguments.data_root, arguments.device)
        for name in (arguments.source, arguments.target)
    ]
    clouds, _ = pool(sides)
    result: dict[str, Any] = {
        "environment": environment("torch", "triton", "geomloss"),
        "datasets": [arguments.source, arguments.target],
        "images": [],
    }
    name = f"bench_class_distances_{torch.device(arguments.device).type}"
    for epsilon in arguments.epsilon:
        result["images"].append(bench_images(clouds, epsilon, arguments.sampled_pairs))
        write_result(name, result, arguments.output)
        print(result["images"][-1], flush=True)
    if arguments.many_classes:
        result["many"] = bench_many(arguments.many_classes, arguments.device)
        write_result(name, result, arguments.output)
        print(result["many"], flush=True)


if __name__ == "__main__":
    main()
