"""A Sinkhorn half-step on a GPU: ours with and without labels, peers without, and the ceiling.

    python -m experiments.bench_half_step [--output DIR] [--again]

Random clouds of n = m points. Both sides run the same ten alternating iterations from zero without
stopping (20 half-steps), timed by CUDA events: the median of ten runs after a warm-up that includes
either side's tuning. Ours are the iterations that the solver runs, on packed points; in the large
sizes kernels are launched one by one, in the small ones they are a graph that was recorded before.
flash-sinkhorn has no labels in its alternating solver. geomloss (tensorized, a dense cost) takes
ten averaged steps of both potentials along its own schedule, and a first and a last one. The
ceiling is cuBLAS' float16 product of 8192 x 8192 matrices on random data, a hundred to a run so
that runs last as long as ours, measured for each row right after ours.

Runs follow one another without a pause, which brings an H200 to its power limit and down from its
highest clock; `from_idle` is the same with half a second before each run, as one call finds it.

Accuracy: the error of one half-step of ours against float64 on 512 rows, on the points as it rounds
them (if that is large nothing is timed) and on the original ones, relative to the largest cost; and
the marginal error that each side's potentials have in the end, of the larger marginal in L1, as our
operator measures it in `high` precision.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.bench_divergence import marginal_error
from experiments.environment import RESULTS
from experiments.rows import Rows
from experiments.timing import cublas_tflops, extra_mib, milliseconds
from otdd_flash.cost.points import Cloud, LabelledCost
from otdd_flash.engine.recording import STEPS, Repeated
from otdd_flash.operators.triton_operator import KernelOperator

SIZES = (
    *((60_000, d) for d in (784, 512, 128, 64)),
    *((n, 64) for n in (10_000, 5_000, 2_000, 1_000)),
)
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
    others = labels[torch.randperm(n, generator=draw, device="cuda")]
    sides = Cloud(x, masses, labels), Cloud(y, masses, others)
    cost = LabelledCost(*sides, costs if classes > 1 else torch.zeros_like(costs), 0.5)
    return KernelOperator(cost, precision)


class Ours:
    """Ten alternating iterations from zero without acceleration: f <- T(g), g <- T'(f)."""

    def __init__(self, operator: KernelOperator, epsilon: float) -> None:
        self.operator = operator
        self.epsilon = operator.a.new_tensor(epsilon)
        self.f, self.g = (torch.zeros(size, device="cuda") for size in operator.shape)
        self.repeated = Repeated()

    def step(self) -> None:
        """One iteration, in place."""
        self.f.copy_(self.operator.softmin_rows(self.g, self.epsilon, self.f))
        self.g.copy_(self.operator.softmin_columns(self.f, self.epsilon, self.g))

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The potentials, which the next call overwrites."""
        self.f.zero_()
        self.g.zero_()
        for _ in range(ITERATIONS // STEPS if self.operator.passes.recorded else ITERATIONS):
            if self.operator.passes.recorded:
                self.repeated.run(self.step)
            else:
                self.step()
        return self.f, self.g


def theirs(operator: KernelOperator, epsilon: float) -> tuple[Tensor, Tensor]:
    """The same by flash-sinkhorn's alternating solver, on the feature cost alone."""
    from flash_sinkhorn.sinkhorn_solvers import sinkhorn_flashstyle_alternating

    x, y = operator.cost.held
    masses = operator.a.float(), operator.b.float()
    potentials: tuple[Tensor, Tensor] = sinkhorn_flashstyle_alternating(
        x, y, *masses, eps=epsilon, n_iters=ITERATIONS, cost_scale=operator.cost.lambda_x
    )
    return potentials


def geomloss(operator: KernelOperator, epsilon: float) -> tuple[Tensor, Tensor]:
    """Potentials by geomloss on a dense cost, after about as many steps."""
    from geomloss import SamplesLoss

    blur, scaling = epsilon**0.5, 0.5
    loss = SamplesLoss(
        "sinkhorn",
        p=2,
        blur=blur,
        scaling=scaling,
        diameter=blur / scaling ** (ITERATIONS - 2),
        debias=False,
        potentials=True,
        backend="tensorized",
    )
    masses = operator.a.float(), operator.b.float()
    f, g = loss(masses[0], operator.cost.held[0], masses[1], operator.cost.held[1])
    return f.view(-1), g.view(-1)


