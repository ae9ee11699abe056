"""What the distance between samples of MNIST and of USPS owes to chance.

    python -m experiments.sampling_error --data-root DIR

For 500 to 2,000 samples a side, epsilon 0.1: the distance, its 95% interval from subsamples and the
noise floor; once beside it what a bootstrap with replacement gives. Then how often the intervals of
independent samples hold the mean distance of all of them, where rows are drawn uniformly and where,
as by `max_samples`, in proportion to the classes.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import torch

import otdd_flash as otdd
from experiments.environment import environment, write_result
from otdd_flash.data.subset import stratified_rows

SIZES = (500, 1000, 2000)
EPSILON = 0.1
COUNT = 50
REPETITIONS, REPEATED_SIZE = 100, 300
# Intervals at their level hold it less often in less than one of a thousand such runs.
FEWEST_HELD = 87

Pair = tuple[otdd.LabeledSamples, otdd.LabeledSamples]


def draw(
    samples: otdd.LabeledSamples, size: int, generator: np.random.Generator, drawing: str
) -> otdd.LabeledSamples:
    """Rows without replacement, uniformly or in proportion to the classes."""
    assert samples.labels is not None
    if drawing == "stratified":
        rows = stratified_rows(samples.labels.numpy(), size, generator)
    else:
        rows = generator.permutation(len(samples))[:size]
    return samples.take(torch.from_numpy(rows))


def measure(whole: Pair, size: int) -> dict[str, Any]:
    """One row: the distance of `size` samples a side and its sampling error."""
    generator = np.random.default_rng(size)
    source, target = (draw(side, size, generator, "uniform") for side in whole)
    started = time.perf_counter()
    result = otdd.dataset_distance(source, target, epsilon=EPSILON)
    solved = time.perf_counter()
    interval = otdd.subsample_interval(source, target, result.value, count=COUNT, epsilon=EPSILON)
    sampled = time.perf_counter()
    floor = otdd.noise_floor(source, target, epsilon=EPSILON)
    return {
        "size": size,
        "value": result.value,
        "bounds": list(result.bounds),
        "epsilon": result.epsilon,
        "subsample": interval.to_dict(),
        "noise_floor": floor.to_dict(),
        "seconds": {"distance": solved - started, "subsample": sampled - solved},
    }


def bootstrap(whole: Pair, size: int) -> dict[str, Any]:
    """The distances between resamples with replacement of the samples that `measure` compares."""
    generator = np.random.default_rng(size)
    sides = [draw(side, size, generator, "uniform") for side in whole]
    values = []
    for _ in range(COUNT):
        source, target = (
            side.take(torch.from_numpy(generator.integers(0, size, size))) for side in sides
        )
        values.append(otdd.dataset_distance(source, target, epsilon=EPSILON).value)
    lower, upper = np.quantile(values, (0.025, 0.975))
    return {"size": size, "mean": np.mean(values), "quantiles": [lower, upper]}


def coverage(whole: Pair, drawing: str) -> dict[str, Any]:
    """How many intervals of independent samples hold the samples' mean distance."""
    generator = np.random.default_rng(0)
    values, intervals = [], []
    for seed in range(REPETITIONS):
        source, target = (draw(side, REPEATED_SIZE, generator, drawing) for side in whole)
        values.append(otdd.dataset_distance(source, target, epsilon=EPSILON).value)
        interval = otdd.subsample_interval(
            source, target, values[-1], count=39, seed=seed, epsilon=EPSILON
        )
        intervals.append(interval)
    mean = float(np.mean(values))
    return {
        "drawing": drawing,
        "size": REPEATED_SIZE,
        "subsample_size": list(intervals[0].size),
        "repetitions": REPETITIONS,
        "held": sum(found.lower <= mean <= found.upper for found in intervals),
        "mean_distance": mean,
        "deviation": np.std(values, ddof=1),
        "mean_width": np.mean([found.upper - found.lower for found in intervals]),
        "mean_subsample_distance": np.mean([np.mean(found.values) for found in intervals]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True)
    root = parser.parse_args().data_root
    pixels = otdd.extractors.pixels(size=28)
    source, target = (otdd.embed(otdd.load(name, root=root), pixels) for name in ("mnist", "usps"))
    content: dict[str, Any] = {
        "environment": environment(),
        "pair": "mnist, usps",
        "rows": [measure((source, target), size) for size in SIZES],
        "bootstrap": bootstrap((source, target), SIZES[0]),
        "coverage": [coverage((source, target), kind) for kind in ("uniform", "stratified")],
    }
    if any(row["held"] < FEWEST_HELD for row in content["coverage"]):
        sys.exit(f"intervals hold too rarely: {content['coverage']}")
    write_result("sampling_error", content)


if __name__ == "__main__":
    main()
