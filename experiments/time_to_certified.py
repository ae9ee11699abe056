"""From embedded datasets to a certified distance on a GPU: all of MNIST and of Fashion-MNIST.

    python -m experiments.time_to_certified --data-root DIR [--samples 60000] [--again]

Pixels, gaussian class distances (measured once), default tolerance, at OTDD's epsilon 0.1 and at a
hundredth of the mean cost. Every solve runs twice; the second, with its kernels compiled, is kept.
A result that did not converge is refused. Peers have no such call: `bench_convergence` compares the
cross term with theirs.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows

EPSILONS: tuple[dict[str, float], ...] = ({"epsilon_relative": 0.01}, {"epsilon": 0.1})
TOLERANCE = 1e-3


def measure(
    source: otdd.LabeledSamples,
    target: otdd.LabeledSamples,
    classes: otdd.ClassDistances,
    **epsilon: Any,
) -> dict[str, Any]:
    """What the second of two equal calls returned and took, and the cross term alone."""
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = otdd.dataset_distance(source, target, class_distances=classes, **epsilon)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    if not result.converged:
        raise SystemExit(f"{epsilon} did not converge: nothing is reported")
    summary = result.to_dict()
    kept = ("value", "bounds", "terms", "epsilon", "marginal_error", "passes", "seconds")
    return {
        **{key: summary[key] for key in (*kept, "n", "m", "d", "backend")},
        "epsilon_relative": epsilon.get("epsilon_relative"),
        "peak_mib_over_inputs": peak,
        "cross_term_seconds": seconds_of_cross_term(result),
    }


def seconds_of_cross_term(result: otdd.DistanceResult) -> float:
    """Ours, from the datasets on the GPU to the certified cross term."""
    started = time.perf_counter()
    otdd.sinkhorn(
        result.source,
        result.target,
        epsilon=result.epsilon,
        class_table=result.class_distances.full,
        options=otdd.Converged(TOLERANCE),
    )
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Write time_to_certified.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows measured before")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)
    source, target = (
        otdd.embed(
            otdd.load(name, root=arguments.data_root, max_samples=arguments.samples),
            otdd.extractors.pixels(),
        ).to("cuda")
        for name in ("mnist", "fashion_mnist")
    )
    packages = "torch", "triton"
    rows = Rows(
        "time_to_certified",
        ("n", "epsilon_relative"),
        *packages,
        folder=arguments.output,
        again=arguments.again,
    )
    started = time.perf_counter()
    classes = otdd.dataset_distance(
        source, target, epsilon_relative=1.0, solver=otdd.Converged(0.1), debias=False
    ).class_distances
    seconds_of_classes = time.perf_counter() - started
    for epsilon in EPSILONS:
        relative = epsilon.get("epsilon_relative")
        if rows.has(n=len(source), epsilon_relative=relative):
            continue
        row = measure(source, target, classes, **epsilon)
        row["seconds"]["class_distances"] = seconds_of_classes
        rows.add(row)


if __name__ == "__main__":
    main()
