"""Certified divergences of small clouds, beside geomloss and on a GPU flash-sinkhorn.

    python -m experiments.bench_small [--device cpu] [--output DIR] [--again]
        [--sizes N ...] [--dimensions D ...]

100 to 5,000 points a side on a GPU, 50 to 500 on one core of a processor.

Every call gets clouds and labels that it has not seen, Gaussian ones around ten means a side, and
is timed by the host's clock until its number is there: medians of twenty calls after three.
Forward, and with the gradient by x.

- ours: `sinkhorn_loss` with its defaults, to a marginal error of 1e-3, certified;
- geomloss at scaling 0.9, tensorized, whose schedule ends where it ends (points alone);
- flash-sinkhorn with ten iterations from zero potentials (with labels too), on a GPU.

A time counts if the number is right: of ours, within its interval, which has to meet that of a
solve in float64 (up to 1,000 points a side). What others return is compared with ours, in `off`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.environment import RESULTS
from experiments.rows import Rows
from otdd_flash import ComputeOptions, Converged, sinkhorn_divergence, sinkhorn_loss
from otdd_flash.cost.ground import GroundCost
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence

SIZES, DIMENSIONS = (5_000, 2_000, 1_000, 500, 100), (16, 64, 512)
SIZES_CPU, DIMENSIONS_CPU = (500, 200, 128, 50), (8, 64)
RELATIVE_EPSILONS, CLASSES, ITERATIONS = (0.1, 0.01), 10, 10
CALLS, WARM_UPS = 20, 3
# Above it a solve in float64 takes longer than all the others.
MOST_CHECKED = 1_000


@dataclass(frozen=True)
class Clouds:
    """Two clouds of one size, with labels or without, and epsilon."""

    x: Tensor
    y: Tensor
    labels: tuple[Tensor, Tensor] | None
    table: Tensor | None
    epsilon: float

    @classmethod
    def draw(
        cls, n: int, d: int, *, labelled: bool, relative: float, seed: int, device: str
    ) -> Clouds:
        """Around ten means a side, of unit length as a rule."""
        draw = torch.Generator(device).manual_seed(seed)
        means = torch.randn(2 * CLASSES, d, generator=draw, device=device) / math.sqrt(d)
        labels = [torch.randint(0, CLASSES, (n,), generator=draw, device=device) for _ in range(2)]
        for label in labels:
            label[:CLASSES] = torch.arange(CLASSES)
        x, y = (
            means[side * CLASSES + labels[side]]
            + torch.randn(n, d, generator=draw, device=device) / math.sqrt(d)
            for side in range(2)
        )
        # Squared distances of points and of means are about 4 and 2, each counted half.
        epsilon = relative * (3.0 if labelled else 2.0)
        if not labelled:
            return cls(x, y, None, None, epsilon)
        return cls(x, y, (labels[0], labels[1]), torch.cdist(means, means).square(), epsilon)


def ours(clouds: Clouds, x: Tensor) -> Tensor:
    """By this package."""
    labelled: dict[str, Any] = {}
    if clouds.labels is not None:
        one, two = clouds.labels
        labelled = {"labels_x": one, "labels_y": two, "class_table": clouds.table}
        labelled["class_totals"] = (CLASSES, CLASSES)
    return sinkhorn_loss(x, clouds.y, epsilon=clouds.epsilon, **labelled)


def geomloss(clouds: Clouds, x: Tensor) -> Tensor:
    """By geomloss, whose cost is half of the squared distance, as ours."""
    from geomloss import SamplesLoss

    blur = math.sqrt(clouds.epsilon)
    loss = SamplesLoss("sinkhorn", p=2, blur=blur, scaling=0.9, backend="tensorized")
    value: Tensor = loss(x, clouds.y)
    return value


def flash_sinkhorn(clouds: Clouds, x: Tensor) -> Tensor:
    """By flash-sinkhorn with a fixed number of iterations."""
    from flash_sinkhorn import SamplesLoss

    labelled: dict[str, Any] = {}
    called: dict[str, Any] = {}
    if clouds.labels is not None:
        one, two = clouds.labels
        labelled = {"label_cost_matrix": clouds.table, "lambda_x": 1.0, "lambda_y": 1.0}
        called = {"label_x": one.int(), "label_y": two.int() + CLASSES}
    loss = SamplesLoss(
        use_epsilon_scaling=False,
        eps=clouds.epsilon,
        n_iters=ITERATIONS,
        debias=True,
        half_cost=True,
        **labelled,
    )
    value: Tensor = loss(x, clouds.y, **called)
    return value


Call = Callable[[Clouds, Tensor], Tensor]


def timed(call: Call, drawn: list[Clouds], *, gradient: bool) -> tuple[float, float]:
    """Median milliseconds of a call, and the number of the last one."""
    times, value = [], math.nan
    for clouds in drawn:
        x = clouds.x.clone().requires_grad_(gradient)
        _wait(x)
        started = time.perf_counter()
        found = call(clouds, x)
        if gradient:
            found.backward()  # type: ignore[no-untyped-call]
        value = float(found)
        _wait(x)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[WARM_UPS:]), value


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def check(clouds: Clouds, value: float) -> dict[str, Any]:
    """What our number is, and whether its interval meets that of float64.

    Raises:
        AssertionError: it does not.
    """
    names = tuple(map(str, range(CLASSES))) if clouds.labels else ()
    one, two = clouds.labels or (None, None)
    sides = LabeledSamples(clouds.x, one, names), LabeledSamples(clouds.y, two, names)

    def solved(precision: str, options: Converged) -> Divergence:
        return sinkhorn_divergence(
            *sides,
            epsilon=clouds.epsilon,
            class_table=clouds.table,
            cost=GroundCost(),
            options=options,
            compute=ComputeOptions(clouds.x.device.type, precision=precision),
        )

    here = solved("fast", Converged())
    low, high = here.bounds
    slack = 1e-6 * abs(value)
    assert low - slack <= value <= high + slack
    assert here.converged
    if len(clouds.x) <= MOST_CHECKED:
        truth = solved("double", Converged(tolerance=1e-6))
        assert truth.bounds[0] <= high
        assert low <= truth.bounds[1]
    return {
        "value": value,
        "bounds": [low, high],
        "iterations": [term.iterations for term in here.terms.values()],
        "marginal_error": here.marginal_error,
        "backend": here.backend,
    }


def bench(n: int, d: int, relative: float, *, labelled: bool, device: str) -> dict[str, Any]:
    """One row: milliseconds of everyone, forward and with gradient."""
    drawn = [
        Clouds.draw(n, d, labelled=labelled, relative=relative, seed=seed, device=device)
        for seed in range(CALLS + WARM_UPS)
    ]
    row: dict[str, Any] = {"n": n, "d": d, "epsilon": relative, "labels": labelled}
    calls: dict[str, Call] = {"ours": ours}
    if device == "cuda":
        calls["flash_sinkhorn"] = flash_sinkhorn
    if not labelled:
        calls["geomloss"] = geomloss
    values: dict[str, float] = {}
    for name, call in calls.items():
        for gradient in (False, True):
            found, values[name] = timed(call, drawn, gradient=gradient)
            row[f"{name}{'_with_gradient' if gradient else ''}_ms"] = found
    row["checked"] = check(drawn[-1], values["ours"])
    row["off"] = {name: value / values["ours"] - 1 for name, value in values.items()}
    return row


def main() -> None:
    """Write bench_small.json, or bench_small_cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows that are there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--dimensions", type=int, nargs="+")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("bench_small needs a CUDA device, or --device cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    sizes = given.sizes or (SIZES if on_gpu else SIZES_CPU)
    dimensions = given.dimensions or (DIMENSIONS if on_gpu else DIMENSIONS_CPU)
    warnings.simplefilter("ignore")
    packages = (
        ("torch", "triton", "geomloss", "flash-sinkhorn") if on_gpu else ("torch", "geomloss")
    )
    name = "bench_small" if on_gpu else "bench_small_cpu"
    keys = ("n", "d", "epsilon", "labels")
    rows = Rows(name, keys, *packages, folder=given.output, again=given.again)
    for n in sizes:
        for d in dimensions:
            for relative in RELATIVE_EPSILONS:
                for labelled in (False, True):
                    if not rows.has(n=n, d=d, epsilon=relative, labels=labelled):
                        row = bench(n, d, relative, labelled=labelled, device=given.device)
                        rows.add(row)


if __name__ == "__main__":
    main()
