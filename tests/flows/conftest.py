"""A flow of digits, run with and without the points that its maps are tried on."""

from typing import NamedTuple

import pytest
import torch
from small_flows import blobs, digits, flow

import otdd_flash as otdd


class HeldOut(NamedTuple):
    """A flow, and where points that it did not have go in a flow that had them too."""

    flow: otdd.FlowResult
    samples: otdd.LabeledSamples
    truth: otdd.LabeledSamples


@pytest.fixture(scope="session")
def held_out():
    """Upright digits towards rotated ones, epsilon 5% of the mean cost."""
    everything, target = digits("train", 180), digits("test", 180, rotate=90)
    order = torch.randperm(180, generator=torch.Generator().manual_seed(0))
    inside, outside = order[:150], order[150:]
    options = {"steps": 3, "stepping": otdd.Stepping(0.2), "keep_moments": True}
    options["solver"] = otdd.Converged(1e-5)
    full = flow(everything, target, epsilon=None, epsilon_relative=0.05, **options)
    some = flow(everything.take(inside), target, epsilon=full.settings["epsilon"], **options)
    return HeldOut(some, everything.take(outside), full.samples.take(outside))


@pytest.fixture(scope="session")
def small():
    """A flow of few points and two steps, for what holds of any; and points of its own classes."""
    options = {"solver": otdd.Converged(1e-2), "epsilon": 2.0, "keep_moments": True}
    return flow(blobs(12, 4), blobs(17, 4, seed=1), **options), blobs(5, 4, seed=2)
