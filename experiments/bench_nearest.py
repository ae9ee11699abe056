"""The nearest of many datasets, proven, beside solving all cross terms.

    python -m experiments.bench_nearest --data-root DIR [--output DIR]
    python -m experiments.bench_nearest --device cuda [--datasets 5000] [--output DIR]

On a processor: 200 tasks made of MNIST, Fashion-MNIST, USPS and digits, some classes of one of them
turned by a multiple of 90 degrees, 2,000 rows drawn, in 64 components; queries are further tasks.
The proven first five, and all 200 cross terms to the default tolerance, with the class distances
that each needs, from the same index. A time counts if both have the same first five.

With `--device cuda`: 5,000 datasets of 2,000 rows in 64 dimensions, ten Gaussian classes each whose
centres move away from those of the first; seconds of the index and of a query, and of their parts.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.otdd import prepared
from otdd_flash.ranking import index as index_module
from otdd_flash.ranking import race as race_module
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
        # In memory, as readers give datasets.
        found[f"{k}"] = otdd.LabeledSamples(points.cpu(), labels.cpu(), names)
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


# What takes time, by the names of functions in the modules that call them.
PARTS = {
    index_module: ("digest_of", "class_tables", "self_terms", "moments_of"),
    race_module: ("class_tables", "self_terms", "moments_of", "lowest_by_moments", "cross_terms"),
}


@contextmanager
def parts() -> Iterator[dict[str, float]]:
    """Sum the seconds of the parts of an index or of a query; the device is waited for."""
    spent: dict[str, float] = defaultdict(float)

    def measured(name: str, work: Callable[..., T]) -> Callable[..., T]:
        def run(*given: Any, **named: Any) -> T:
            found, wall, _ = timed(lambda: work(*given, **named))
            spent[name] += wall
            return found

        return run

    with ExitStack() as patches:
        for module, names in PARTS.items():
            for name in names:
                run = measured(name, getattr(module, name))
                patches.enter_context(patch.object(module, name, run))
        read = measured("read", index_module._Reader._one)
        patches.enter_context(patch.object(index_module._Reader, "_one", read))
        yield spent


def on_a_gpu(
    device: str, members: int, rows: int, queries: int, write: Callable[[list[Any]], object]
) -> list[dict[str, Any]]:
    """Time the index and queries, after one of each that compiles and records.

    What is known is written whenever ten seconds have passed, and after each query.
    """
    library = clusters(members, rows, device)
    names = list(library)
    few = {name: library[name] for name in names[: min(256, members)]}
    with parts() as spent:
        _, wall, _ = timed(
            lambda: otdd.nearest(library[names[-1]], otdd.index(few, compute=device), K)
        )
    print(f"first index of {len(few)} and query: {wall:.1f} s, {dict(spent)}", flush=True)
    found: list[dict[str, Any]] = []
    row: dict[str, Any] = {"members": members, "rows": rows, "k": K, "queries": found}
    started = said = time.perf_counter()
    with parts() as spent:

        def heard(done: int, _: int) -> None:
            nonlocal said
            if time.perf_counter() - said < 10:
                return
            said = time.perf_counter()
            row.update(members_done=done, seconds_so_far=said - started, index_parts=dict(spent))
            print(row, flush=True)
            write([row])

        index, seconds, _ = timed(lambda: otdd.index(library, compute=device, progress=heard))
    row.update(members_done=members, index_seconds=seconds, index_parts=dict(spent))
    row.pop("seconds_so_far", None)
    print(f"index: {seconds:.1f} s, {dict(spent)}", flush=True)
    write([row])
    for place in range(queries):
        query = library[names[place * members // (2 * queries)]]
        query = replace(query, features=query.features + 0.05)
        with parts() as spent:
            ranking, wall, _ = timed(lambda query=query: otdd.nearest(query, index, K))  # type: ignore[misc]
        found.append({"seconds": wall, "certified": ranking.certified, **ranking.cost._asdict()})
        found[-1] = {k: v for k, v in found[-1].items() if v == v} | {"parts": dict(spent)}
        print(found[-1], flush=True)
        write([row])
    return [row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root", default="~/data")
    parser.add_argument("--datasets", type=int)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--queries", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    cuda = given.device != "cpu"
    members = given.datasets or (5000 if cuda else 200)
    name, about = f"bench_nearest_{'cuda' if cuda else 'cpu'}", environment("torch")

    def write(rows: list[Any]) -> Path:
        return write_result(name, {"environment": about, "rows": rows}, given.output)

    if cuda:
        rows = on_a_gpu(given.device, members, given.rows, given.queries, write)
    else:
        rows = on_a_processor(given.data_root, members, given.rows, given.queries)
    print(f"written to {write(rows)}")


if __name__ == "__main__":
    main()
