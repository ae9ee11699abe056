"""Both sides of a flow come to the CPU while it runs, and are what they were at its start."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.flows import run
from otdd_flash.flows.departure import on_host, ready

GPU = torch.device("cuda")


def sides(device: torch.device | str) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    draw, labels = torch.Generator().manual_seed(0), torch.arange(12) % 2
    one, other = (
        otdd.LabeledSamples(torch.randn(12, 3, generator=draw) + k, labels, ("a", "b"))
        for k in range(2)
    )
    return one.to(device), other.to(device)


def test_they_come_while_steps_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stepped = Event(), Event()

    # Before the loop a copy would wait for it in vain, and after it the loop for a copy.
    def late(*given: Any) -> Any:
        begun.set()
        assert stepped.wait(60)
        return on_host(*given)

    def progress(record: Any) -> None:
        assert begun.wait(60)
        stepped.set()

    monkeypatch.setattr(run, "on_host", late)
    told = otdd.Callbacks(progress=progress)
    source, target = sides("cpu")
    result = otdd.gradient_flow(source, target, otdd.Flow(2), callbacks=told, compute="cpu")
    assert torch.equal(result.source.features, source.features)
    assert torch.equal(result.target.features, target.features)


@pytest.mark.slow
def test_a_copy_that_fails_ends_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(run, "on_host", fails)
    with pytest.raises(MemoryError, match="none left"):
        otdd.gradient_flow(*sides("cpu"), otdd.Flow(1), compute="cpu")


@pytest.mark.gpu
def test_copies_from_a_gpu_share_nothing() -> None:
    points, goal = sides(GPU)
    found = on_host(points, goal, ready(GPU))
    room = found.room
    assert room is not None
    assert room.data_ptr() != found.points.features.data_ptr()
    for there, here in zip((points, goal), found[:2], strict=True):
        assert here.features.device.type == "cpu"
        assert torch.equal(here.features, there.features.cpu())
        assert same(here.labels, there.labels)


@pytest.mark.gpu
def test_a_result_has_where_a_flow_on_a_gpu_began_and_ended() -> None:
    source, target = sides(GPU)
    result = otdd.gradient_flow(source, target, otdd.Flow(2), compute=str(GPU))
    assert torch.equal(result.source.features, source.features.cpu())
    assert torch.equal(result.target.features, target.features.cpu())
    assert result.samples.features.device.type == "cpu"
    alone = otdd.gradient_flow(*sides("cpu"), otdd.Flow(2), compute="cpu")
    torch.testing.assert_close(result.samples.features, alone.samples.features, rtol=0, atol=1e-2)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one.cpu(), other.cpu())
