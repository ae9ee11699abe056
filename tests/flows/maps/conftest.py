"""One flow of digits, run with and without the points that the maps are tried on."""

from __future__ import annotations

import pytest
import torch
from flow_by_hand import HeldOut, digits, euler_flow, resolved_epsilon

import otdd_flash as otdd
from otdd_flash.flows.maps import ResidualMap


@pytest.fixture(scope="session")
def held_out() -> HeldOut:
    """Upright digits towards rotated ones, epsilon 5% of the mean cost."""
    everything, target = digits("train", 300), digits("test", 300, rotate=90)
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    inside, outside = shuffled[:250], shuffled[250:]
    epsilon = resolved_epsilon(everything, target, 0.05, otdd.GroundCost())
    flow = euler_flow(everything.take(inside), target, epsilon=epsilon, steps=5)
    full = euler_flow(everything, target, epsilon=epsilon, steps=5)
    return HeldOut(flow, everything.take(outside), full.after.take(outside))


@pytest.fixture(scope="session")
def trained(held_out: HeldOut) -> ResidualMap:
    """The network of that flow."""
    return ResidualMap.fit(held_out.flow.before, held_out.flow.after, device="cpu")
