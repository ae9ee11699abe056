"""Does the sliced distance order pairs of datasets as OTDD does, and is it more than their size?

    python -m experiments.sliced_against_otdd --data-root DIR [--pairs 200] [--output DIR]

Pairs of disjoint draws from MNIST's training split, of 500 to 1,000 rows each, so that all pairs
come from one distribution and differ by chance and by size: the protocol in which published rank
correlations of s-OTDD with OTDD were found. Reported are Spearman's correlation of both distances,
of each with the numbers of rows, and that of both given log n of both sides.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result

FEWEST, MOST = 500, 1000
PROJECTIONS, EPSILON_RELATIVE = 10_000, 0.01
NAME = "sliced_against_otdd"

Numbers = NDArray[np.float64]


def measure(whole: otdd.LabeledSamples, seed: int) -> tuple[float, float, int, int]:
    """OTDD, the sliced distance and the sizes of one pair."""
    generator = np.random.default_rng(seed)
    n, m = (int(size) for size in generator.integers(FEWEST, MOST + 1, 2))
    rows = torch.from_numpy(generator.permutation(len(whole))[: n + m])
    source, target = whole.take(rows[:n]), whole.take(rows[n:])
    transported = otdd.dataset_distance(source, target, epsilon_relative=EPSILON_RELATIVE)
    sliced = otdd.sliced_distances([source, target], projections=PROJECTIONS, seed=seed)
    return transported.value, float(sliced.values[0, 1]), n, m


def given(x: Numbers, y: Numbers, logs: Numbers) -> float:
    """Spearman's correlation of x and y (P,) whose ranks are freed of logs (P, 2)."""
    design = np.column_stack((np.ones(len(x)), logs))
    left = [rankdata(side) for side in (x, y)]
    left = [side - design @ np.linalg.lstsq(design, side, rcond=None)[0] for side in left]
    return float(np.corrcoef(*left)[0, 1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the sliced distance beside OTDD")
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    whole = otdd.embed(
        otdd.load("mnist", root=options.data_root), otdd.extractors.pixels(), cache_dir=None
    )
    started, rows = time.perf_counter(), []
    for seed in range(options.pairs):
        rows.append(measure(whole, seed))
        if (seed + 1) % 20 == 0:
            print(f"{seed + 1} pairs, {time.perf_counter() - started:.0f} s", flush=True)
    x, y, n, m = np.array(rows).T
    logs = np.log(np.column_stack((n, m)))
    found = {
        "spearman": float(spearmanr(x, y).statistic),
        "given_sizes": given(x, y, logs),
        "otdd_with_rows": float(spearmanr(x, n + m).statistic),
        "sliced_with_rows": float(spearmanr(y, n + m).statistic),
    }
    for key, value in found.items():
        print(f"{key:18} {value:+.3f}")
    content = {
        "pairs": options.pairs,
        "rows": [FEWEST, MOST],
        "projections": PROJECTIONS,
        "epsilon_relative": EPSILON_RELATIVE,
        **found,
        "seconds": time.perf_counter() - started,
        **environment(),
    }
    write_result(NAME, content, options.output)


if __name__ == "__main__":
    main()
