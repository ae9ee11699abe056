"""Exact distances of 60,000 images on a GPU: seconds to each width, and one pass beside a peer's.

    python -m experiments.bench_exact_gpu --data-root DATA [--size N] [--components 48 784]

MNIST against Fashion-MNIST training images, their pixels or the first principal components of both,
labelled, gaussian class distances, which each run computes again. `first` ends with the first pass,
so that its lower end is that of the entropic potentials; the others end at a width, `proven` within
rounding. A second run is timed. `pass` is one pass over all squared distances, unlabelled, at
potentials of a small epsilon: ours in float64 with its bound, flash-sinkhorn's c-transform in TF32
and float32, and how far their largest row is off. Theirs takes the blocks that its own search
finds, but for float32 in more than `MOST_SEARCHED` dimensions, where that search takes minutes and
these are its default ones.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows
from experiments.timing import milliseconds
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.exact.pricing import PointCosts

WIDTHS = {"first": 1e9, "1e-3": 1e-3, "1e-4": 1e-4, "1e-6": 1e-6, "proven": 0.0}
LEVEL = 1e-3
MOST_SEARCHED = 256


def datasets(root: Path, size: int, components: int) -> list[otdd.LabeledSamples]:
    """Both datasets on the GPU."""
    sides = [
        otdd.embed(
            otdd.load(name, root=root, split="train", max_samples=size), otdd.extractors.pixels()
        )
        for name in ("mnist", "fashion_mnist")
    ]
    if components < sides[0].features.shape[1]:
        sides = list(otdd.extractors.reduce_pca(sides[0], sides[1], components, 0))
    return [side.to("cuda") for side in sides]


def solves(sides: list[otdd.LabeledSamples]) -> Iterator[dict[str, Any]]:
    """Rows of each width; the last one's interval checks the others'."""
    rows: list[dict[str, Any]] = []
    for name, width in WIDTHS.items():
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            found = otdd.dataset_distance(*sides, epsilon=0, solver=otdd.Exact(bound_width=width))
            seconds = time.perf_counter() - started
        rows.append(
            {
                "method": name,
                "seconds": seconds,
                "value": found.value,
                "bounds": list(found.bounds),
                "stopped_by": found.divergence.xy.stopped_by,
                "programs": found.divergence.xy.iterations,
                "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
            }
        )
    lower, upper = rows[-1]["bounds"]
    for row in rows:
        if row["bounds"][0] > upper or row["bounds"][1] < lower:
            raise AssertionError(f"intervals that exclude each other: {row} and {rows[-1]}")
        yield {**row, "lower_below_value": (upper - row["bounds"][0]) / upper}


def passes(sides: list[otdd.LabeledSamples]) -> dict[str, Any]:
    """One pass over all costs, ours and the peer's."""
    from flash_sinkhorn.c_transform import c_transform_fwd

    x, y = (side.features.float().contiguous() for side in sides)
    whole = Comparison.between(x, y, 1.0, debias=False)
    costs = PointCosts(whole.cost("xy"), whole.cost_error)
    entropic = otdd.sinkhorn(x, y, epsilon=LEVEL * costs.mean)
    f, g = (potential.double().cpu().numpy() for potential in (entropic.f, entropic.g))
    # Without arcs: none has a reduced cost below -inf.
    bound: Callable[[], Any] = lambda: costs.price(f, g, 1, below=-float("inf"))  # noqa: E731
    truth = torch.from_numpy(bound().row_least).cuda()
    row: dict[str, Any] = {
        "method": "pass",
        "milliseconds": milliseconds(bound, repeats=3, warm_ups=1),
        "with_ten_arcs": milliseconds(lambda: costs.price(f, g, 10), repeats=3, warm_ups=1),
        "error": float((costs.errors[0].max() + costs.errors[1].max()) / truth.abs().max()),
    }
    for name, tf32 in (("tf32", True), ("float32", False)):
        psi = torch.from_numpy(g).float().cuda()
        search = tf32 or x.shape[1] <= MOST_SEARCHED

        def theirs(tf32: bool = tf32, psi: torch.Tensor = psi, search: bool = search) -> Any:
            return c_transform_fwd(x, y, psi, cost_scale=0.5, allow_tf32=tf32, autotune=search)

        off = theirs()[0].double() - truth
        row[f"flash_sinkhorn_{name}"] = {
            "milliseconds": milliseconds(theirs, repeats=5),
            "largest_error": float(off.abs().max()),
            "of_mean_cost": float(off.abs().max()) / costs.mean,
            "blocks_searched": search,
        }
    return row


def main() -> None:
    """Write bench_exact_cuda.json, and passes to bench_exact_pass_h100.json on an H100."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--size", type=int, default=60_000)
    parser.add_argument("--components", type=int, nargs="+", default=[48, 784])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure what is there again")
    given = parser.parse_args()
    packages = "torch", "POT", "flash-sinkhorn"
    keys = "method", "n", "d"
    kept: dict[str, Any] = {"folder": given.output, "again": given.again}
    gpu = torch.cuda.get_device_name().split()[1].lower()
    rows = Rows("bench_exact_cuda", keys, *packages, **kept)
    passed = Rows(f"bench_exact_pass_{gpu}", keys, *packages, **kept)
    for d in given.components:
        where = {"n": given.size, "d": d}
        sides = datasets(given.data_root, given.size, d)
        if not rows.has(method="proven", **where):
            for row in solves(sides):
                rows.add({**where, **row})
        if not passed.has(method="pass", **where):
            passed.add({**where, **passes(sides)})


if __name__ == "__main__":
    main()
