"""Points that no rank holds all of: the numbers of one process, bytes, launches and overlap."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import reference
import torch
from labelled_costs import dense_labelled_cost, labelled_cost
from operation_counts import OperationCounts
from rank_pool import lead, pool
from test_shared_distance import EPSILON, datasets
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.cost.rounding import lattice_of
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators import parts, sharing
from otdd_flash.operators.parts import sides_of
from otdd_flash.operators.ring import RingBlocks, ring_parts
from otdd_flash.operators.triton_operator import KernelOperator

pytestmark = pytest.mark.xdist_group("ranks")


def in_a_ring(work: Any, *arguments: Any) -> Any:
    """What rank 0 finds where no rank has memory for all points."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharing, "ASSUMED_FREE", 0)
        return lead(work, *arguments)


def distance(ranks: Ranks, precision: str) -> list[Any]:
    compute = otdd.ComputeOptions("cpu", "torch", precision, memory_budget=0, group=ranks)
    found = otdd.dataset_distance(*datasets(), epsilon=EPSILON, compute=compute)
    assert found.shared.layout == found.to_dict()["layout"] == "ring"
    assert found.divergence.backend.endswith(f"{ranks.size} ranks, points in a ring")
    assert found.converged
    return [found.value, found.bounds, found.potentials[0]]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "precision"), [(2, "double"), (3, "fast")])
def test_distances_are_those_of_one_process(size: int, precision: str) -> None:
    value, bounds, f = pool(size).run(in_a_ring, distance, precision)[0]
    alone = otdd.dataset_distance(
        *datasets(), epsilon=EPSILON, compute=otdd.ComputeOptions("cpu", precision="double")
    )
    near = 1e-9 if precision == "double" else 1e-3
    assert bounds[0] <= alone.value <= bounds[1]
    assert value == pytest.approx(alone.value, abs=near)
    assert torch.allclose(f.double(), alone.potentials[0].double(), atol=4 * near)
    if size == 2:
        again = pool(size).run(in_a_ring, distance, precision)[0]
        assert torch.equal(f, again[2])
        assert (value, bounds) == (again[0], again[1])


def few(counts: tuple[int, int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(count, 3, generator=draw) for count in counts]


def distance_of_few(ranks: Ranks, counts: tuple[int, int]) -> float:
    compute = otdd.ComputeOptions("cpu", precision="double", memory_budget=0, group=ranks)
    found = otdd.dataset_distance(*few(counts), epsilon=EPSILON, labels="none", compute=compute)
    assert found.shared.layout == "ring"
    return found.value


@pytest.mark.parametrize("counts", [(6, 7), (3, 1)])
def test_few_points_are_halved_among_ranks(counts: tuple[int, int]) -> None:
    """Halves of what a rank has are of one point, or of none."""
    found = pool(2).run(in_a_ring, distance_of_few, counts)[0]
    compute = otdd.ComputeOptions("cpu", precision="double")
    alone = otdd.dataset_distance(*few(counts), epsilon=EPSILON, labels="none", compute=compute)
    assert found == pytest.approx(alone.value, abs=1e-9)


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


def layout_at(budget: str) -> str:
    """How points are held where one rank has less memory for them than the others."""
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
        assert pool(2).run(layout_at, budget) == [layout, layout]


def held(ranks: Ranks, n: int, m: int | None) -> tuple[Tensor, Tensor]:
    """Hold a cost of kernels as number 0, between two clouds or of one with itself: potentials."""
    draw = torch.Generator().manual_seed(1)
    clouds = [torch.randn(count, 5, generator=draw) for count in (n, m) if count]
    cost = labelled_cost(*clouds, massless=True)
    lattice_of(cost)
    own = [side[owned.of(ranks)] for side, owned in zip(cost.held, sides_of(cost), strict=True)]
    first = cost.held[0][:1], cost.held[1][:1]
    build = partial(KernelOperator, precision="fast")
    ranks.held[0] = ring_parts(ranks, cost.without_points(), (own[0], own[1]), first, build)
    f = 0.1 * torch.randn(n, generator=draw)
    return f, 0.1 * torch.randn(m, generator=draw) if m else f


def launches(m: int | None) -> dict[str, tuple[int, int]]:
    """Kernels launched by a pass, and what the host waits for, once everything has come by once."""
    ranks = Ranks()
    f, g = held(ranks, 61, m)
    ways: dict[str, Any] = {"softmin": lambda: parts.softmin(ranks, 0, False, g, EPSILON, None)}
    if m is None:
        ways["pairs"] = lambda: parts.softmin_self(ranks, 0, f, EPSILON)
    else:
        ways["beside a guess"] = lambda: parts.softmin(ranks, 0, False, g, EPSILON, f)
    found = {}
    with pytest.MonkeyPatch.context() as patched:
        for name, way in ways.items():
            way()
            with OperationCounts(patched) as counted:
                way()
            found[name] = sum(counted.launches.values()), counted.reads
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter is given")
@pytest.mark.parametrize(
    ("m", "expected"),
    [
        # Of a pair of blocks a bias, a pass and a merge.
        (45, {"softmin": (2 * 3, 0), "beside a guess": (2 * 3, 1)}),
        # By rows two blocks with four. In pairs two with themselves; with a bias and a pass, these
        # two and two pairs with the other rank's.
        (None, {"softmin": (8 * 3, 0), "pairs": (2 * 3 + 3 * 2, 1)}),
    ],
)
def test_a_pass_is_few_launches_and_no_wait(m: int | None, expected: dict[str, Any]) -> None:
    """But for whether sums are in range, which ranks tell each other once a pass."""
    assert pool(2).run(launches, m) == [expected] * 2


def refined_pass() -> Tensor:
    """The softmin of a cloud with itself whose kernels have read half of its digits before."""
    ranks = Ranks()
    f, _ = held(ranks, 61, None)
    parts.refine(ranks, 0, 1)
    return parts.softmin_self(ranks, 1, f, EPSILON)


@pytest.mark.slow
def test_pairs_are_refined_to_the_points_themselves() -> None:
    draw = torch.Generator().manual_seed(1)
    cost = labelled_cost(torch.randn(61, 5, generator=draw), massless=True)
    f = 0.1 * torch.randn(61, generator=draw)
    expected = reference.softmin_rows(dense_labelled_cost(cost), cost.a, f.double(), EPSILON)
    for found in pool(2).run(refined_pass):
        assert torch.allclose(found.double(), expected, rtol=0, atol=1e-5)


def order_of_events() -> tuple[list[str], list[int]]:
    """When shards are sent for and used, and whether what came is there to the end."""
    ranks, events, kept = Ranks(), [], []
    send = torch.distributed.batch_isend_irecv

    def sent(moves: Any) -> Any:
        events.append("sent for")
        return send(moves)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "batch_isend_irecv", sent)
        shapes = [[torch.Size((3,))]] * ranks.size
        for _, came in ranks.circulated([torch.full((3,), ranks.rank)], shapes):
            events.append("used")
            kept += came
    return events, [int(each[0]) for each in kept]


@pytest.mark.slow
def test_the_next_shard_is_on_its_way_while_one_is_used() -> None:
    for rank, (events, kept) in enumerate(pool(3).run(order_of_events)):
        assert events == ["sent for", "used", "sent for", "used", "used"]
        assert kept == [(rank + step) % 3 for step in range(3)]
