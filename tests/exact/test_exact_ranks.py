"""Exact distances whose passes several processes share: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import pool

import otdd_flash as otdd
from otdd_flash.solver.exact import solve

pytestmark = pytest.mark.xdist_group("ranks")


def datasets() -> list[otdd.LabeledSamples]:
    draw = torch.Generator().manual_seed(0)
    sides = []
    for size, classes in ((61, 4), (45, 3)):
        labels = torch.randint(0, classes, (size,), generator=draw)
        points = torch.randn(size, 3, generator=draw) + labels[:, None]
        sides.append(otdd.LabeledSamples(points, labels, tuple("abcd"[:classes])))
    return sides


def exact_distance(few: int) -> dict[str, Any]:
    """Of shards, with few arcs at first."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shards = [
        side.take(torch.arange(rank * len(side) // size, (rank + 1) * len(side) // size))
        for side in datasets()
    ]
    compute = otdd.ComputeOptions("cpu", group=torch.distributed.group.WORLD)
    before = solve.FEW_ENTRIES, solve.FIRST_ARCS
    solve.FEW_ENTRIES, solve.FIRST_ARCS = 0, few
    try:
        found = otdd.dataset_distance(
            *shards, epsilon=0, solver=otdd.Exact(bound_width=0), compute=compute
        )
    finally:
        solve.FEW_ENTRIES, solve.FIRST_ARCS = before
    coupling, slopes = found.class_coupling(), found.contributions().slopes
    return {"bounds": found.bounds, "coupling": coupling, "slopes": slopes}


def pairs_of_three() -> list[list[float]]:
    """All pairs, of which every process solves some."""
    sides = [*datasets(), datasets()[0].take(torch.arange(30))]

    def work(ranks: otdd.Ranks) -> list[list[float]]:
        shared = otdd.ComputeOptions("cpu", group=ranks)
        return otdd.pairwise_distances(sides, epsilon=0, compute=shared).values.tolist()

    return otdd.led(work, torch.distributed.group.WORLD)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("size", "few"), [(2, 2), (3, 1)])
def test_ranks_find_the_distance_of_one_process(size: int, few: int) -> None:
    alone = otdd.dataset_distance(*datasets(), epsilon=0, solver=otdd.Exact(bound_width=0))
    slopes = alone.contributions().slopes
    for found in pool(size).run(exact_distance, few):
        assert found["bounds"] == pytest.approx(alone.bounds, abs=1e-12)
        assert torch.allclose(found["coupling"], alone.class_coupling())
        assert torch.allclose(found["slopes"], slopes, atol=1e-9)


def test_ranks_solve_some_pairs_each() -> None:
    sides = [*datasets(), datasets()[0].take(torch.arange(30))]
    expected = otdd.pairwise_distances(sides, epsilon=0).values
    for found in pool(2).run(pairs_of_three):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, atol=1e-9)
