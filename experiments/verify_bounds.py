"""Bounds and marginal errors against exact truths, over thousands of random problems.

    python -m experiments.verify_bounds --problems 20000 --workers 2
    python -m experiments.verify_bounds --device cuda --problems 5000 --workers 4 --seconds 520
    python -m experiments.verify_bounds --only 4711

Problems come from families whose entropic transport is known (`exact_families`): duplicates that
collapse to a few atoms, and product measures. Sizes, epsilon (1e-4 to 1e4 of the mean cost),
precision, stored or streamed scores, the route into the library and the stopping rule are random.
A problem depends on the device, the seed and its index alone, and `--only` runs it again.

A problem holds if every interval contains the truth, but for the truth's own stated error (see
`problem` and `transport`: about 1e-16 of the mean cost), and every reported marginal error is at
least that of the returned potentials. A refusal is an `InputError` whose message names a way out.
Everything else is a violation, listed with its parameters and how far outside, in mean costs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.environment import RESULTS, environment, write_result
from experiments.exact_families.building import Frame
from experiments.exact_families.checking import check
from experiments.exact_families.families import FAMILIES, draw_problem
from experiments.exact_families.settings import Settings, draw_settings

# Of every hundred problems: how many, points on the larger side, and pairs of points at the most.
Stratum = tuple[int, tuple[int, int], float]
STRATA: dict[str, tuple[Stratum, ...]] = {
    "cpu": (
        (70, (2, 100), 1e4),
        (18, (100, 2_000), 3e5),
        (9, (2_000, 20_000), 2e6),
        (3, (20_000, 70_000), 8e6),
    ),
    "cuda": (
        (46, (2, 2_000), 4e6),
        (30, (2_000, 20_000), 4e8),
        (14, (20_000, 200_000), 4e9),
        (9, (210_000, 500_000), 3e10),
        (1, (1_048_576, 1_048_576), 2e11),
    ),
}
# Every so many problems, one whose pairs are limited by this instead.
RARE = {"cpu": (10_000, 2.2e9), "cuda": (1_000, 1.1e12)}
# Pairs times iterations that one term may take, how many times as long a pair takes in double
# precision, and coordinates that one problem may hold.
WORK = {"cpu": 5e7, "cuda": 2e12}
DOUBLE = {"cpu": 2, "cuda": 30}
ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
MOST_ITERATIONS = 300
# Scores that are never stored: every worker would hold gigabytes.
MOST_STORED = 2e8
LISTED = 200


def draw_sizes(
    random: np.random.Generator, index: int, device: str, sizes: tuple[int, int] | None
) -> tuple[int, int]:
    """Points of the source and of the target, either of them the larger."""
    shares = np.cumsum([share for share, _, _ in STRATA[device]])
    _, edges, pairs = STRATA[device][int(np.searchsorted(shares, index % 100, side="right"))]
    every, most = RARE[device]
    if sizes is not None:
        edges = sizes
    elif index % every == every - 1:
        pairs = most
    larger = int(np.exp(random.uniform(*np.log(edges)))) if edges[0] < edges[1] else edges[0]
    smaller = int(np.exp(random.uniform(0, np.log(min(larger, max(2, pairs / larger))))))
    if index % every == every - 1 and sizes is None:
        smaller = int(min(larger, max(2, pairs / larger)))
    return (larger, smaller) if random.random() < 0.5 else (smaller, larger)


def affordable(settings: Settings, shape: tuple[int, int], device: str) -> Settings:
    """The settings, changed where they would take minutes: fewer terms, iterations, digits."""
    pairs = float(shape[0] * shape[1])
    square = float(max(shape)) ** 2
    if settings.route != "cross" and 2 * square > WORK[device]:
        settings = replace(settings, route="cross")
    if settings.route != "cross":
        # A self term has the pairs of one side.
        pairs = square
    work = WORK[device] / (DOUBLE[device] if settings.precision == "double" else 1)
    if work < pairs and settings.precision == "double":
        settings, work = replace(settings, precision="high"), WORK[device]
    settings = replace(settings, streamed=settings.streamed or pairs > MOST_STORED)
    if "max_iterations" not in settings.options:
        # A schedule has a number of its own.
        return settings
    most = min(settings.options["max_iterations"], max(2, int(work / pairs)))
    return replace(settings, options=settings.options | {"max_iterations": most})


def run_one(
    index: int,
    *,
    seed: int,
    device: str,
    family: str | None,
    sizes: tuple[int, int] | None,
    deadline: float | None,
) -> dict[str, Any] | None:
    """Draw, solve and check the problem of an index; None after the deadline."""
    if deadline is not None and time.time() > deadline:
        return None
    started = time.perf_counter()
    random = np.random.default_rng([seed, index])
    n, m = draw_sizes(random, index, device, sizes)
    frame = Frame(random, n, m, device, ELEMENTS[device])
    problem = draw_problem(frame, family)
    n, m = problem.shape
    settings = affordable(draw_settings(random, MOST_ITERATIONS), problem.shape, device)
    outcome = check(problem, settings, device)
    return {
        "index": index,
        "family": problem.family,
        "n": n,
        "m": m,
        "d": problem.x.samples.dim,
        **settings.summary(),
        **asdict(outcome),
        "total_seconds": time.perf_counter() - started,
    }


def run_all(indices: Iterable[int], workers: int, job: Any) -> Iterator[dict[str, Any]]:
    """All outcomes, as they come."""
    if workers == 1:
        _single_thread()
        yield from (found for found in map(job, indices) if found is not None)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=_single_thread) as pool:
        for found in pool.imap_unordered(job, indices, chunksize=4):
            if found is not None:
                yield found


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, widths, refusals and every violation."""
    violated = [row for row in rows if row["status"] == "violated"]
    larger = [max(row["n"], row["m"]) for row in rows]
    edges = (100, 1_000, 10_000, 66_000, 200_000, 1_000_000)
    return {
        "problems": len(rows),
        "status": dict(Counter(row["status"] for row in rows)),
        "intervals_checked": sum(row["checked"]["bounds"] for row in rows),
        "marginal_errors_checked": sum(row["checked"]["marginals"] for row in rows),
        "problems_with_at_least_points": {str(e): sum(n >= e for n in larger) for e in edges},
        "families": _by(rows, "family"),
        "precisions": _by(rows, "precision"),
        "routes": _by(rows, "route"),
        "stopped_by": dict(Counter(str(row["stopped_by"]) for row in rows)),
        "refusals": dict(Counter(row["refusal"] for row in rows if row["refusal"]).most_common()),
        "violation_kinds": dict(
            Counter(kind for row in violated for kind in {f["kind"] for f in row["findings"]})
        ),
        "undecided": [row["index"] for row in rows if row["status"] == "undecided"],
        "violations": violated[:LISTED],
    }


