"""Whole problems whose points no rank holds all of: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import lead, pool
from test_shared_distance import EPSILON, datasets
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators import sharing
from otdd_flash.operators.ring_blocks import RingBlocks

pytestmark = pytest.mark.xdist_group("ranks")


def in_a_ring(work: Any, *arguments: Any) -> Any:
    """What rank 0 finds where no rank has memory for all points."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharing, "UNASKED", 0)
        return lead(work, *arguments)


def distance(ranks: Ranks, precision: str) -> dict[str, Any]:
    compute = otdd.ComputeOptions("cpu", "torch", precision, memory_budget=0, group=ranks)
    result = otdd.dataset_distance(*datasets(), epsilon=EPSILON, compute=compute)
    return {
        "value": result.value,
        "bounds": result.bounds,
        "f": result.potentials[0],
        "backend": result.divergence.backend,
        "layout": result.shared.layout,
        "said": result.to_dict()["layout"],
        "converged": result.converged,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("size", "precision"), [(2, "double"), (3, "fast")])
def test_distances_are_those_of_one_process(size: int, precision: str) -> None:
    answers = pool(size).run(in_a_ring, distance, precision)
    alone = otdd.dataset_distance(
        *datasets(), epsilon=EPSILON, compute=otdd.ComputeOptions("cpu", precision="double")
    )
    first = answers[0]
    near = 1e-9 if precision == "double" else 1e-3
    assert first["layout"] == first["said"] == "ring"
    assert first["backend"].endswith(f"{size} ranks, points in a ring")
    assert first["converged"]
    assert first["bounds"][0] <= alone.value <= first["bounds"][1]
    assert first["value"] == pytest.approx(alone.value, abs=near)
    assert torch.allclose(first["f"].double(), alone.potentials[0].double(), atol=4 * near)
    if size == 2:
        again = pool(size).run(in_a_ring, distance, precision)[0]
        assert torch.equal(first["f"], again["f"])
        assert (first["value"], first["bounds"]) == (again["value"], again["bounds"])


def held_points() -> int:
    """The most points of either cloud that a rank holds while a cost lives."""
    counts: list[int] = []
    before = RingBlocks.circulated

    def counted(self: RingBlocks, **how: Any) -> Any:
        shards = [each for each in self._ranks.held.values() if isinstance(each, Tensor)]
        counts.append(sum(map(len, shards)))
        return before(self, **how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RingBlocks, "circulated", counted)
        in_a_ring(distance, "double")
    return max(counts)


@pytest.mark.slow
def test_no_rank_holds_all_points() -> None:
    most = pool(2).run(held_points)
    assert all(count <= (61 + 1) // 2 + (45 + 1) // 2 for count in most)
    assert sum(most) == 61 + 45


def budgets(budget: str) -> str:
    """How points are held where ranks have so much memory for them."""
    # One rank has less than the others.
    free = 1000 if torch.distributed.get_rank() == 1 else 1 << 30
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharing, "free_memory", lambda device: free)
        return in_a_ring(_layout, budget)


def _layout(ranks: Ranks, budget: str) -> str:
    compute = otdd.ComputeOptions("cpu", memory_budget=budget, group=ranks)
    return otdd.dataset_distance(*datasets(), epsilon=EPSILON, compute=compute).shared.layout


@pytest.mark.slow
def test_the_shortest_rank_decides() -> None:
    for budget, layout in (("auto", "ring"), ("1GiB", "replicated")):
        assert pool(2).run(budgets, budget) == [layout, layout]
