"""One Sinkhorn iteration on a processor: ours against geomloss, POT and our own matrix products.

    python -m experiments.bench_cpu --data-root DIR [--samples 5000] [--large 20000]

MNIST against Fashion-MNIST pixels (DIR/MNIST/raw, DIR/FashionMNIST/raw), d = 784, gaussian class
distances, float32, at two epsilons: OTDD's 0.1, where most exponentials underflow, and a tenth of
the mean cost, where none does. The time of an iteration (both half-steps) is the slope between two
runs of different length, so that set-up costs count for nobody; the median of several is kept. A
package is timed only if what it computes is right: POT's and our potentials after the same
iterations must agree, and geomloss's converged divergence must be ours.

The streamed case is compared with the two matrix products that it cannot avoid, and its memory is
the growth of a fresh process's peak over its inputs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from experiments.peers import Problem, geomloss_divergence
from otdd_flash.labels import measure_classes
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison

REPEATS = 5
# Relative difference of potentials, or of values, above which a timing is refused.
ACCURACY = 1e-4


def make_problem(root: str, samples: int) -> Problem:
    """MNIST and Fashion-MNIST, `samples` images each."""
    source, target = (
        otdd.embed(
            otdd.load(name, root=root, max_samples=samples), otdd.extractors.pixels(), device="cpu"
        )
        for name in ("mnist", "fashion_mnist")
    )
    table = measure_classes(source, target, otdd.labels.Gaussian()).full
    return Problem(source, target, table, otdd.GroundCost())


def operator_of(problem: Problem, memory_budget: str) -> Operator:
    """Our operator, which keeps the scores if the budget allows."""
    compute = otdd.ComputeOptions(device="cpu", memory_budget=memory_budget)
    sides = problem.source, problem.target
    comparison = Comparison.prepare(sides, problem.cost, compute, debias=False)
    return comparison.with_classes(problem.class_table).operator("xy")


def ours(operator: Operator, epsilon: float, iterations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Alternating updates from zero potentials, columns first as in POT."""
    f = torch.zeros(len(operator.a))
    for _ in range(iterations):
        g = operator.softmin_columns(f, epsilon)
        f = operator.softmin_rows(g, epsilon)
    return f, g


def pot(problem: Problem, cost: torch.Tensor, epsilon: float, iterations: int) -> torch.Tensor:
    """POT's sinkhorn_log in float32 on a given cost matrix; the column potential."""
    from ot.bregman import sinkhorn_log

    a, b = problem.source.masses.float(), problem.target.masses.float()
    _, log = sinkhorn_log(
        a, b, cost, epsilon, numItermax=iterations, stopThr=0, log=True, warn=False
    )
    potential: torch.Tensor = epsilon * (log["log_v"] - b.log())
    return potential


def geomloss(problem: Problem, cost: torch.Tensor, epsilon: float, iterations: int) -> None:
    """Geomloss's tensorized loop, without debiasing, on a given cost matrix.

    Its schedule goes from the diameter to the blur in 2 + ceil(log(blur / diameter) / log(scaling))
    steps; with a diameter just above the blur all of them are at this epsilon.
    """
    from geomloss import SamplesLoss

    blur, diameter = math.sqrt(epsilon), 1.01 * math.sqrt(epsilon)
    scaling = (blur / diameter) ** (1 / (iterations - 2))
    loss = SamplesLoss(
        "sinkhorn",
        p=2,
        blur=blur,
        scaling=scaling,
        diameter=diameter,
        debias=False,
        cost=lambda x, y: cost.expand(1, -1, -1) if len(x[0]) == cost.shape[0] else cost.T[None],
        backend="tensorized",
    )
    x, y = problem.points(torch.float32)
    loss(problem.source.masses.float(), x, problem.target.masses.float(), y)


