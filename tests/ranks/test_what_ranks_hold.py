"""What other ranks hold of a dataset is what it is now, however often it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import pool
from test_ring import in_a_ring

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import LostRankError

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
