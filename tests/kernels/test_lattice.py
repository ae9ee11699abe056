"""Points on a lattice that float16 holds are found, and never rounded."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from kernel_cases import DEVICE, EPSILON, LAMBDA_X, largest_error
from labelled_costs import dense_labelled_cost, labelled_cost
from torch import Tensor

from otdd_flash.kernels.points.lattice_facts import lattice_facts
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.lattice import lattice_of


def grey(count: int, seed: int, dim: int = 20) -> Tensor:
    """Whole numbers up to 255, many of them 0."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (count, dim), generator=draw)
    return (values * (torch.rand(count, dim, generator=draw) < 0.4)).float()


def cost_between(x: Tensor, y: Tensor, lambda_x: float = LAMBDA_X) -> LabelledCost:
    return labelled_cost(x.to(DEVICE), y.to(DEVICE), lambda_x=lambda_x)


@pytest.mark.parametrize(
    ("points", "scale"),
    [
        (grey(60, 0) / 255, 255.0),
        (grey(60, 0).double() / 255, 255.0),
        (grey(60, 0).mul(1 / 255), 255.0),
        (grey(60, 0), 1.0),
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


@pytest.mark.parametrize(
    "points",
    [
        torch.randn(60, 20, generator=torch.Generator().manual_seed(0)),
        (grey(60, 0) / 255).half(),
        grey(60, 0) / 255 - 0.13,
        grey(60, 0) * 20,
        grey(60, 0) / 510,
    ],
)
def test_others_are_on_none(points: Tensor) -> None:
    assert lattice_of(cost_between(points, grey(40, 1) / 255)) is None
    assert lattice_of(cost_between(grey(40, 1) / 255, points)) is None


def test_a_cloud_says_once_that_it_is_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(points: Tensor, *given: Any) -> Tensor:
        asked.append(len(points))
        return lattice_facts(points, *given)

    monkeypatch.setattr("otdd_flash.kernels.points.lattice_facts.lattice_facts", counted)
    beside = cost_between(torch.randn(60, 20), grey(40, 1) / 255)
    assert lattice_of(beside) is None
    x, y = beside.clouds
    other = cost_between(grey(30, 2) / 255, grey(20, 3) / 255).clouds[0]
    # Of the other nothing more is of use.
    assert lattice_of(LabelledCost.between(other, x, beside.class_costs, LAMBDA_X)) is None
    assert asked == [60, 40]
    assert lattice_of(LabelledCost.between(other, y, beside.class_costs, LAMBDA_X)) is not None
    assert asked == [60, 40, 30]


def test_one_coordinate_beside_it_is_enough() -> None:
    points = grey(300, 0) / 255
    assert lattice_of(cost_between(points, grey(40, 1) / 255)) is not None
    points[299, 19] = 0.5
    assert lattice_of(cost_between(points, grey(40, 1) / 255)) is None


@pytest.mark.parametrize("columns", [1, 7, 130])
def test_facts_are_those_of_points_of_any_strides(columns: int) -> None:
    """Of both steps and of all blocks, up to what rounding explains."""
    draw = torch.Generator().manual_seed(0)
    halves = torch.randint(-9, 300, (columns, 2 * 277), generator=draw).double()
    halves[-1, 2 * 276] = 301
    points = (halves / 2 * (1 + 2.0**-26)).T[::2].to(DEVICE)

    def facts(rounding: float) -> list[float]:
        found = lattice_facts(points, (1.0, 2.0), rounding)
        assert found.shape[0] > 1
        return found.amax(0).tolist()

    assert facts(2.0**-23) == [1, 0, -float(points.min()), float(points.max())]
    assert facts(2.0**-27)[:2] == [1, 1]


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_a_pass_is_that_of_the_points_as_given(precision: str, scale: float) -> None:
    cost = cost_between(grey(70, 0) / scale, grey(50, 1) / scale, LAMBDA_X * (scale / 255) ** 2)
    operator = KernelOperator(cost, precision)
    assert operator.execution.refined is None
    dense = dense_labelled_cost(cost)
    g = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = reference.softmin_rows(dense, cost.b, g.double(), EPSILON)
    error = (operator.softmin_rows(g, EPSILON).double() - expected).abs().max()
    assert float(error) <= 2 * largest_error(operator)
    # Beside it by less than float16 tells apart, the same points are rounded.
    rounded = KernelOperator(
        cost_between(cost.points[0] + 0.3 / scale, cost.points[1], cost.lambda_x), "fast"
    )
    assert rounded.execution.refined is not None


@pytest.mark.slow
def test_a_plan_is_applied_as_in_high_precision() -> None:
    cost = cost_between(grey(70, 0) / 255, grey(50, 1) / 255)
    operator = KernelOperator(cost, "fast")
    dense = dense_labelled_cost(cost)
    draw = torch.Generator().manual_seed(0)
    g = torch.randn(50, generator=draw).to(DEVICE)
    values = torch.randn(50, 4, generator=draw).to(DEVICE)
    sides = [torch.randn(size, 3, generator=draw).to(DEVICE) for size in (70, 50)]
    f = operator.softmin_rows(g, EPSILON)
    plan = reference.plan(dense, cost.a, cost.b, f, g, EPSILON)
    for weights, options in ((1, {}), (sides[0] @ sides[1].T, {"factors": sides})):
        got = operator.apply_plan(f, g, EPSILON, values, **options).values.double()
        expected = (plan * weights) @ values.double()
        assert float((got - expected).abs().max()) < 2e-5 * float(expected.abs().max())
