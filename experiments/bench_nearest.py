"""The nearest of many datasets, proven, beside solving all cross terms.

    python -m experiments.bench_nearest --data-root DIR [--output DIR]
    python -m experiments.bench_nearest --device cuda [--members 5000] [--output DIR]

On a processor: 200 tasks made of MNIST, Fashion-MNIST, USPS and digits, some classes of one of them
turned by a multiple of 90 degrees, 2,000 rows drawn, in 64 components; queries are further tasks.
The proven first five, and all 200 cross terms to the default tolerance, with the class distances
that each needs, from the same index. A time counts if both have the same first five.

With `--device cuda`: 5,000 datasets of 2,000 rows in 64 dimensions, ten Gaussian classes each whose
centres move away from those of the first; seconds of the index and of a query.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.otdd import prepared
from otdd_flash.ranking.bounds import class_tables
from otdd_flash.solver.solving import solve

T = TypeVar("T")

NAMES, SIZE, DIM, K = ("mnist", "fashion_mnist", "usps", "digits"), 16, 64, 5


def tasks(root: str, count: int, rows: int, seed: int) -> dict[str, otdd.LabeledSamples]:
    """Draw tasks of a few classes of one dataset, turned, in principal components of all."""
    draw = torch.Generator().manual_seed(seed)
    pixels = otdd.extractors.pixels(size=SIZE)
    bases = [otdd.embed(otdd.load(name, root=root), pixels) for name in NAMES]
    some = torch.cat([one.features[:1500].float() for one in bases])
    mean = some.mean(0)
    _, _, vectors = torch.linalg.svd(some - mean, full_matrices=False)
    found = {}
    for k in range(count):
        base = bases[k % len(bases)]
        size, turns = (
            int(torch.randint(*ends, (1,), generator=draw)) for ends in ((3, 11), (0, 4))
        )
        classes = torch.randperm(10, generator=draw)[:size].sort().values
        assert base.labels is not None
        members = torch.isin(base.labels, classes).nonzero().squeeze(1)
        chosen = members[torch.randperm(len(members), generator=draw)[:rows]]
        images = base.features[chosen].float().view(-1, SIZE, SIZE)
        points = (images.rot90(turns, (1, 2)).reshape(len(chosen), -1) - mean) @ vectors[:DIM].T
        labels = torch.searchsorted(classes, base.labels[chosen])
        name = f"{NAMES[k % 4]} {''.join(map(str, classes.tolist()))}, {90 * turns}, {k}"
        found[name] = otdd.LabeledSamples(points, labels, tuple(map(str, classes.tolist())))
    return found


def clusters(count: int, rows: int, device: str) -> dict[str, otdd.LabeledSamples]:
    """Draw datasets of ten Gaussian classes, farther from the first one by one."""
    draw = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": draw, "device": device}
    centres, labels = torch.randn(10, DIM, **options), torch.arange(rows, device=device) % 10
    names = tuple(map(str, range(10)))
    found = {}
    for k in range(count):
        moved = centres + 2 * k / count * torch.randn(10, DIM, **options)
        points = moved[labels] + 0.5 * torch.randn(rows, DIM, **options)
        found[f"{k}"] = otdd.LabeledSamples(points, labels, names)
    return found


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """Return what `work` returns, its wall time and its CPU time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall, spent = time.perf_counter(), time.process_time()
    found = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - wall, time.process_time() - spent


def all_cross_terms(query: otdd.LabeledSamples, index: otdd.Index) -> dict[str, float]:
    """Solve the cross term of every member, and return its distance less half the query's term."""
    settings = index.settings
    found = {}
    for entry in index.entries:
        pair = (query, index.rows(entry))
        (table,) = class_tables(pair, [(0, 1)], settings.metric)
        _, compared = prepared(
            pair, settings.cost, index.compute, settings.metric, None, debias=False
        )
        term = solve(compared.with_classes(table).at(settings.epsilon), otdd.Converged()).xy
        found[entry.name] = term.value - entry.term.value / 2
    return found


def on_a_processor(root: str, members: int, rows: int, queries: int) -> list[dict[str, Any]]:
    """Rank the tasks for some queries, and solve all cross terms of each."""
    library = tasks(root, members, rows, seed=0)
    index, seconds, spent = timed(lambda: otdd.index(library))
    print(f"index: {seconds:.1f} s, {spent:.1f} CPU seconds", flush=True)
    found = []
    for name, query in tasks(root, queries, rows, seed=1).items():
        ranking, wall, cpu = timed(lambda query=query: otdd.nearest(query, index, K))  # type: ignore[misc]
        values, full_wall, full_cpu = timed(lambda query=query: all_cross_terms(query, index))  # type: ignore[misc]
        first = sorted(values, key=values.__getitem__)[:K]
        if not ranking.certified or {row.name for row in ranking.rows} != set(first):
            raise RuntimeError(f"{name}: {ranking} is not {first}")
        row = {
            "query": name,
            "seconds": wall,
            "cpu_seconds": cpu,
            "full_seconds": full_wall,
            "full_cpu_seconds": full_cpu,
            "share_of_seconds": wall / full_wall,
            "share_of_cpu_seconds": cpu / full_cpu,
            **{key: getattr(ranking.cost, key) for key in ("touched", "finished", "passes")},
        }
        print(row, flush=True)
        found.append(row)
    shares = [row["share_of_seconds"] for row in found]
    return [
        {"members": members, "rows": rows, "k": K, "index_seconds": seconds},
        {"mean_share_of_seconds": sum(shares) / len(shares), "queries": found},
    ]


def on_a_gpu(device: str, members: int, rows: int, queries: int) -> list[dict[str, Any]]:
    """Time the index and queries, after one of each that compiles and records."""
    library = clusters(members, rows, device)
    names = list(library)
    few = {name: library[name] for name in names[: min(64, members)]}
    otdd.nearest(library[names[-1]], otdd.index(few, compute=device), K)
    index, seconds, _ = timed(lambda: otdd.index(library, compute=device))
    print(f"index: {seconds:.1f} s", flush=True)
    found = []
    for place in range(queries):
        query = library[names[place * members // (2 * queries)]]
        query = replace(query, features=query.features + 0.05)
        ranking, wall, _ = timed(lambda query=query: otdd.nearest(query, index, K))  # type: ignore[misc]
        found.append({"seconds": wall, "certified": ranking.certified, **ranking.cost._asdict()})
        found[-1] = {k: v for k, v in found[-1].items() if v == v}
        print(found[-1], flush=True)
    return [{"members": members, "rows": rows, "k": K, "index_seconds": seconds, "queries": found}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root", default="~/data")
    parser.add_argument("--members", type=int)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--queries", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    cuda = given.device != "cpu"
    members = given.members or (5000 if cuda else 200)
    if cuda:
        rows = on_a_gpu(given.device, members, given.rows, given.queries)
    else:
        rows = on_a_processor(given.data_root, members, given.rows, given.queries)
    name = f"bench_nearest_{'cuda' if cuda else 'cpu'}"
    content = {"environment": environment("torch"), "rows": rows}
    assert all(math.isfinite(row.get("index_seconds", 0.0)) for row in rows)
    print(f"written to {write_result(name, content, given.output)}")


if __name__ == "__main__":
    main()
