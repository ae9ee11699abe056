"""MNIST to USPS as microsoft/otdd measures it: its solver, the converged value, the exact one.

    python -m experiments.exact_mnist_usps --data-root DIR [--samples N ...] [--device cuda]

Training images at 28 x 28, normalised with mean 0.1307 and deviation 0.3081 as that code does for
both, gaussian class distances, half of |x - y|^2 + W, debiased, `entreg` 0.1. `solver=geomloss` at
a scaling of 0.5 does the updates of its solver. All of both datasets are --samples 60000, of which
two cores take `--methods exact` alone.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows

SAMPLES = (2000, 7291)
MEAN, DEVIATION = 0.1307, 0.3081
ENTREG = 0.1
METHODS: dict[str, dict[str, Any]] = {
    "theirs": {"epsilon": ENTREG, "solver": otdd.GeomlossSchedule()},
    "converged": {"epsilon": ENTREG},
    "exact": {"epsilon": 0, "solver": otdd.Exact(bound_width=0)},
}


def normalised(name: str, root: Path, samples: int, device: str) -> otdd.LabeledSamples:
    """At most so many training images as vectors on a device."""
    data = otdd.load(name, root=root, split="train", max_samples=samples)
    side = otdd.embed(data, otdd.extractors.pixels(size=28))
    assert side.labels is not None
    features = (side.features.to(device) - MEAN) / DEVIATION
    return otdd.LabeledSamples(features, side.labels.to(device), side.class_names)


def solved(
    sides: list[otdd.LabeledSamples], table: otdd.ClassDistances, **settings: Any
) -> dict[str, Any]:
    """A distance, its interval, how it ended and its seconds."""
    # The exact solve takes float32 for its first potentials alone.
    precision: Any = "fast" if settings["epsilon"] == 0 else "double"
    compute = otdd.ComputeOptions(str(sides[0].features.device), precision=precision)
    started = time.perf_counter()
    with warnings.catch_warnings():
        # That their updates stop early is what is measured.
        warnings.simplefilter("ignore", otdd.NotConvergedWarning)
        found = otdd.dataset_distance(*sides, class_distances=table, compute=compute, **settings)
    return {
        "value": found.value,
        "bounds": list(found.bounds),
        "marginal_error": found.divergence.marginal_error,
        "stopped_by": found.divergence.stopped_by,
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Write exact_mnist_usps.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=tuple(METHODS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = Rows("exact_mnist_usps", ("samples",), "torch", "POT", folder=given.output)
    for samples in given.samples:
        if rows.has(samples=samples):
            continue
        sides = [
            normalised(name, given.data_root, samples, given.device) for name in ("mnist", "usps")
        ]
        table = otdd.class_distances(sides).between(0, 1)
        found = {name: solved(sides, table, **METHODS[name]) for name in given.methods}
        count = [len(side) for side in sides]
        rows.add({"samples": samples, "n": count, "device": given.device, **found})


if __name__ == "__main__":
    main()
