"""Many sets of labels a row: as classes of a table, or as columns of points.

    python -m experiments.bench_label_sets [--device cuda] [--points 4000] [--output DIR]

Points of so many coordinates, each with one of so many random sets of 20 labels. Either form is
timed by itself: building the costs and the operator, and one softmin of rows, the best of five.
Seconds are of the process on a processor, and on the clock on a GPU. A small set counts as classes
up to `MOST_SETS` of `otdd_flash.operators.label_costs`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.operators import comparison as comparisons
from otdd_flash.operators.comparison import Comparison

LABELS = 20
# Forms by what `MOST_SETS` has to be for them.
FORMS = {"table": 10**9, "columns": 0}


def tagged(points: int, dim: int, sets: int, seed: int) -> otdd.LabeledSamples:
    """Rows with one of so many sets of labels."""
    draw = torch.Generator().manual_seed(seed)
    known = torch.rand(sets, LABELS, generator=draw) < 0.3
    known[torch.arange(sets), torch.arange(sets) % LABELS] = True
    indicator = known[torch.randint(sets, (points,), generator=draw)]
    x = torch.randn(points, dim, generator=draw) + indicator[:, :1]
    return otdd.LabeledSamples(x, indicator, tuple(map(str, range(LABELS))))


def seconds(
    form: str, sides: list[otdd.LabeledSamples], table: torch.Tensor, device: str
) -> dict[str, Any]:
    """Times of one form."""
    clock = time.process_time if device == "cpu" else time.perf_counter

    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return clock()

    setattr(comparisons, "MOST_SETS", FORMS[form])  # noqa: B010
    taken = []
    for _ in range(2):
        start = now()
        compared = Comparison.between(
            sides[0], sides[1], 1.0, table, compute=ComputeOptions(device)
        )
        operator = compared.operator("xy")
        operator.costs  # noqa: B018
        built = now() - start
    g = torch.zeros(len(sides[1]), dtype=operator.passes.dtype, device=device)
    for _ in range(6):
        start = now()
        operator.softmin_rows(g, 1.0)
        taken.append(now() - start)
    return {f"{form}_build": built, f"{form}_softmin": min(taken[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--points", type=int, default=4000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = []
    for dim in (64, 512):
        for sets in (32, 128, 256, 512, 1024, 4096):
            sides = [tagged(given.points, dim, sets, seed) for seed in (0, 1)]
            table = otdd.class_distances(sides, "means").full
            row = {"n": given.points, "d": dim, "sets": sides[0].class_total}
            for form in FORMS:
                row |= seconds(form, sides, table, given.device)
            rows.append(row)
            sys.stdout.write(f"{row}\n")
    content = environment() | {"rows": rows}
    write_result(f"bench_label_sets_{given.device}", content, given.output)


if __name__ == "__main__":
    main()
