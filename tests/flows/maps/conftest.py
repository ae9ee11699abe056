"""One flow of digits, run with and without the points that the maps are tried on."""

from __future__ import annotations

import pytest
import torch
from flow_by_hand import HeldOut, digits, euler_flow, resolved_epsilon

import otdd_flash as otdd
from otdd_flash.flows.maps import ResidualMap
from otdd_flash.samples import LabeledSamples


@pytest.fixture(scope="session")
def held_out() -> HeldOut:
    """Upright digits towards rotated ones, epsilon 5% of the mean cost."""
    everything, target = digits("train", 240), digits("test", 240, rotate=90)
    shuffled = torch.randperm(240, generator=torch.Generator().manual_seed(0))
    inside, outside = shuffled[:200], shuffled[200:]
    epsilon = resolved_epsilon(everything, target, 0.05, otdd.GroundCost())
    flow = euler_flow(everything.take(inside), target, epsilon=epsilon, steps=4)
    full = euler_flow(everything, target, epsilon=epsilon, steps=4)
    return HeldOut(flow, everything.take(outside), full.after.take(outside))


@pytest.fixture(scope="session")
def small() -> HeldOut:
    """A flow of few points and two steps, for what holds of any."""
    draw, labels = torch.Generator().manual_seed(0), torch.arange(17) % 2
    everything, target = (
        LabeledSamples(
            torch.randn(17, 4, generator=draw, dtype=torch.float64) + shift, labels, ("a", "b")
        )
        for shift in (0.5, 1.0)
    )
    flow = euler_flow(
        everything.take(torch.arange(12)), target, epsilon=1.0, steps=2, tolerance=1e-3
    )
    outside = everything.take(torch.arange(12, 17))
    return HeldOut(flow, outside, outside)


@pytest.fixture(scope="session")
def trained(held_out: HeldOut) -> ResidualMap:
    """The network of that flow."""
    return ResidualMap.fit(held_out.flow.before, held_out.flow.after, device="cpu")
