"""What ranks put together, hold and say of a cost that they share."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from live_bytes import peak
from rank_pool import pool
from torch import Tensor

from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import Problem

pytestmark = pytest.mark.xdist_group("ranks")

EPSILON = 0.3


def cloud(n: int, seed: int) -> LabeledSamples:
    """Points around far centres, classes of which some have no points, a third without mass."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (n,), generator=draw)
    points = torch.randn(n, 5, generator=draw, dtype=torch.float64) + 4 + labels[:, None]
    weights = torch.rand(n, generator=draw, dtype=torch.float64) + 0.1
    weights[1::3] = 0
    return LabeledSamples(points.float(), labels, ("a", "b", "c", "d"), weights)


def problem(n: int, m: int, group: Ranks | None, **options: Any) -> Problem:
    table = torch.rand(8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    compute = ComputeOptions("cpu", group=group, **options)
    sides = cloud(n, 1), cloud(m, 2)
    return Problem.between(*sides, EPSILON, table + table.T, GroundCost(0.5, 0.7), compute)


def errors_of_columns(ranks: Ranks, wrong: int) -> Tensor:
    """What sums of columns may be off, where those of one rank may be off by more."""
    whole = problem(9, 8, ranks)
    operator = whole.operator("xy")
    ranks.order(_worsen, max(ranks.held), wrong)
    f, g = torch.zeros(9, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    return operator.marginals(f, g, EPSILON).column_errors


def _worsen(ranks: Ranks, number: int, wrong: int) -> None:
    part = ranks.held[number].rows.operator
    before = part.marginals

    def worse(*args: Any, **kwargs: Any) -> Any:
        found = before(*args, **kwargs)
        return found._replace(column_errors=found.column_errors + (ranks.rank == wrong))

    part.marginals = worse


def test_columns_may_be_off_by_what_any_rank_says() -> None:
    for wrong in (0, 1):
        for errors in pool(2).led(errors_of_columns, wrong):
            assert bool((errors >= 1).all()), wrong


def taken_by_a_gather() -> float:
    """Bytes that putting shares together takes, over those of the whole."""
    ranks = Ranks()
    part = torch.ones(1000, 100)
    return peak(lambda: ranks.gathered(part, 2000), part.device) / (2 * part.nbytes)


@pytest.mark.slow
def test_equal_shares_come_where_they_belong() -> None:
    """Gloo itself holds all of them once more; NCCL does not."""
    for taken in pool(2).run(taken_by_a_gather):
        assert 1 <= taken <= 2.01


def what_is_held(ranks: Ranks) -> list[list[list[int]]]:
    """Numbers of what ranks hold while an operator lives, and when it is gone."""
    whole = problem(9, 8, ranks)
    operator = whole.operator("xy")
    held = ranks.order(_held)
    del whole, operator
    gc.collect()
    return [held, ranks.order(_held)]


def _held(ranks: Ranks) -> list[list[int]]:
    return ranks.all_gathered_objects(sorted(ranks.held))


def test_ranks_hold_what_rank_0_does() -> None:
    held, left = pool(2).led(what_is_held)[0]
    assert [len(each) for each in held] == [3, 3]
    assert left == [[], []]
