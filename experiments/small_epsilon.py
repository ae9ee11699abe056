"""Small epsilon: the divergence against unregularised transport, and geomloss's schedule beside it.

    python -m experiments.small_epsilon --data-root DIR [--samples 1000] [--output DIR]

MNIST against USPS, pixels resized to 28 x 28, gaussian class distances. POT's `emd2` solves the
same labelled cost without regularisation. At every epsilon our divergence runs in double precision,
to a marginal error of 1e-3, and geomloss's updates (`solver=geomloss`, scaling 0.5) on the same
inputs.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result

EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4)
DOUBLE = otdd.ComputeOptions(precision="double")


def pixels(name: str, root: Path, samples: int) -> otdd.LabeledSamples:
    """Images of the training split as vectors."""
    data = otdd.load(name, root=root, max_samples=samples)
    return otdd.embed(data, otdd.extractors.pixels(size=28))


def unregularised(
    source: otdd.LabeledSamples, target: otdd.LabeledSamples, table: otdd.ClassDistances
) -> float:
    """min_P <C, P> with C = (||x - y||^2 + W) / 2, by POT."""
    import ot

    assert source.labels is not None
    assert target.labels is not None
    cost = torch.cdist(source.features.double(), target.features.double()).square()
    cost = (cost + table.xy[source.labels][:, target.labels]) / 2
    return float(ot.emd2(source.masses.numpy(), target.masses.numpy(), cost.numpy()))


def main() -> None:
    """Write small_epsilon.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sides = [pixels(name, arguments.data_root, arguments.samples) for name in ("mnist", "usps")]
    table = otdd.class_distances(sides).between(0, 1)
    exact = unregularised(sides[0], sides[1], table)
    rows: list[dict[str, Any]] = []
    for epsilon in EPSILONS:
        common: dict[str, Any] = {
            "epsilon_relative": epsilon,
            "class_distances": table,
            "compute": DOUBLE,
        }
        ours = otdd.dataset_distance(*sides, **common)
        with warnings.catch_warnings():
            # That it stops early is what is measured.
            warnings.simplefilter("ignore", otdd.NotConvergedWarning)
            schedule = otdd.GeomlossSchedule(scaling=0.5)
            theirs = otdd.dataset_distance(*sides, solver=schedule, **common)
        rows.append(
            {
                "epsilon_relative": epsilon,
                "value": ours.value,
                "bounds": list(ours.bounds),
                "marginal_error": ours.divergence.marginal_error,
                "passes": ours.divergence.passes,
                "over_unregularised": ours.value / exact - 1,
                "geomloss": {
                    "value": theirs.value,
                    "marginal_error": theirs.divergence.marginal_error,
                    "off_by": theirs.value / ours.value - 1,
                },
            }
        )
    content = {
        "environment": environment("torch", "POT"),
        "samples": arguments.samples,
        "unregularised": exact,
        "rows": rows,
    }
    write_result("small_epsilon", content, arguments.output)
    sys.stdout.writelines(f"{row}\n" for row in rows)


if __name__ == "__main__":
    main()
