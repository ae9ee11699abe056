"""Passes to convergence at small epsilon: plain alternating updates against the solver.

    python -m experiments.try_acceleration --data-root DIR [--samples 2000]

MNIST against USPS and against Fashion-MNIST pixels (DIR holds MNIST/raw, USPS/raw and
FashionMNIST/raw), d = 784, gaussian class distances, float32. Both stop at the same marginal error,
rounding included, and both count every sweep over the scores, those that certify too. Plain updates
start from zero potentials and give up after 20,000 passes. Intervals of the two that do not overlap
are refused.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import environment, write_result
from otdd_flash.labels import measure_classes
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.certificate import Certificate, certify
from otdd_flash.solver.evidence import magnitude, rounding_floor
from otdd_flash.solver.solve import solve_term

PAIRS = (("mnist", "usps"), ("mnist", "fashion_mnist"))
# Of the mean cost, each with a tolerance that float32 can reach there.
EPSILONS = {1e-1: 1e-3, 1e-2: 1e-3, 1e-3: 1e-3, 3e-4: 3e-3, 1e-4: 1e-2}
MOST_PASSES = 20_000


def make_operator(root: str, source: str, target: str, samples: int) -> Operator:
    """The cost between two datasets, its scores kept."""
    x, y = (
        otdd.embed(
            otdd.load(name, root=root, max_samples=samples),
            otdd.extractors.pixels(size=28),
            device="cpu",
        )
        for name in (source, target)
    )
    table = measure_classes(x, y, otdd.labels.Gaussian()).full
    compute = otdd.ComputeOptions(device="cpu")
    return Comparison.between(x, y, 1.0, table, compute=compute).operator("xy")


def plain(operator: Operator, epsilon: float, tolerance: float) -> tuple[int, Certificate]:
    """Passes of alternating updates from zero, and what they prove."""
    f = torch.zeros_like(operator.a, dtype=operator.costs.dtype)
    g = torch.zeros_like(operator.b, dtype=operator.costs.dtype)
    for passes in range(2, MOST_PASSES, 2):
        f = operator.softmin_rows(g, epsilon, f)
        updated = operator.softmin_columns(f, epsilon, g)
        exponent = torch.where(operator.b > 0, (g.double() - updated.double()) / epsilon, 0)
        columns = operator.b * exponent.exp()
        floor = rounding_floor(operator.costs, float(magnitude(operator, f, g)), epsilon)
        if float((columns - operator.b).abs().sum()) + floor <= tolerance:
            return passes + 2, certify(operator, f, g, epsilon)
        g = updated
    return MOST_PASSES, certify(operator, f, g, epsilon)


def measure(operator: Operator, relative: float, tolerance: float) -> dict[str, Any]:
    """One epsilon, solved both ways."""
    epsilon = relative * operator.costs.mean
    started = time.perf_counter()
    passes, proof = plain(operator, epsilon, tolerance)
    between = time.perf_counter()
    term = solve_term(operator, epsilon, otdd.Converged(tolerance))
    ended = time.perf_counter()
    overlap = max(term.bounds[0], proof.bounds[0]) <= min(term.bounds[1], proof.bounds[1])
    if not (term.converged and overlap):
        raise SystemExit(f"refused at {relative:g}: {term.bounds} against {proof.bounds}")
    return {
        "epsilon_relative": relative,
        "epsilon": epsilon,
        "tolerance": tolerance,
        "plain": {
            "passes": passes,
            "marginal_error": proof.marginal_error,
            "bounds": list(proof.bounds),
            "seconds": between - started,
        },
        "ours": {
            "passes": term.passes,
            "marginal_error": term.marginal_error,
            "bounds": list(term.bounds),
            "seconds": ended - between,
        },
        "times_fewer_passes": passes / term.passes,
    }


def main() -> None:
    """Measure and write results/acceleration_trial.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for source, target in PAIRS:
        operator = make_operator(arguments.data_root, source, target, arguments.samples)
        for relative, tolerance in EPSILONS.items():
            row = {"source": source, "target": target, **measure(operator, relative, tolerance)}
            print(row, flush=True)
            rows.append(row)
    content = {"samples": arguments.samples, "rows": rows, "environment": environment("torch")}
    print(write_result("acceleration_trial", content))


if __name__ == "__main__":
    main()