def _by(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Counts and widths of every value of a column."""
    found = {}
    for name in sorted({row[key] for row in rows}):
        part = [row for row in rows if row[key] == name]
        widths = [row["width"] for row in part if row["width"] is not None]
        found[name] = {
            **Counter(row["status"] for row in part),
            "problems": len(part),
            "worst_outside": max(
                (f["outside"] or 0 for row in part for f in row["findings"]), default=0
            ),
            "median_width": statistics.median(widths) if widths else None,
            "worst_width": max(widths, default=None),
        }
    return found


def _told(finding: dict[str, Any]) -> str:
    outside = "" if finding["outside"] is None else f" by {finding['outside']:.1e}"
    return f"{finding['kind']} of {finding['of']}{outside}"


def _single_thread() -> None:
    torch.set_num_threads(1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--problems", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="index of the first problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="start no problem after so many seconds")
    parser.add_argument("--sizes", type=int, nargs=2, help="points of the larger side, from, to")
    parser.add_argument("--family", choices=list(FAMILIES))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--only", type=int, nargs="+", help="run the problems of these indices and print them"
    )
    parser.add_argument("--name", help="of the result; default verify_bounds_DEVICE")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    started = time.time()
    job = partial(
        run_one,
        seed=options.seed,
        device=options.device,
        family=options.family,
        sizes=tuple(options.sizes) if options.sizes else None,
        deadline=started + options.seconds if options.seconds else None,
    )
    if options.only is not None:
        for index in options.only:
            for key, value in (job(index) or {}).items():
                print(f"{key}: {value}")
        return 0
    rows = []
    indices = range(options.first, options.first + options.problems)
    for row in run_all(indices, options.workers, job):
        rows.append(row)
        if row["status"] == "violated":
            print(
                f"{row['index']}: {row['family']} {row['n']} x {row['m']}, {row['precision']}, "
                f"epsilon {row['relative_epsilon']:.2g}, {row['route']}: "
                + "; ".join(map(_told, row["findings"][:4])),
                flush=True,
            )
        if len(rows) % 500 == 0:
            print(f"{len(rows)} problems, {time.time() - started:.0f} s", flush=True)
    rows.sort(key=lambda row: row["index"])
    summary = summarise(rows)
    content = {
        "environment": environment("numpy", "torch"),
        "arguments": {"seed": options.seed, "first": options.first, "workers": options.workers},
        "seconds": time.time() - started,
        "seconds_of_the_library": sum(row["seconds"] for row in rows),
        **summary,
    }
    name = options.name or f"verify_bounds_{options.device}"
    path = write_result(name, content, options.output)
    print({key: summary[key] for key in ("problems", "status", "violation_kinds", "refusals")})
    print(f"{content['seconds']:.0f} s, {path.name}")
    return 1 if summary["status"].get("violated") else 0


if __name__ == "__main__":
    sys.exit(main())
