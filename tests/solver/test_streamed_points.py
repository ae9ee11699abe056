"""What is asked of plans between points that stream: the dense formulas, and results as held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
import torch
from live_bytes import LiveBytes
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.operators import blocked, host_points, request
from otdd_flash.operators.blocked import BlockedOperator
from otdd_flash.operators.ground import GroundCost
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.term.result import TransportTerm
from otdd_flash.solver.term_gradient import Needs, cross_gradient, self_gradient

HELD = otdd.ComputeOptions("cpu", precision="double")
STREAMED = replace(HELD, memory_budget=1)
EPSILON = 2.0
ALL: Needs = frozenset({"x", "y", "a", "b", "classes", "lambda_x", "lambda_y"})


class Point(NamedTuple):
    """All inputs of a divergence, float64."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    table: Tensor
    labels_x: Tensor
    labels_y: Tensor
    lambda_x: Tensor
    lambda_y: Tensor

    def cost(self) -> Tensor:
        first = int(self.labels_x.max()) + 1
        block = self.lambda_y * self.table[:first, first:]
        squares = (self.x[:, None, :] - self.y[None, :, :]).square().sum(2)
        return self.lambda_x * squares + block[self.labels_x][:, self.labels_y]

    def problem(self) -> Problem:
        sides = (
            otdd.LabeledSamples(x, labels, tuple(map(str, range(int(labels.max()) + 1))), masses)
            for x, labels, masses in (
                (self.x, self.labels_x, self.a),
                (self.y, self.labels_y, self.b),
            )
        )
        weights = GroundCost(float(self.lambda_x), float(self.lambda_y))
        return Problem.between(*sides, EPSILON, self.table, weights, HELD)


