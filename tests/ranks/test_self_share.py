"""Shares of a cloud with itself: together every pair once, and as many for every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from labelled_costs import cost_between, labelled_cost
from rank_pool import pool
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.cost.points import LabelledCost
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.kernels.passes import symmetric_step
from otdd_flash.operators import parts
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.point_scores import stored_operator, streamed_operator
from otdd_flash.operators.self_share import FoldedPairs, folded, merged
from otdd_flash.operators.sharing import ShardedOperator
from otdd_flash.operators.triton_operator import KernelOperator, KernelSelfShare

pytestmark = pytest.mark.xdist_group("ranks")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = 0.3


def cost_of(n: int) -> LabelledCost:
    """Of a cloud with itself."""
    return labelled_cost(torch.randn(n, 5, generator=torch.Generator().manual_seed(n)).to(DEVICE))


def shares(cost: LabelledCost, hold: Callable[[LabelledCost], Any], size: int) -> list[FoldedPairs]:
    """Of every rank, in PyTorch."""
    places = [folded(len(cost.a), rank, size) for rank in range(size)]
    return [FoldedPairs(cost, ranges, hold) for ranges in places]


def test_points_that_parts_give_no_mass() -> None:
    """In float32, what stands for the logarithm of a mass of 0 overflows at large epsilon."""
    x, labels = 1e10 * cost_of(20).points[0].cpu(), torch.zeros(20, dtype=torch.int64)
    masses, nothing = torch.eye(20, dtype=torch.float64)[3], torch.zeros(1, 1).double()
    sides = {"labels_x": labels, "labels_y": labels, "class_costs": nothing, "lambda_x": 0.5}
    large, f = cost_between(x, x, masses, masses, **sides), torch.zeros(20)
    hold = partial(streamed_operator, dtype=torch.float32)
    found = merged(torch.stack([each.softmin(f, 1e19) for each in shares(large, hold, 2)]), 1e19)
    expected = reference.softmin_rows(reference.dense_cost(x, x), masses, f.double(), 1e19)
    assert torch.allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_kernels_compute_each_pair_of_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    before = symmetric_step.ranges_of_stripe

    def counted(*given: Any) -> Tensor:
        found = before(*given)
        for row, first, blocks, _ in found.tolist():
            seen.extend((row, column) for column in range(first, first + blocks))
        return found

    monkeypatch.setattr(symmetric_step, "ranges_of_stripe", counted)
    operator = KernelOperator(cost_of(500), "fast")
    for rank in range(2):
        KernelSelfShare(operator, (rank, 2)).softmin(torch.zeros(500, device=DEVICE), EPSILON)
    # Two a class.
    blocks = 6
    assert sorted(seen) == [(row, column) for row in range(blocks) for column in range(row, blocks)]


@pytest.mark.parametrize("size", [1, 8])
def test_kernels_of_more_ranks_than_blocks(size: int) -> None:
    """A rank without a block adds nothing."""
    operator = KernelOperator(cost_of(40), "high")
    f = operator.softmin_rows(torch.zeros(40, device=DEVICE), EPSILON).double()
    parts = [KernelSelfShare(operator, (rank, size)).softmin(f, EPSILON) for rank in range(size)]
    assert any(part.isposinf().all() for part in parts) == (size == 8)
    found = merged(torch.stack(parts), EPSILON)
    expected = operator.softmin_rows(f, EPSILON).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_pytorch_computes_pairs_of_one_range_twice(size: int) -> None:
    n = 64
    held = shares(cost_of(n), partial(stored_operator, dtype=torch.float64), size)
    scores = [sum(math.prod(tile.operator.shape) for tile in part.tiles()) for part in held]
    # Half of all, and half of the squares on the diagonal once more.
    assert sum(scores) == n**2 / 2 + 2 * size * (n / (2 * size)) ** 2 / 2
    assert len(set(scores)) == 1


def test_sums_of_one_potential_are_ordered_of_pairs() -> None:
    """Which are half as many scores; those of two are not symmetric."""
    operator = object.__new__(ShardedOperator)
    operator.ranks = SimpleNamespace(order=lambda work, *given: work)
    operator.number, operator._by_pairs = 0, True
    f = torch.zeros(3)
    assert operator.marginals(f, None, EPSILON) is parts.marginals_self
    assert operator.marginals(f, f, EPSILON) is parts.marginals


def far_softmin(ranks: Ranks, f: Tensor) -> list[float]:
    """T(f) of a cloud in Triton, by ranks."""
    samples = otdd.LabeledSamples(cost_of(150).points[0].cpu(), None, ())
    compute = otdd.ComputeOptions("cpu", "triton", group=ranks)
    table = torch.zeros(2, 2, dtype=torch.float64)
    whole = Comparison.between(samples, samples, EPSILON, table, otdd.GroundCost(), compute)
    return whole.operator("xx").softmin_self(f, EPSILON).tolist()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("shift", [60.0, 0.0, 1e30])
def test_rows_out_of_reach_are_computed_again(shift: float) -> None:
    """Where f is far from T(f) in one place of either rank, if anywhere."""
    f = torch.zeros(150)
    f[[7, 120]] = -shift
    points = cost_of(150).points[0].cpu()
    masses = torch.full((150,), 1 / 150, dtype=torch.float64)
    truth = reference.softmin_rows(
        reference.dense_cost(points, points), masses, f.double(), EPSILON
    )
    found = pool(2).led(far_softmin, f)[0]
    torch.testing.assert_close(torch.tensor(found).double(), truth, rtol=0, atol=2e-3)
