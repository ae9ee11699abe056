"""One flow, run with and without the points that the maps are tried on."""

import pytest
import torch
from flow_by_hand import HeldOut, blobs, digits, euler_flow, resolved_epsilon

import otdd_flash as otdd
from otdd_flash.flows.maps import ResidualMap


@pytest.fixture(scope="session")
def held_out():
    """Upright digits towards rotated ones, epsilon 5% of the mean cost."""
    everything, target = digits("train", 180), digits("test", 180, rotate=90)
    shuffled = torch.randperm(180, generator=torch.Generator().manual_seed(0))
    inside, outside = shuffled[:150], shuffled[150:]
    epsilon = resolved_epsilon(everything, target, 0.05, otdd.GroundCost())
    options = {"epsilon": epsilon, "steps": 3, "tolerance": 1e-5}
    flow = euler_flow(everything.take(inside), target, **options)
    full = euler_flow(everything, target, **options)
    return HeldOut(flow, everything.take(outside), full.after.take(outside))


@pytest.fixture(scope="session")
def small():
    """A flow of few points and two steps, for what holds of any."""
    everything, target = blobs(17, 0, shift=0.5), blobs(17, 1, shift=1.0)
    inside = everything.take(torch.arange(12))
    flow = euler_flow(inside, target, epsilon=2.0, steps=2, tolerance=1e-2)
    outside = everything.take(torch.arange(12, 17))
    return HeldOut(flow, outside, outside)


@pytest.fixture(scope="session")
def trained(held_out):
    """The network of that flow."""
    return ResidualMap.fit(held_out.flow.before, held_out.flow.after, device="cpu")