def point_of(lambda_y: float = 0.4) -> Point:
    """Of 13 and 9 points in three dimensions, of three classes and of two."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 3, generator=draw).double() for n in (13, 9))
    a, b = (torch.rand(n, generator=draw).double() + 0.2 for n in (13, 9))
    table = torch.rand(5, 5, generator=draw).double()
    weights = (torch.tensor(weight, dtype=torch.float64) for weight in (0.6, lambda_y))
    labels = torch.arange(13) % 3, torch.arange(9) % 2
    return Point(x, y + 0.5, a / a.sum(), b / b.sum(), table + table.T, *labels, *weights)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "LEAST_POINTS", 8)
    monkeypatch.setattr(request, "UNASKED", 0)
    monkeypatch.setattr("otdd_flash.solver.plan_blocks.STREAMED_ROWS", 5)


def in_files(folder: Path, *sides: otdd.LabeledSamples) -> list[otdd.LabeledSamples]:
    """The same with features in files."""
    found = []
    for place, side in enumerate(sides):
        path = folder / f"{place}.npy"
        np.save(path, side.features.numpy())
        found.append(replace(side, features=otdd.features_file(path)))
    return found


def streamed(folder: Path, problem: Problem) -> Problem:
    """The same problem with points in files."""
    sides = in_files(folder, *problem.request.given)
    found = Problem.between(*sides, EPSILON, problem.table, problem.request.cost, STREAMED)
    assert isinstance(found.operator("xy"), BlockedOperator)
    return found


def term_at(f: Tensor, g: Tensor) -> TransportTerm:
    proof: dict[str, Any] = {"converged": False, "stopped_by": "max_iterations"}
    return TransportTerm(f, g, EPSILON, 0.0, (0.0, 0.0), 1.0, 1e-3, 1, 1, **proof)


def dense_gradient(point: Point, f: Tensor, g: Tensor) -> dict[str, Tensor]:
    """The formulas of `solver.gradient` of a dense plan, where all masses are positive."""
    cost, a, b = point.cost(), point.a, point.b
    plan = reference.plan(cost, a, b, f, g, EPSILON)
    r, c = plan.sum(1), plan.sum(0)
    squares = torch.cdist(point.x, point.y).square()
    first, second = (int(labels.max()) + 1 for labels in (point.labels_x, point.labels_y))
    block = point.table[:first, first:]
    coupling = torch.zeros(first, second, dtype=torch.float64)
    places = point.labels_x[:, None].expand(plan.shape), point.labels_y.expand(plan.shape)
    coupling.index_put_(places, plan, accumulate=True)
    return {
        "x": 2 * point.lambda_x * (r[:, None] * point.x - plan @ point.y),
        "y": 2 * point.lambda_x * (c[:, None] * point.y - plan.T @ point.x),
        "a": f - EPSILON * (r / a - 1),
        "b": g - EPSILON * (c / b - 1),
        "classes": point.lambda_y * coupling,
        "lambda_x": (plan * squares).sum(),
        "lambda_y": (coupling * block).sum(),
    }


@pytest.mark.parametrize("lambda_y", [0.4, 0.0])
def test_gradients_are_those_of_the_dense_plan(lambda_y: float, tmp_path: Path) -> None:
    point = point_of(lambda_y)
    draw = torch.Generator().manual_seed(1)
    f, g = (torch.randn(len(side), generator=draw).double() for side in (point.a, point.b))
    problem = streamed(tmp_path, point.problem())
    term = term_at(f, g)
    found = cross_gradient(problem.operator("xy"), term, problem.inputs("xy"), ALL)
    for key, expected in dense_gradient(point, f, g).items():
        torch.testing.assert_close(found[key], expected, rtol=1e-11, atol=1e-11)
    # One input at a time takes other ways to the same numbers.
    for key in ALL:
        alone = cross_gradient(problem.operator("xy"), term, problem.inputs("xy"), frozenset({key}))
        torch.testing.assert_close(alone[key], found[key], rtol=1e-12, atol=1e-12)


def test_self_gradients_are_those_of_held_points(tmp_path: Path) -> None:
    point = point_of()
    f = torch.randn(len(point.a), generator=torch.Generator().manual_seed(1)).double()
    held = point.problem()
    needs = ALL - {"y", "b"}
    one, other = (
        self_gradient(problem.operator("xx"), term_at(f, f), problem.inputs("xx"), needs)
        for problem in (streamed(tmp_path, held), held)
    )
    for key in needs:
        # Those of masses are the same up to a constant.
        first, second = (
            each - each.mean() if key == "a" else each for each in (one[key], other[key])
        )
        torch.testing.assert_close(first, second, rtol=1e-11, atol=1e-11)


def datasets() -> list[otdd.LabeledSamples]:
    draw = torch.Generator().manual_seed(0)
    sides = []
    for name, size, classes in (("one", 23, 3), ("two", 19, 4), ("three", 17, 2)):
        labels = torch.arange(size) % classes
        points = torch.randn(size, 3, generator=draw).double() + labels[:, None]
        weights = torch.rand(size, generator=draw)
        weights[::7] = 0
        names = tuple("abcd"[:classes])
        sides.append(otdd.LabeledSamples(points, labels, names, weights, name=name))
    return sides


def both_ways(work: Callable[..., Any], folder: Path, count: int = 2) -> tuple[Any, Any]:
    """What it returns of points in files that stream, and of points in memory."""
    held = datasets()[:count]
    return work(in_files(folder, *held), STREAMED), work(held, HELD)


def test_maps_and_contributions_are_those_of_held_points(tmp_path: Path) -> None:
    def work(sides: Any, compute: otdd.ComputeOptions) -> list[Tensor]:
        found = otdd.dataset_distance(*sides, epsilon=2.0, compute=compute)
        assert (found.streamed is None) == (compute is HELD)
        values = found.contributions()
        assert values.through_classes
        return [found.barycentric_map(), values.values, found.class_coupling()]

    one, other = both_ways(work, tmp_path)
    for found, expected in zip(one, other, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "minibatch"), [("features", None), ("attached", 16)])
def test_flows_are_those_of_held_points(mode: str, minibatch: int | None, tmp_path: Path) -> None:
    def work(sides: Any, compute: otdd.ComputeOptions) -> otdd.FlowResult:
        stepping = otdd.Stepping(0.5, minibatch=minibatch)
        moves = otdd.Flow(2, mode=mode, stepping=stepping)
        # Particles are in memory, as the flow moves them.
        particles = datasets()[0]
        solver = otdd.Converged(tolerance=1e-7)
        return otdd.gradient_flow(
            particles, sides[1], moves, epsilon=0.5, solver=solver, compute=compute
        )

    one, other = both_ways(work, tmp_path)
    assert "points streamed in blocks" in one.ran_on
    # Flows of Gaussians hold their target.
    joint = otdd.Flow(1, mode="joint")
    target = in_files(tmp_path, *datasets()[:2])[1]
    held = otdd.gradient_flow(datasets()[0], target, joint, epsilon=0.5, compute=STREAMED)
    assert "streamed in blocks" not in held.ran_on
    assert "streamed in blocks" not in other.ran_on
    assert one.after.divergence == pytest.approx(other.after.divergence, rel=1e-6)
    moved = (other.samples.features - datasets()[0].features).abs().max()
    torch.testing.assert_close(
        one.samples.features, other.samples.features, rtol=0, atol=float(moved) * 1e-4
    )


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("pairs_fit", [True, False])
def test_pairwise_distances_are_those_of_held_points(
    pairs_fit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, held = in_files(tmp_path, *datasets()), datasets()
    settings: dict[str, Any] = {"epsilon": 2.0}
    other = otdd.pairwise_distances(held, compute=HELD, **settings)
    asked: list[tuple[int, bool]] = []
    streaming = request._streaming

    def noted(sides: Any, *args: Any) -> host_points.Streaming | None:
        found = streaming(sides, *args)
        if pairs_fit and len(set(sides)) < 3:
            # As on a GPU that holds two of the three datasets.
            found = None
        asked.append((len(set(sides)), found is not None))
        return found

    monkeypatch.setattr(request, "_streaming", noted)
    one = otdd.pairwise_distances(files, compute=STREAMED, **settings)
    assert asked[0] == (3, True)
    assert set(asked[1:]) == {(1, not pairs_fit), (2, not pairs_fit)}
    torch.testing.assert_close(one.values, other.values, rtol=1e-5, atol=1e-7)
    assert ((one.lower <= other.upper) & (other.lower <= one.upper)).all()
    assert ("streamed" in one.to_dict()) == (not pairs_fit)
    assert "streamed" not in other.to_dict()


def test_a_loss_streams_its_points_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of tensors in host memory and a GPU that does not hold them."""
    streaming = host_points.Streaming(torch.device("cpu"), 1)
    sides = datasets()[:2]

    def loss(compute: otdd.ComputeOptions) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (side.features.clone().requires_grad_() for side in sides)
        return otdd.sinkhorn_loss(x, y, epsilon=2.0, compute=compute), x, y

    value, x, y = loss(HELD)
    expected = torch.autograd.grad(value, (x, y))
    monkeypatch.setattr(request, "_streaming", lambda *_: streaming)
    found, x, y = loss(HELD)
    assert streaming.tally.moved > 0
    assert float(found.detach()) == pytest.approx(float(value.detach()), rel=1e-5)
    by_x, by_y = torch.autograd.grad(found, (x, y), create_graph=True)
    torch.testing.assert_close(by_x.detach(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(by_y.detach(), expected[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(otdd.InputError, match="second derivatives need all points on the device"):
        by_x.sum().backward()


@pytest.mark.slow
def test_gradients_hold_no_points_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 32 blocks takes what a few blocks take, but for the gradient itself."""
    n, dim = 32 * 64, 256
    monkeypatch.setattr(blocked, "LEAST_POINTS", 64)
    monkeypatch.setattr("otdd_flash.solver.plan_blocks.STREAMED_ROWS", 64)
    points = np.random.default_rng(0).normal(size=(n, dim)).astype("float32")
    np.save(tmp_path / "x.npy", points)
    samples = otdd.LabeledSamples(otdd.features_file(tmp_path / "x.npy"), None, ())
    compute = otdd.ComputeOptions("cpu", "torch", memory_budget=1)
    problem = Problem.between(samples, replace(samples, name="y"), 1.0, compute=compute)
    term = replace(term_at(torch.zeros(n), torch.zeros(n)), epsilon=100.0)
    operator, inputs = problem.operator("xy"), problem.inputs("xy")
    live = LiveBytes()
    with live:
        cross_gradient(operator, term, inputs, frozenset({"x", "lambda_x"}))
    whole = points.nbytes
    assert whole <= live.highest <= whole + 20 * 64 * dim * 8 + 40 * 8 * n
