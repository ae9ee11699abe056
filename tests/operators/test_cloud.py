"""What a cloud tells of itself: found once for all its costs, and anew where it has changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from other_device import OTHER, OtherDevice
from torch import Tensor

from otdd_flash.operators import cloud as cloud_module
from otdd_flash.operators import request as request_module
from otdd_flash.operators.build import ComputeOptions, CostInputs, cloud_of
from otdd_flash.operators.cloud import Cloud
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.request import Request
from otdd_flash.samples import LabeledSamples

COUNT, DIM = 30, 4


def samples(seed: int, *, weighted: bool = False) -> LabeledSamples:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(COUNT, DIM, generator=draw) + 3
    weights = torch.rand(COUNT, generator=draw).double() if weighted else None
    if weights is not None:
        weights[::5] = 0
    return LabeledSamples(features, torch.arange(COUNT) % 3, ("a", "b", "c"), weights)


def cost_of(x: LabeledSamples, y: LabeledSamples) -> LabelledCost:
    table = torch.arange(9.0).view(3, 3)
    return CostInputs(x, y, table, GroundCost(), ComputeOptions("cpu")).labelled


def mean_cost(x: LabeledSamples, y: LabeledSamples) -> float:
    """Of all entries."""
    assert x.labels is not None
    assert y.labels is not None
    table = torch.arange(9.0, dtype=torch.float64).view(3, 3)[x.labels][:, y.labels]
    costs = torch.cdist(x.features.double(), y.features.double()).square() + table
    return float(x.masses @ costs @ y.masses) / 2


@pytest.mark.parametrize("weighted", [False, True])
def test_two_costs_of_a_cloud_ask_once_where_it_lies(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, asked, extent = samples(0, weighted=weighted), samples(1), [], cloud_module.extent

    def counted(points: Any, masses: Tensor) -> Any:
        asked.append(points)
        return extent(points, masses)

    monkeypatch.setattr(cloud_module, "extent", counted)
    for one, other in ((x, y), (x, x), (y, y), (x, y)):
        assert cost_of(one, other).mean_cost == pytest.approx(mean_cost(one, other), rel=1e-12)
    assert [points.data_ptr() for points in asked] == [x.features.data_ptr(), y.features.data_ptr()]


def by_torch(of: LabeledSamples) -> None:
    of.features[3] += 1


def by_numpy(of: LabeledSamples) -> None:
    array: np.ndarray[Any, Any] = of.features.numpy()
    array[3] += 1


def of_labels(of: LabeledSamples) -> None:
    assert of.labels is not None
    of.labels[3] = 2


def of_weights(of: LabeledSamples) -> None:
    assert of.weights is not None
    of.weights[:2] = of.weights[:2].flip(0)


@pytest.mark.parametrize("change", [by_torch, by_numpy, of_labels, of_weights])
def test_a_cloud_that_was_changed_in_place_is_asked_again(
    change: Callable[[LabeledSamples], None],
) -> None:
    x, y = samples(0, weighted=True), samples(1)
    before = cost_of(x, y).mean_cost
    change(x)
    expected = mean_cost(x, y)
    assert abs(expected / before - 1) > 1e-6
    assert cost_of(x, y).mean_cost == pytest.approx(expected, rel=1e-12)


def test_a_call_sees_what_a_gpu_has_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused optimisers and replayed graphs change points of which no count says so."""
    monkeypatch.setattr(request_module, "resolve_device", lambda _: OTHER)
    options = GroundCost(), ComputeOptions("cpu", "torch")
    drawn = samples(0), samples(1)
    with OtherDevice():
        x, y = (
            LabeledSamples(of.features.to(OTHER), torch.arange(COUNT) % 3, of.class_names)
            for of in drawn
        )

        def asked() -> float:
            table = torch.zeros((3, 3), dtype=torch.float64).to(OTHER)
            request = Request.prepare((x, y), *options)
            costs = [request.inputs((0, 1), table).labelled for _ in range(2)]
            assert costs[0].clouds[0] is costs[1].clouds[0]
            return costs[0].largest

        assert asked() == cost_of(*drawn).largest
        held: Any = x.features
        version = held._version
        for there in (held.held, drawn[0].features):
            there.mul_(2)
        assert held._version == version
        assert asked() == cost_of(*drawn).largest


def test_a_cloud_goes_with_its_samples() -> None:
    x = samples(0)
    kept = weakref.ref(cloud_of(x, None))
    assert cloud_of(x, None) is kept()
    # Equal samples are others.
    assert cloud_of(samples(0), None) is not kept()
    del x
    assert kept() is None


@pytest.mark.parametrize("equal", [False, True])
def test_points_without_mass_are_not_on_the_support(equal: bool) -> None:
    points = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    points[0] += 9
    masses = torch.full((6,), 1 / 6, dtype=torch.float64)
    if not equal:
        masses = torch.tensor([0.0, 0.2, 0.2, 0.2, 0.2, 0.2], dtype=torch.float64)
    centre = torch.ones(3, dtype=torch.float64)
    found = Cloud(points, masses, torch.zeros(6, dtype=torch.int64), equal=equal).distances(centre)
    squares = (points.double() - centre).square().sum(1)
    torch.testing.assert_close(found.squares, squares)
    on_support = squares if equal else squares[1:]
    expected = squares.max(), on_support.max(), masses @ squares
    torch.testing.assert_close(torch.stack(found.numbers), torch.stack(expected))


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_the_largest_coordinate_is_that_of_all_points(shift: float) -> None:
    """To the last digit, as no point is asked for it."""
    x, y = samples(0), samples(1)
    x.features.add_(shift)
    cost = cost_of(x, y)
    centred = torch.cat((x.features, y.features)).double() - cost.centre
    assert cost.largest == float(centred.abs().max())


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("rows", [slice(4, 7), slice(2, 2), torch.tensor([1, 0])], ids=str)
def test_shares_of_masses_add_up_to_one(equal: bool, rows: Any) -> None:
    masses = torch.full((10,), 0.1, dtype=torch.float64)
    if not equal:
        masses = torch.arange(10).double() / 45
    points, labels = torch.zeros(10, 1), torch.zeros(10, dtype=torch.int64)
    cloud = Cloud(points, masses, labels, equal=equal)
    share, mass = cloud.share(rows, "mine")
    torch.testing.assert_close(mass * share, masses[rows], rtol=1e-15, atol=0)
    if len(share) > 0:
        assert float(share.sum()) == pytest.approx(1, rel=1e-15)
    assert cloud.share(rows, "mine")[0] is share
