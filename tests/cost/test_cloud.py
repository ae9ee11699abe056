"""What a cloud tells of itself is found anew where it has changed, counted or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from other_device import OTHER, OtherDevice

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.points import LabelledCost
from otdd_flash.operators import comparison
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples

COUNT, DIM = 30, 4


def samples(seed: int) -> LabeledSamples:
    features = torch.randn(COUNT, DIM, generator=torch.Generator().manual_seed(seed)) + 3
    return LabeledSamples(features, torch.arange(COUNT) % 3, ("a", "b", "c"))


def largest(x: LabeledSamples, y: LabeledSamples) -> float:
    table = torch.arange(9.0).view(3, 3)
    return LabelledCost.of(x, y, table, lambda_x=0.5, lambda_y=0.5).largest


def test_a_call_sees_what_a_gpu_has_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused optimisers and replayed graphs change points of which no count says so."""
    monkeypatch.setattr(comparison, "resolve_device", lambda _: OTHER)
    options = GroundCost(), ComputeOptions("cpu", "torch")
    drawn = samples(0), samples(1)
    with OtherDevice():
        x, y = (
            LabeledSamples(of.features.to(OTHER), torch.arange(COUNT) % 3, of.class_names)
            for of in drawn
        )

        def asked() -> float:
            prepared = Comparison.prepare((x, y), *options)
            costs = [prepared.cost("xy") for _ in range(2)]
            assert costs[0].clouds[0] is costs[1].clouds[0]
            return costs[0].largest

        assert asked() == largest(*drawn)
        held: Any = x.features
        version = held._version
        for there in (held.held, drawn[0].features):
            there.mul_(2)
        assert held._version == version
        assert asked() == largest(*drawn)
