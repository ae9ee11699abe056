"""Mixtures of sources: seconds, and weights beside those that the target was made of.

    python -m experiments.bench_mixture [--data-root DIR] [--device cpu] [--output DIR]
    python -m experiments.bench_mixture --device cuda

On a processor: scikit-learn's digits, all of them, turned by six angles, against half of them
turned by 15 degrees and half by 45; with --data-root MNIST, Fashion-MNIST, USPS and digits, 500
training images each at 16 x 16, against halves of two of them. On a GPU: 20 sources of 3,000 rows
against 60,000, 512 dimensions, ten classes, to 1e-3. Seconds are on the clock, and of the process,
as other work may share the processor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.samples import LabeledSamples

ANGLES = (0, 15, 30, 45, 60, 90)
NAMES = ("mnist", "fashion_mnist", "usps", "digits")
EACH, SIDE = 500, 16


def timed(
    name: str,
    target: LabeledSamples,
    sources: Mapping[str, LabeledSamples],
    compute: otdd.ComputeOptions | None = None,
) -> dict[str, Any]:
    """One mixture."""
    started, spent = time.perf_counter(), time.process_time()
    found = otdd.mixture(target, sources, compute=compute)
    row = {
        "name": name,
        "seconds": time.perf_counter() - started,
        "process_seconds": time.process_time() - spent,
        "weights": dict(found.weights),
        "value": found.value,
        "bounds": found.bounds,
        "bound_width": found.bound_width,
        "solves": found.solves,
        "stopped_by": found.stopped_by,
        "others": [other._asdict() for other in found.others],
    }
    weights = ", ".join(f"{k} {w:.3f}" for k, w in found.weights.items() if w > 0)
    sys.stdout.write(f"{name}: {row['seconds']:.1f} s, {row['process_seconds']:.1f} s; {weights}\n")
    sys.stdout.flush()
    return row


def joined(first: LabeledSamples, second: LabeledSamples) -> LabeledSamples:
    """Rows of both, classes by name."""
    names = tuple(dict.fromkeys((*first.class_names, *second.class_names)))
    labels = []
    for one in (first, second):
        assert one.labels is not None
        places = torch.tensor([names.index(name) for name in one.class_names])
        labels.append(places[one.labels])
    features = torch.cat((first.features, second.features))
    return LabeledSamples(features, torch.cat(labels), names)


def digits() -> dict[str, Any]:
    """All digits, turned."""
    pixels = otdd.extractors.pixels()
    each = {f"turned {a}": otdd.embed(otdd.load("digits", rotate=a), pixels) for a in ANGLES}
    rows = torch.randperm(len(each["turned 0"]), generator=torch.Generator().manual_seed(0))
    half = len(rows) // 2
    target = joined(each["turned 15"].take(rows[:half]), each["turned 45"].take(rows[half:]))
    return timed("digits, six angles", target, each)


def images(root: Path) -> list[dict[str, Any]]:
    """Halves of two datasets against all four."""
    pixels = otdd.extractors.pixels(size=SIDE)

    def read(name: str, split: str, count: int) -> LabeledSamples:
        data = otdd.load(name, root=root, split=split, max_samples=count, seed=0)
        return otdd.embed(data, pixels)

    sources = {name: read(name, "train", EACH) for name in NAMES}
    rows = []
    for one, other in combinations(NAMES, 2):
        target = joined(read(one, "test", EACH // 2), read(other, "test", EACH // 2))
        rows.append(timed(f"{one} and {other}", target, sources))
    return rows


def large() -> dict[str, Any]:
    """20 sources of 3,000 rows against 60,000 rows of four of them, on a GPU."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(20, 10, 512, generator=draw)

    def rows(k: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(10, (count,), generator=draw)
        return centres[k][labels] + torch.randn(count, 512, generator=draw), labels

    names = tuple(map(str, range(10)))
    sources = {f"s{k}": LabeledSamples(*rows(k, 3000), names) for k in range(20)}
    parts = [rows(k, count) for k, count in ((0, 30_000), (3, 15_000), (7, 9_000), (12, 6_000))]
    features, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    target = LabeledSamples(features, labels, names)
    compute = otdd.ComputeOptions("cuda")
    # Kernels are compiled once.
    few = {name: one.take(torch.arange(300)) for name, one in sources.items()}
    otdd.mixture(target.take(torch.randperm(60_000, generator=draw)[:6000]), few, compute=compute)
    return timed("20 x 3,000 to 60,000, d = 512", target, sources, compute)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = [large()] if given.device == "cuda" else [digits()]
    if given.device == "cpu" and given.data_root is not None:
        rows += images(given.data_root)
    content = {"rows": rows, "environment": environment("torch", "numpy", "scipy")}
    write_result(f"bench_mixture_{given.device}", content, given.output)


if __name__ == "__main__":
    main()
