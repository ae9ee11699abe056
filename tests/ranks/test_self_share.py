"""Shares of a cloud with itself: together every pair once, and as many for every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from rank_pool import pool
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.kernels.passes import symmetric_step
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.self_share import BlockShare, FoldedPairs, folded, merged
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.solver.problem import Problem

pytestmark = pytest.mark.xdist_group("ranks")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = 0.3

HELD: dict[str, Any] = {
    "kept": lambda cost: StoredOperator.keep(cost, torch.float64),
    "streamed": lambda cost: StreamedOperator(cost, torch.float64),
    "float32": lambda cost: StreamedOperator(cost, torch.float32),
}


def cost_of(n: int, classes: int) -> LabelledCost:
    """Of a cloud with itself; a third of its points has no mass."""
    draw = torch.Generator().manual_seed(n)
    labels = torch.randint(0, classes, (n,), generator=draw).to(DEVICE)
    x = torch.randn(n, 5, generator=draw).to(DEVICE) + labels[:, None] / classes
    masses = torch.rand(n, generator=draw, dtype=torch.float64) + 0.1
    masses[1::3] = 0
    masses = (masses / masses.sum()).to(DEVICE)
    table = torch.rand(classes, classes, generator=draw, dtype=torch.float64).to(DEVICE)
    return LabelledCost(
        x,
        x,
        masses,
        masses,
        labels_x=labels,
        labels_y=labels,
        class_costs=table + table.T,
        lambda_x=0.5,
    )


def dense(cost: LabelledCost) -> Tensor:
    x, labels = cost.points[0], cost.labels[0]
    return reference.dense_cost(x, x, 0.5, cost.class_costs, labels, labels)


def shares(cost: LabelledCost, held: str, size: int) -> list[Any]:
    if held in HELD:
        count = len(cost.a)
        places = [folded(count, rank, size) for rank in range(size)]
        return [BlockShare(FoldedPairs(cost, ranges, HELD[held])) for ranges in places]
    operator = KernelOperator(cost, held)
    return [operator.self_share(rank, size) for rank in range(size)]


def test_all_ranks_have_as_many_pairs() -> None:
    for size in (2, 4, 8):
        ranges = [folded(1024, rank, size) for rank in range(size)]
        pairs = [sum(1024 - row for each in own for row in range(*each)) for own in ranges]
        assert sum(pairs) == 1024 * 1025 // 2
        assert max(pairs) <= 1.01 * sum(pairs) / size


def test_points_that_parts_give_no_mass() -> None:
    """In float32, what stands for the logarithm of a mass of 0 overflows at large epsilon."""
    none = math.inf
    parts = torch.tensor([[none, 1.0, none], [none, none, -2.0]], dtype=torch.float64)
    assert merged(parts, EPSILON).tolist() == [none, 1.0, -2.0]
    x, masses = 1e10 * cost_of(20, 1).points[0].cpu(), torch.eye(20, dtype=torch.float64)[3]
    labels, nothing = torch.zeros(20, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.float64)
    large = LabelledCost(
        x,
        x,
        masses,
        masses,
        labels_x=labels,
        labels_y=labels,
        class_costs=nothing,
        lambda_x=0.5,
    )
    f = torch.zeros(20)
    found = merged(torch.stack([s.softmin(f, 1e19) for s in shares(large, "float32", 2)]), 1e19)
    expected = reference.softmin_rows(dense(large), large.a, f.double(), 1e19)
    assert torch.allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_kernels_compute_each_pair_of_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    before = symmetric_step.ranges_of_stripe

    def counted(stripe: Any, device: torch.device) -> Tensor:
        found = before(stripe, device)
        for row, first, blocks, _ in found.tolist():
            seen.extend((row, column) for column in range(first, first + blocks))
        return found

    monkeypatch.setattr(symmetric_step, "ranges_of_stripe", counted)
    cost = cost_of(500, 1)
    for share in shares(cost, "fast", 2):
        share.softmin(torch.zeros(500, device=DEVICE), EPSILON)
    blocks = 4
    assert sorted(seen) == [(row, column) for row in range(blocks) for column in range(row, blocks)]


@pytest.mark.parametrize("size", [2, 4])
def test_pytorch_computes_pairs_of_one_range_twice(size: int) -> None:
    n = 64
    parts = shares(cost_of(n, 1), "kept", size)
    scores = [sum(math.prod(tile.operator.shape) for tile in part._pairs.tiles()) for part in parts]
    # Half of all, and half of the squares on the diagonal once more.
    assert sum(scores) == n**2 / 2 + 2 * size * (n / (2 * size)) ** 2 / 2
    assert len(set(scores)) == 1


def products_of_one_cloud(ranks: Ranks) -> list[Tensor]:
    """What needs rows of a cloud with itself: other potentials than one, and products."""
    points = torch.randn(23, 3, generator=torch.Generator().manual_seed(0)).double()
    compute = otdd.ComputeOptions("cpu", precision="double", group=ranks)
    operator = Problem.between(points, points, EPSILON, compute=compute).operator("xx")
    f, g = potentials_of(23)
    sums = operator.marginals(f, g, EPSILON)
    return [sums.rows, sums.columns, operator.apply_plan(f, g, EPSILON, points).values]


def potentials_of(n: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    f, g = (torch.randn(n, generator=draw, dtype=torch.float64) for _ in range(2))
    return f, g


def test_other_potentials_are_summed_by_rows() -> None:
    points = torch.randn(23, 3, generator=torch.Generator().manual_seed(0)).double()
    masses = torch.full((23,), 1 / 23, dtype=torch.float64)
    cost = (points[:, None] - points[None]).square().sum(2) / 2
    plan = reference.plan(cost, masses, masses, *potentials_of(23), EPSILON)
    for rows, columns, product in pool(2).led(products_of_one_cloud):
        assert torch.allclose(rows, plan.sum(1), rtol=1e-11)
        assert torch.allclose(columns, plan.sum(0), rtol=1e-11)
        assert torch.allclose(product, plan @ points, rtol=1e-11)