def slope(run: Callable[[int], object], short: int, long: int) -> float:
    """Median seconds per iteration over REPEATS pairs of runs."""
    run(short)
    slopes = []
    for _ in range(REPEATS):
        taken = []
        for iterations in (short, long):
            started = time.perf_counter()
            run(iterations)
            taken.append(time.perf_counter() - started)
        slopes.append((taken[1] - taken[0]) / (long - short))
    return statistics.median(slopes)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected|| after removing the mean, which is free."""
    got, expected = (value.double() - value.double().mean() for value in (got, expected))
    return float((got - expected).norm() / expected.norm())


def refuse_unless(error: float, what: str) -> float:
    """Return an error that is small enough; a wrong result is not timed."""
    if not error <= ACCURACY:
        raise SystemExit(f"{what} is off by {error:.1e}: nothing is timed")
    return error


def bench_kept(root: str, samples: int) -> list[dict[str, Any]]:
    """Scores kept: per-iteration times of the three packages."""
    problem = make_problem(root, samples)
    kept = operator_of(problem, "16GiB")
    cost = problem.matrix(torch.float32)
    geomloss_error = refuse_unless(_geomloss_error(root), "geomloss")
    rows = []
    for epsilon in (0.1, 0.1 * kept.costs.mean):
        pot_error = relative(ours(kept, epsilon, 10)[1], pot(problem, cost, epsilon, 10))
        errors = {
            "pot_potential": refuse_unless(pot_error, "POT"),
            "geomloss_value": geomloss_error,
        }
        seconds = {
            "ours": slope(partial(ours, kept, epsilon), 5, 25),
            "geomloss": slope(partial(geomloss, problem, cost, epsilon), 4, 8),
            "pot": slope(partial(pot, problem, cost, epsilon), 2, 6),
        }
        rows.append(
            {
                "n": samples,
                "m": samples,
                "d": problem.source.dim,
                "epsilon": epsilon,
                "epsilon_relative": epsilon / kept.costs.mean,
                "backend": kept.passes.backend,
                "seconds_per_iteration": seconds,
                "times_faster_than_geomloss": seconds["geomloss"] / seconds["ours"],
                "times_faster_than_pot": seconds["pot"] / seconds["ours"],
                "relative_error": errors,
            }
        )
    return rows


def _geomloss_error(root: str) -> float:
    """Geomloss's converged divergence against ours on a smaller problem of the same kind."""
    problem = make_problem(root, 500)
    epsilon = 0.05 * operator_of(problem, "1GiB").costs.mean
    ours_value = otdd.sinkhorn_divergence(
        problem.source,
        problem.target,
        epsilon=epsilon,
        class_table=problem.class_table,
        options=otdd.Converged(1e-6),
        compute=otdd.ComputeOptions(device="cpu", precision="double"),
    ).value
    return abs(geomloss_divergence(problem, epsilon, scaling=0.99) / ours_value - 1)


def bench_streamed(root: str, samples: int) -> dict[str, Any]:
    """Scores streamed: an iteration against two plain matrix products of the same size."""
    problem = make_problem(root, samples)
    streamed = operator_of(problem, "0")
    kept = operator_of(problem, "16GiB")
    epsilon = 0.1
    error = relative(ours(streamed, epsilon, 3)[1], ours(kept, epsilon, 3)[1])
    x, y = problem.source.features, problem.target.features
    out = torch.empty(samples, samples)

    def products(times: int) -> None:
        for _ in range(2 * times):
            torch.mm(x, y.T, out=out)

    seconds = {
        "ours": slope(lambda k: ours(streamed, epsilon, k), 1, 3),
        "two_matrix_products": slope(products, 1, 3),
    }
    return {
        "n": samples,
        "m": samples,
        "d": problem.source.dim,
        "epsilon": epsilon,
        "backend": streamed.passes.backend,
        "seconds_per_iteration": seconds,
        "over_two_matrix_products": seconds["ours"] / seconds["two_matrix_products"],
        "relative_error": {"kept_potential": refuse_unless(error, "streaming")},
    }


def bench_memory(root: str, samples: int) -> dict[str, Any]:
    """Peak memory of a streamed solve in a fresh process."""
    command = [sys.executable, "-m", "experiments.bench_cpu", "--data-root", root]
    command += ["--measure-memory", str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measure_memory(root: str, samples: int) -> dict[str, Any]:
    """Two streamed iterations and a certificate; the peak over what the inputs already took."""
    problem = make_problem(root, samples)
    gc.collect()
    # Freed memory that the allocator keeps would hide what the solve takes.
    ctypes.CDLL(None).malloc_trim(0)
    # Linux: resets the peak of the resident set to its present size.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otdd.NotConvergedWarning)
        term = otdd.sinkhorn(
            problem.source,
            problem.target,
            epsilon=0.1,
            class_table=problem.class_table,
            options=otdd.Converged(max_iterations=2),
            compute=otdd.ComputeOptions(device="cpu", memory_budget="0"),
        )
    return {
        "n": samples,
        "m": samples,
        "d": problem.source.dim,
        "passes": term.passes,
        "seconds": time.perf_counter() - started,
        "peak_mib_over_inputs": _status("VmHWM") - before,
        "one_float32_matrix_mib": samples * samples * 4 / 2**20,
    }


def _status(key: str) -> float:
    """A size in MiB from this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"this system does not report {key}")


def main() -> None:
    """Run all parts and write experiments/results/bench_cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, default=5_000)
    parser.add_argument("--large", type=int, default=20_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--measure-memory", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_memory:
        measured = measure_memory(arguments.data_root, arguments.measure_memory)
        sys.stdout.write(json.dumps(measured) + "\n")
        return
    result = {
        "environment": environment("torch", "geomloss", "POT"),
        "kept": bench_kept(arguments.data_root, arguments.samples),
        "streamed": bench_streamed(arguments.data_root, arguments.samples),
        "memory": bench_memory(arguments.data_root, arguments.large),
    }
    path = write_result("bench_cpu", result, arguments.output)
    sys.stdout.write(json.dumps(result, indent=2) + f"\nwritten to {path}\n")


if __name__ == "__main__":
    main()
