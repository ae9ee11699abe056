"""What other ranks hold of a dataset: what it is now, as long as it is used, and once."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from live_bytes import peak
from rank_pool import pool
from test_ring import in_a_ring
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import LostRankError
from otdd_flash.operators.comparison import Comparison

pytestmark = pytest.mark.xdist_group("ranks")


def sides() -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(20) % 2
    first, other = (
        otdd.LabeledSamples(torch.randn(20, 3, generator=draw) + k, labels, ("a", "b"))
        for k in range(2)
    )
    return first, other


def changed_between(ranks: Ranks | None, budget: int | str) -> list[Any]:
    """Values before and after points change in place, through memory that they share as well."""
    source, target = sides()
    compute = otdd.ComputeOptions("cpu", precision="double", memory_budget=budget, group=ranks)
    shift, values = 0.1 * torch.arange(20.0)[:, None], []
    for _ in range(2):
        for change in (source.features.add_, source.features.data.add_):
            found = otdd.dataset_distance(source, target, epsilon=0.5, compute=compute)
            values.append(found.value)
            change(shift)
    layout = "replicated" if ranks is None else found.shared.layout
    return [layout, *values]


@pytest.mark.slow
def test_points_that_changed_in_place_are_sent_anew() -> None:
    _, *alone = changed_between(None, "auto")
    replicated, *found = pool(2).led(changed_between, "auto")[0]
    ring, *round_it = pool(2).run(in_a_ring, changed_between, 0)[0]
    assert (replicated, ring) == ("replicated", "ring")
    assert found == pytest.approx(alone, rel=1e-9)
    assert round_it == pytest.approx(alone, rel=1e-9)


def interrupted(ranks: Ranks) -> Any:
    """Class distances whose progress raises on rank 0, which alone hears of it."""

    def stop(done: int, total: int) -> None:
        raise ValueError("enough")

    return otdd.dataset_distance(
        *sides(),
        epsilon=0.5,
        labels=otdd.labels.Sinkhorn(1.0),
        compute=otdd.ComputeOptions("cpu", group=ranks),
        class_progress=stop,
    )


def test_an_error_of_rank_0_in_the_middle_of_an_order_ends_all() -> None:
    leader, other = pool(2).led(interrupted)
    assert isinstance(leader, ValueError)
    assert isinstance(other, LostRankError)
    assert str(other) == "rank 0 ended with ValueError: enough"


def operator_of(ranks: Ranks) -> Any:
    compute = otdd.ComputeOptions("cpu", group=ranks)
    return Comparison.between(*sides(), 0.5, compute=compute, debias=False).operator("xy")


def what_is_held(ranks: Ranks) -> list[list[int]]:
    """How much ranks hold while an operator lives, and when it is gone."""
    operator = operator_of(ranks)
    held = ranks.order(_held)
    del operator
    gc.collect()
    return [held, ranks.order(_held)]


def _held(ranks: Ranks) -> list[int]:
    return ranks.all_gathered_objects(len(ranks.held))


def test_ranks_hold_what_rank_0_does() -> None:
    assert pool(2).led(what_is_held)[0] == [[1, 1], [0, 0]]


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


def errors_of_columns(ranks: Ranks, wrong: int) -> Tensor:
    """What sums of columns may be off, where those of one rank may be off by more."""
    operator = operator_of(ranks)
    ranks.order(_worsen, max(ranks.held), wrong)
    f, g = torch.zeros(2, 20, dtype=torch.float64)
    return operator.marginals(f, g, 0.5).column_errors


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
