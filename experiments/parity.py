"""Our numbers beside geomloss's and POT's at their true conventions, on real pairs.

    python -m experiments.parity --data-root DIR [--samples 300]

For every pair and epsilon: the debiased divergence against geomloss's tensorized one at scaling
0.99, OT_epsilon and its potentials against POT's `sinkhorn_log` in float64, and OT_epsilon at a
small epsilon against POT's exact `emd2`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import environment, write_result
from experiments.peers import Problem, geomloss_divergence, pot_emd2, pot_sinkhorn_log
from otdd_flash.labels import measure_classes

DOUBLE = otdd.ComputeOptions(device="cpu", precision="double")
EPSILONS = (0.03, 0.1)
SMALL = 0.001


def pairs(root: str, samples: int) -> dict[str, Problem]:
    """The digits' halves, MNIST against USPS, MNIST against Fashion-MNIST."""
    digits = otdd.load("digits", max_samples=samples)
    rotated = otdd.load("digits", split="test", rotate=30.0, max_samples=samples)
    mnist, usps, fashion = (
        otdd.load(name, root=root, max_samples=samples)
        for name in ("mnist", "usps", "fashion_mnist")
    )
    return {
        "digits, rotated digits": _problem(digits, rotated, 8),
        "mnist, usps": _problem(mnist, usps, 28),
        "mnist, fashion_mnist": _problem(mnist, fashion, 28),
    }


def _problem(source: Any, target: Any, size: int) -> Problem:
    x, y = (otdd.embed(side, otdd.extractors.pixels(size=size)) for side in (source, target))
    return Problem(x, y, measure_classes(x, y, otdd.labels.Gaussian()).full, otdd.GroundCost())


def compare(name: str, problem: Problem, relative: float) -> dict[str, Any]:
    """One row: the divergence, OT_epsilon and its potentials, ours and theirs."""
    epsilon = relative * float(problem.matrix().mean())
    clouds = problem.source, problem.target
    settings: dict[str, Any] = {"epsilon": epsilon, "class_table": problem.class_table}
    divergence = otdd.sinkhorn_divergence(*clouds, **settings)
    tight = otdd.Converged(tolerance=1e-9)
    term = otdd.sinkhorn(*clouds, **settings, options=tight, compute=DOUBLE)
    geomloss = geomloss_divergence(problem, epsilon, scaling=0.99)
    value, f, g = pot_sinkhorn_log(problem, epsilon, tolerance=1e-11)
    return {
        "pair": name,
        "epsilon": epsilon,
        "epsilon_relative": relative,
        "divergence": divergence.value,
        "divergence_bounds": list(divergence.bounds),
        "geomloss_divergence": geomloss,
        "geomloss_relative_difference": abs(divergence.value / geomloss - 1),
        "transport": term.value,
        "pot_transport": value,
        "pot_relative_difference": abs(term.value / value - 1),
        "pot_potential_difference": max(_difference(term.f, f), _difference(term.g, g)),
    }


def compare_exact(name: str, problem: Problem) -> dict[str, Any]:
    """One row: OT_epsilon at a small epsilon above the exact optimum."""
    epsilon = SMALL * float(problem.matrix().mean())
    term = otdd.sinkhorn(
        problem.source,
        problem.target,
        epsilon=epsilon,
        class_table=problem.class_table,
        compute=DOUBLE,
    )
    exact = pot_emd2(problem)
    return {
        "pair": name,
        "epsilon": epsilon,
        "epsilon_relative": SMALL,
        "transport": term.value,
        "transport_bounds": list(term.bounds),
        "emd2": exact,
        "relative_gap": term.value / exact - 1,
    }


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative difference of potentials, which are unique up to a constant."""
    got, expected = got - got.mean(), expected - expected.mean()
    return float((got - expected).norm() / expected.norm())


def main() -> None:
    """Write experiments/results/parity.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, default=300)
    arguments = parser.parse_args()
    problems = pairs(arguments.data_root, arguments.samples)
    result = {
        "environment": environment("torch", "geomloss", "POT"),
        "samples": arguments.samples,
        "entropic": [
            compare(*item, relative) for item in problems.items() for relative in EPSILONS
        ],
        "exact": [compare_exact(*item) for item in problems.items()],
    }
    sys.stdout.write(f"written to {write_result('parity', result)}\n")


if __name__ == "__main__":
    main()
