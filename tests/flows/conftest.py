"""Small weighted clouds for the tests of flows."""

from collections.abc import Callable

import pytest
import torch

from otdd_flash.samples import LabeledSamples

MakeCloud = Callable[..., LabeledSamples]


@pytest.fixture
def make_cloud():
    """n float64 points of three classes with unequal masses, the third of which is 0."""

    def make(n=33, d=5, seed=0):
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(n, d, generator=generator, dtype=torch.float64)
        weights = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
        weights[2] = 0
        return LabeledSamples(points, torch.arange(n) % 3, ("cat", "dog", "3"), weights)

    return make
