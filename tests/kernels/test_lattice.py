"""Points on a lattice that float16 holds are found, and never rounded."""

from __future__ import annotations

import pytest
import torch
from labelled_costs import labelled_cost
from torch import Tensor

from otdd_flash.cost.points import LabelledCost
from otdd_flash.cost.rounding import lattice_of
from otdd_flash.kernels.points.lattice_facts import lattice_facts
from otdd_flash.operators.kernel import KernelOperator

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def grey(count: int, seed: int, dim: int = 20) -> Tensor:
    """Whole numbers up to 255, many of them 0."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (count, dim), generator=draw)
    return (values * (torch.rand(count, dim, generator=draw) < 0.4)).float()


def cost_between(x: Tensor, y: Tensor) -> LabelledCost:
    return labelled_cost(x.to(DEVICE), y.to(DEVICE))


@pytest.mark.parametrize(
    ("points", "scale"),
    [
        (grey(60, 0) / 255, 255.0),
        (grey(60, 0).mul(1 / 255).double(), 255.0),
        ((grey(60, 0) > 99).float(), 1.0),
        (grey(60, 0) - 128, 1.0),
        (grey(60, 0).half(), 1.0),
    ],
)
def test_grey_values_and_counts_are_on_a_lattice(points: Tensor, scale: float) -> None:
    cost = cost_between(points, points[:40])
    lattice = lattice_of(cost)
    assert lattice is not None
    assert lattice.scale == scale
    beside = lattice.centre * scale - (lattice.centre * scale).round()
    assert float(beside.abs().max()) < 1e-9
    assert float((lattice.centre - cost.centre).abs().max()) <= (1 + 1e-9) / 2 / scale
    # They are read as they are, at any precision.
    assert KernelOperator(cost, "fast").execution.refined is None


@pytest.mark.parametrize(
    "points",
    [
        torch.randn(60, 20, generator=torch.Generator().manual_seed(0)),
        (grey(60, 0) / 255).half(),
        grey(60, 0) / 255 - 0.13,
        grey(60, 0) * 20,
        grey(60, 0) / 510,
        # One is enough.
        torch.cat((grey(59, 0) / 255, torch.full((1, 20), 0.5))),
    ],
)
def test_others_are_on_none(points: Tensor) -> None:
    assert lattice_of(cost_between(points, grey(40, 1) / 255)) is None
    assert lattice_of(cost_between(grey(40, 1) / 255, points)) is None


def test_facts_are_those_of_points_of_any_strides() -> None:
    """Of both steps and of all blocks, up to what rounding explains."""
    draw, columns = torch.Generator().manual_seed(0), 130
    halves = torch.randint(-9, 300, (columns, 2 * 277), generator=draw).double()
    halves[-1, 2 * 276] = 301
    points = (halves / 2 * (1 + 2.0**-26)).T[::2].to(DEVICE)

    def facts(rounding: float) -> list[float]:
        found = lattice_facts(points, (1.0, 2.0), rounding)
        assert found.shape[0] > 1
        return found.amax(0).tolist()

    assert facts(2.0**-23) == [1, 0, -float(points.min()), float(points.max())]
    assert facts(2.0**-27)[:2] == [1, 1]
