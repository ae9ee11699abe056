"""What ranks put together, hold and say of a cost that they share."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from live_bytes import peak
from rank_pool import pool
from torch import Tensor

from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.lattice import lattice_of
from otdd_flash.operators.parts import Part, Parts, facts
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import Problem

pytestmark = pytest.mark.xdist_group("ranks")

EPSILON = 0.3
SIZES = [2, pytest.param(3, marks=pytest.mark.slow)]


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


def ranks_own(count: int) -> tuple[Tensor, Tensor, list[int]]:
    """A tensor put together of shares, one of sums, and what lengths came together."""
    ranks = Ranks()
    own = ranks.share(count)
    gathered = ranks.gathered(torch.arange(2 * count).view(count, 2)[own], count)
    summed = ranks.summed(torch.tensor([2.0**60, 1.0, -(2.0**60)][ranks.rank % 3]).double())
    rows = ranks.concatenated(torch.full((ranks.rank,), ranks.rank))
    return gathered, summed, rows.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_shares_are_put_together_in_the_order_of_ranks(size: int) -> None:
    expected = 0.0
    for rank in range(size):
        expected += [2.0**60, 1.0, -(2.0**60)][rank % 3]
    for count in (0, 1, 7, 12):
        for gathered, summed, rows in pool(size).run(ranks_own, count):
            assert torch.equal(gathered, torch.arange(2 * count).view(count, 2))
            assert float(summed) == expected
            assert rows == [rank for rank in range(size) for _ in range(rank)]


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


def test_parts_lie_where_the_whole_does() -> None:
    """Integers among other points are taken as the others are, so that all parts round alike."""
    points = torch.cat((torch.arange(12.0).view(4, 3), torch.randn(4, 3)))
    samples = LabeledSamples(points, None, ())
    whole = Problem.between(samples, samples, EPSILON)
    cost = whole.inputs("xy").labelled
    integers = Problem.between(points[:4], points[:4], EPSILON).inputs("xy").labelled
    assert lattice_of(integers) is not None
    assert lattice_of(cost) is None
    assert lattice_of(cost.part(slice(0, 4), slice(0, 4))) is None


class TwoRanks:
    """Rank 0 of two, and what the other one says."""

    size = 2

    def __init__(self, parts: Any, each: list[float]) -> None:
        self.held, self._each = {0: parts}, each

    def all_gathered(self, mine: Tensor) -> Tensor:
        return torch.stack((mine, mine.new_tensor(self._each)))


def cross_parts(over_columns: Any = None) -> Any:
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    errors = torch.ones_like(half), torch.tensor([0.0, 4.0], dtype=torch.float64)
    operator = SimpleNamespace(a=half, b=half, accurate_errors=errors, rounding=0.25)
    operator.execution = SimpleNamespace(over_columns=over_columns)
    return SimpleNamespace(
        cost=SimpleNamespace(b=half), share=None, rows=Part(cast(Any, operator), 0.5)
    )


def test_a_plan_may_give_all_of_a_column_to_the_rank_that_errs_more_there() -> None:
    ranks = TwoRanks(cast(Parts, cross_parts()), [4.0, 0.0, 0.125, 0.0, 0.5])
    # Rows 1 / 2 + 1 / 2, columns 4 wherever they are, and the most rounding.
    assert facts(cast(Ranks, ranks), 0).error == pytest.approx(1 + 4 + 0.25, rel=1e-12)


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_some_columns_are_asked_of_all_ranks_or_of_none(here: bool, there: bool) -> None:
    parts = cross_parts(len if here else None)
    ranks = TwoRanks(cast(Parts, parts), [0.0, 0.0, 0.0, float(not there), 0.5])
    assert facts(cast(Ranks, ranks), 0).takes_columns == (here and there)
