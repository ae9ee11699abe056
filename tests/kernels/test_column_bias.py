"""The bias of columns: its formula, and grids that a card accepts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE

from otdd_flash.kernels.epsilon import on_device
from otdd_flash.kernels.points import column_bias as module
from otdd_flash.kernels.points.column_bias import column_bias
from otdd_flash.kernels.points.packed_points import arrange

# What CUDA accepts on each axis of a grid.
MOST_PROGRAMS = 2**31 - 1, 2**16 - 1, 2**16 - 1


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_every_class_has_the_bias_of_every_column(rows: int) -> None:
    """No rows of costs: one row of bias, without class distances."""
    draw = torch.Generator().manual_seed(0)
    layout = arrange(torch.randint(0, 5, (600,), generator=draw), 5)
    g = torch.randn(600, generator=draw)
    log2_masses, squares = torch.randn(2, layout.size, generator=draw)
    costs = torch.rand(max(rows, 1), 5, generator=draw)
    found = column_bias(
        g.to(DEVICE),
        SimpleNamespace(
            size=layout.size, origin=layout.origin.to(DEVICE), labels=layout.labels.to(DEVICE)
        ),
        log2_masses.to(DEVICE),
        squares.to(DEVICE),
        costs.to(DEVICE) if rows else None,
        on_device(0.3, DEVICE),
    )
    labelled = costs.double()[:, layout.labels] if rows else torch.zeros(1, layout.size)
    term = g.double()[layout.origin] - squares.double() - labelled
    expected = log2_masses.double() + term * math.log2(math.e) / 0.3
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(1, 2**24), (100, 2**24), (2**17, 256)])
def test_any_number_of_columns_and_of_classes_fits_a_grid(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(module, "column_bias_kernel", Kernel())
    nothing = torch.empty(columns, device="meta")
    layout = SimpleNamespace(size=columns, origin=nothing, labels=nothing)
    costs = torch.empty(rows, 1, device="meta")
    bias = column_bias(nothing, layout, nothing, nothing, costs, nothing)
    assert bias.shape == (rows, columns)
    (grid,) = grids
    assert math.prod(grid) == rows * columns // 256
    assert all(size <= most for size, most in zip(grid, MOST_PROGRAMS, strict=False))
