"""From embedded datasets to a certified distance on a GPU: all of MNIST and of Fashion-MNIST.

    python -m experiments.time_to_certified --data-root DIR [--samples 60000] [--output DIR]

Pixels, gaussian class distances, default tolerance, at OTDD's epsilon 0.1 and at a hundredth of the
mean cost. Every solve runs twice; the second, with its kernels compiled, is kept. A result that did
not converge is refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result

EPSILONS: tuple[dict[str, float], ...] = ({"epsilon": 0.1}, {"epsilon_relative": 0.01})


def measure(source: otdd.LabeledSamples, target: otdd.LabeledSamples, **epsilon: Any) -> Any:
    """One row: what the second of two equal calls returned, and what it took."""
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = otdd.dataset_distance(source, target, **epsilon)
    if not result.converged:
        raise SystemExit(f"{epsilon} did not converge: nothing is reported")
    summary = result.summary()
    kept = ("value", "bounds", "terms", "epsilon", "marginal_error", "passes", "seconds")
    return {
        **{key: summary[key] for key in (*kept, "n", "m", "d", "labels", "backend")},
        "epsilon_relative": epsilon.get("epsilon_relative"),
        "peak_mib_over_inputs": (torch.cuda.max_memory_allocated() - before) / 2**20,
    }


def main() -> None:
    """Write time_to_certified.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    source, target = (
        otdd.embed(
            otdd.load(name, root=arguments.data_root, max_samples=arguments.samples),
            otdd.extractors.pixels(),
        ).to("cuda")
        for name in ("mnist", "fashion_mnist")
    )
    rows = [measure(source, target, **epsilon) for epsilon in EPSILONS]
    result = {"environment": environment("torch", "triton"), "rows": rows}
    path = write_result("time_to_certified", result, arguments.output)
    sys.stdout.write(f"{rows}\nwritten to {path}\n")


if __name__ == "__main__":
    main()
