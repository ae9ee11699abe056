"""A Sinkhorn half-step on a GPU: ours with and without labels, flash-sinkhorn, and the ceiling.

    python -m experiments.bench_half_step [--samples 60000] [--output DIR]

Random clouds of n = m points. Both sides run the same ten alternating iterations without stopping
(20 half-steps), timed by CUDA events: the median of ten runs after a warm-up that includes either
side's tuning. flash-sinkhorn has no labels in this solver. The ceiling is cuBLAS' float16 product
of 8192 x 8192 matrices on random data in the same process.

Accuracy: the error of one half-step of ours against float64 on 512 rows, on the points as it rounds
them (if that is large nothing is timed) and on the original ones; and the difference between both
sides' potentials after the ten iterations. All are relative to the largest cost.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.environment import RESULTS, environment, write_result
from experiments.timing import cublas_tflops, extra_mib, milliseconds
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.labelled_cost import LabelledCost

DIMENSIONS = (784, 512, 128, 64)
ITERATIONS = 10
CLASSES = 10
# Of mean cost; at the pixels' scale this is an epsilon of 1.
RELATIVE_EPSILON = 0.01
CHECKED_ROWS = 512
# Largest error of a half-step, relative to the largest cost, at which it is timed.
ACCURACY = 3e-6


def make_operator(n: int, d: int, classes: int, precision: str) -> KernelOperator:
    """Two labelled Gaussian clouds of n points."""
    draw = torch.Generator("cuda").manual_seed(d)
    x, y = (torch.randn(n, d, generator=draw, device="cuda") for _ in range(2))
    masses = torch.full((n,), 1 / n, dtype=torch.float64, device="cuda")
    labels = torch.arange(n, device="cuda") * classes // n
    costs = torch.rand(classes, classes, generator=draw, device="cuda").double() * d / 2
    cost = LabelledCost(
        x,
        y,
        masses,
        masses,
        labels_x=labels,
        labels_y=labels[torch.randperm(n, generator=draw, device="cuda")],
        class_costs=costs if classes > 1 else torch.zeros_like(costs),
        lambda_x=0.5,
    )
    return KernelOperator(cost, precision)


def ours(operator: KernelOperator, epsilon: float) -> tuple[Tensor, Tensor]:
    """Ten alternating iterations from zero."""
    f, g = (torch.zeros(size, device="cuda") for size in operator.shape)
    for _ in range(ITERATIONS):
        f = operator.softmin_rows(g, epsilon, f)
        g = operator.softmin_columns(f, epsilon, g)
    return f, g


def theirs(operator: KernelOperator, epsilon: float) -> tuple[Tensor, Tensor]:
    """The same by flash-sinkhorn's alternating solver, on the feature cost alone."""
    from flash_sinkhorn.sinkhorn_solvers import sinkhorn_flashstyle_alternating

    x, y = operator.cost.points
    masses = operator.a.float(), operator.b.float()
    potentials: tuple[Tensor, Tensor] = sinkhorn_flashstyle_alternating(
        x, y, *masses, eps=epsilon, n_iters=ITERATIONS, cost_scale=operator.cost.lambda_x
    )
    return potentials


def half_step_error(operator: KernelOperator, epsilon: float, *, rounded: bool) -> float:
    """Largest error of a row update from a random potential, relative to the largest cost.

    Against float64 on the points that the kernel sees, or on the original ones.
    """
    draw = torch.Generator("cuda").manual_seed(1)
    g = torch.randn(operator.shape[1], generator=draw, device="cuda") * epsilon
    rows = torch.randperm(operator.shape[0], generator=draw, device="cuda")[:CHECKED_ROWS]
    x, y = operator.seen_points() if rounded else operator.cost.points
    x, y = x[rows].double(), y.double()
    labels_x, labels_y = operator.cost.labels
    cost = operator.cost.lambda_x * torch.cdist(x, y).square()
    cost += operator.cost.class_costs[labels_x[rows]][:, labels_y]
    exponent = (g.double() - cost) / epsilon + operator.b.log()
    expected = -epsilon * torch.logsumexp(exponent, 1)
    error = (operator.softmin_rows(g, epsilon)[rows].double() - expected).abs().max()
    return float(error / cost.max())


def bench(n: int, d: int, limit: float) -> dict[str, Any]:
    """One row of the table."""
    labelled, plain = (make_operator(n, d, classes, "fast") for classes in (CLASSES, 1))
    epsilon = RELATIVE_EPSILON * labelled.mean_cost
    error = half_step_error(labelled, epsilon, rounded=True)
    if not error <= ACCURACY:
        raise SystemExit(f"d={d}: our half-step is off by {error:.1e}: nothing is timed")
    runs = {
        "ours_labels": lambda: ours(labelled, epsilon),
        "ours_no_labels": lambda: ours(plain, epsilon),
        "flash_sinkhorn": lambda: theirs(plain, epsilon),
    }
    taken = {name: milliseconds(run) / (2 * ITERATIONS) for name, run in runs.items()}
    high = labelled.refined
    taken["ours_labels_high"] = milliseconds(lambda: high.softmin_rows(ours_g(high), epsilon))
    rate = 2 * n * n * d / taken["ours_labels"] / 1e9
    mine, peer = ours(plain, epsilon)[0], theirs(plain, epsilon)[0]
    return {
        "n": n,
        "m": n,
        "d": d,
        "classes": CLASSES,
        "epsilon": epsilon,
        "milliseconds_per_half_step": taken,
        "times_faster_than_flash_sinkhorn": taken["flash_sinkhorn"] / taken["ours_labels"],
        "cost_of_labels": taken["ours_labels"] / taken["ours_no_labels"] - 1,
        "tflops": rate,
        "share_of_cublas": rate / limit,
        "extra_mib": {name: extra_mib(run) for name, run in runs.items()},
        "half_step_error_on_rounded_points": error,
        "half_step_error": {
            "fast": half_step_error(labelled, epsilon, rounded=False),
            "high": half_step_error(high, epsilon, rounded=False),
        },
        "difference_of_potentials": float((_centred(mine) - _centred(peer)).abs().max())
        / labelled.cost_range.highest,
    }


def ours_g(operator: KernelOperator) -> Tensor:
    """A potential to start a half-step from."""
    return torch.zeros(operator.shape[1], device="cuda")


def _centred(potential: Tensor) -> Tensor:
    return potential - potential.mean()


def main() -> None:
    """Write bench_half_step.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    limit = cublas_tflops()
    result: dict[str, Any] = {
        "environment": environment("torch", "triton", "flash-sinkhorn"),
        "cublas_float16_tflops": limit,
        "rows": [],
    }
    for d in DIMENSIONS:
        result["rows"].append(bench(arguments.samples, d, limit))
        path = write_result("bench_half_step", result, arguments.output)
        sys.stdout.write(f"{result['rows'][-1]}\n")
    sys.stdout.write(f"written to {path}\n")


if __name__ == "__main__":
    main()