def half_step_error(operator: KernelOperator, epsilon: float, *, rounded: bool) -> float:
    """Largest error of a row update from a random potential, relative to the largest cost.

    Against float64 on the points that the kernel sees, or on the original ones.
    """
    draw = torch.Generator("cuda").manual_seed(1)
    g = torch.randn(operator.shape[1], generator=draw, device="cuda") * epsilon
    rows = torch.randperm(operator.shape[0], generator=draw, device="cuda")[:CHECKED_ROWS]
    x, y = operator.rounded_points() if rounded else operator.cost.held
    x, y = x[rows].double(), y.double()
    labels_x, labels_y = operator.cost.labels
    cost = operator.cost.lambda_x * torch.cdist(x, y).square()
    cost += operator.cost.class_costs[labels_x[rows]][:, labels_y]
    exponent = (g.double() - cost) / epsilon + operator.b.log()
    expected = -epsilon * torch.logsumexp(exponent, 1)
    error = (operator.softmin_rows(g, epsilon)[rows].double() - expected).abs().max()
    return float(error / cost.max())


def bench(n: int, d: int) -> dict[str, Any]:
    """One row of the table."""
    labelled, plain = (make_operator(n, d, classes, "fast") for classes in (CLASSES, 1))
    epsilon = RELATIVE_EPSILON * labelled.costs.mean
    error = half_step_error(labelled, epsilon, rounded=True)
    if not error <= ACCURACY:
        raise SystemExit(f"d={d}: our half-step is off by {error:.1e}: nothing is timed")
    runs: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "ours_labels": Ours(labelled, epsilon),
        "ours_no_labels": Ours(plain, epsilon),
        "flash_sinkhorn": partial(theirs, plain, epsilon),
        "geomloss_tensorized": partial(geomloss, plain, epsilon),
    }
    try:
        runs["geomloss_tensorized"]()
    except torch.OutOfMemoryError:
        del runs["geomloss_tensorized"]
    half_steps = {name: 2 * ITERATIONS + 4 * (name == "geomloss_tensorized") for name in runs}
    taken, from_idle = {}, {}
    for name, run in runs.items():
        # A dense cost of 60,000 x 60,000 takes a second a run.
        repeats = 3 if name == "geomloss_tensorized" and n > 20_000 else 10
        taken[name] = milliseconds(run, repeats=repeats, warm_ups=1) / half_steps[name]
        if name == "ours_labels":
            limit = cublas_tflops(100)
        if name in ("ours_labels", "flash_sinkhorn"):
            from_idle[name] = milliseconds(run, warm_ups=0, pause=0.5) / half_steps[name]
    high = KernelOperator(labelled.cost, "high", labelled)
    start = torch.zeros(n, device="cuda")
    taken["ours_labels_high"] = milliseconds(partial(high.softmin_rows, start, epsilon))
    exact = dict.fromkeys(runs, plain.refined) | {"ours_labels": high}
    errors = {name: marginal_error(exact[name], *run(), epsilon) for name, run in runs.items()}
    rate = 2 * n * n * d / taken["ours_labels"] / 1e9
    return {
        "n": n,
        "d": d,
        "classes": CLASSES,
        "epsilon": epsilon,
        "half_steps": half_steps,
        "ms_per_half_step": taken,
        "times_faster_than_flash_sinkhorn": taken["flash_sinkhorn"] / taken["ours_labels"],
        "from_idle_ms_per_half_step": from_idle,
        "from_idle_times_faster_than_flash_sinkhorn": (
            from_idle["flash_sinkhorn"] / from_idle["ours_labels"]
        ),
        "ratio_counts": errors["ours_no_labels"] <= errors["flash_sinkhorn"],
        "times_faster_than_geomloss": (
            taken["geomloss_tensorized"] / taken["ours_labels"]
            if "geomloss_tensorized" in taken
            else None
        ),
        "cost_of_labels": taken["ours_labels"] / taken["ours_no_labels"] - 1,
        "tflops": rate,
        "cublas_float16_tflops": limit,
        "share_of_cublas": rate / limit,
        "extra_mib": {name: extra_mib(run) for name, run in runs.items()},
        "half_step_error_on_rounded_points": error,
        "half_step_error": {
            "fast": half_step_error(labelled, epsilon, rounded=False),
            "high": half_step_error(high, epsilon, rounded=False),
        },
        "marginal_error": errors,
    }


def main() -> None:
    """Write bench_half_step.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows measured before")
    arguments = parser.parse_args()
    packages = "torch", "triton", "flash-sinkhorn", "geomloss"
    rows = Rows(
        "bench_half_step", ("n", "d"), *packages, folder=arguments.output, again=arguments.again
    )
    for n, d in SIZES:
        if not rows.has(n=n, d=d):
            rows.add(bench(n, d))


if __name__ == "__main__":
    main()
