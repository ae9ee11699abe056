"""Rows with several labels, and with numbers, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import lead, pool

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators import comparison as comparisons

pytestmark = pytest.mark.xdist_group("ranks")


def sides(numbers: bool) -> list[otdd.LabeledSamples]:
    draw, found = torch.Generator().manual_seed(0), []
    for size in (40, 30):
        x = torch.randn(size, 3, generator=draw)
        indicator = torch.rand(size, 4, generator=draw) < 0.4
        indicator[torch.arange(size), torch.arange(size) % 4] = True
        targets = torch.randn(size, 1, generator=draw)
        kind: dict[str, Any] = {"labels": indicator, "class_names": tuple("abcd")}
        if numbers:
            kind = {"labels": None, "class_names": (), "targets": targets}
        found.append(otdd.LabeledSamples(x, **kind))
    return found


def distance(group: Any, numbers: bool, most: int, given: list[otdd.LabeledSamples]) -> Any:
    star = torch.ones(8, 8, dtype=torch.float64) - torch.eye(8, dtype=torch.float64)
    star[0, 1:] = star[1:, 0] = 0.25
    labels: Any = (
        "continuous" if numbers else otdd.labels.Given(otdd.ClassDistances.from_full(star, 4))
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(comparisons, "MOST_SETS", most)
        found = otdd.dataset_distance(
            *given, labels=labels, epsilon=0.4, compute=otdd.ComputeOptions("cpu", group=group)
        )
        return found.value, found.bounds, found.class_coupling()


def led_distance(ranks: Ranks, numbers: bool, most: int) -> Any:
    return distance(ranks, numbers, most, sides(numbers))


def led(numbers: bool, most: int) -> Any:
    return lead(led_distance, numbers, most)


def of_shards(numbers: bool) -> Any:
    rank = torch.distributed.get_rank()
    shards = [side.take(torch.arange(len(side)).chunk(2)[rank]) for side in sides(numbers)]
    try:
        return distance(torch.distributed.group.WORLD, numbers, 512, shards)
    except otdd.errors.InputError as error:
        return str(error)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("numbers", "most"), [(False, 512), (False, 0), (True, 0)])
def test_ranks_have_the_distance_of_one_process(numbers: bool, most: int) -> None:
    value, bounds, coupling = pool(2).run(led, numbers, most)[0]
    alone = distance(None, numbers, most, sides(numbers))
    assert value == pytest.approx(alone[0], abs=1e-5)
    assert bounds[0] <= alone[1][1]
    assert alone[1][0] <= bounds[1]
    assert torch.allclose(coupling, alone[2], atol=1e-4)


@pytest.mark.slow(after=1)
def test_shards_of_numbers_are_put_together_and_sets_are_refused() -> None:
    found = pool(2).run(of_shards, True)
    assert found[0][0] == pytest.approx(distance(None, True, 512, sides(True))[0], abs=1e-5)
    for message in pool(2).run(of_shards, False):
        assert "shards of rows with several labels are not put together" in message
