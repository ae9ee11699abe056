"""The bias of columns is its formula, with class distances where rows have one class."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import DEVICE

from otdd_flash.kernels.epsilon import on_device
from otdd_flash.kernels.points.column_bias import column_bias
from otdd_flash.kernels.points.packed_points import arrange


@pytest.mark.parametrize("rows", [1, 3])
def test_the_bias_holds_class_distances_of_the_only_class(rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    layout = arrange(torch.randint(0, 5, (600,), generator=draw), 5)
    g = torch.randn(600, generator=draw)
    log2_masses, squares = torch.randn(2, layout.size, generator=draw)
    costs = torch.rand(rows, 5, generator=draw)
    found = column_bias(
        g.to(DEVICE),
        SimpleNamespace(
            size=layout.size, origin=layout.origin.to(DEVICE), labels=layout.labels.to(DEVICE)
        ),
        log2_masses.to(DEVICE),
        squares.to(DEVICE),
        costs.to(DEVICE),
        on_device(0.3, DEVICE),
    )
    labelled = costs.double()[0, layout.labels] if rows == 1 else 0.0
    term = g.double()[layout.origin] - squares.double() - labelled
    expected = log2_masses.double() + term * math.log2(math.e) / 0.3
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)
