"""What is asked of plans between points that stream is what points in memory have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_bytes import LiveBytes
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.cost import host_points
from otdd_flash.derivatives.gradient import cross_gradient
from otdd_flash.operators import blocked, comparison
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.term import TransportTerm

HELD = otdd.ComputeOptions("cpu", precision="double")
STREAMED = replace(HELD, memory_budget=1)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "LEAST_POINTS", 8)
    monkeypatch.setattr(comparison, "ASSUMED_FREE", 0)
    monkeypatch.setattr("otdd_flash.derivatives.centred.STREAMED_ROWS", 5)


def in_files(folder: Path, *sides: otdd.LabeledSamples) -> list[otdd.LabeledSamples]:
    """The same with features in files."""
    found = []
    for place, side in enumerate(sides):
        path = folder / f"{place}.npy"
        np.save(path, side.features.numpy())
        found.append(replace(side, features=otdd.features_file(path)))
    return found


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


@pytest.mark.slow
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
    streaming = comparison._streaming

    def noted(sides: Any, *args: Any) -> host_points.Streaming | None:
        found = streaming(sides, *args)
        if pairs_fit and len(set(sides)) < 3:
            # As on a GPU that holds two of the three datasets.
            found = None
        asked.append((len(set(sides)), found is not None))
        return found

    monkeypatch.setattr(comparison, "_streaming", noted)
    one = otdd.pairwise_distances(files, compute=STREAMED, **settings)
    assert asked[0] == (3, True)
    assert set(asked[1:]) == {(1, not pairs_fit), (2, not pairs_fit)}
    torch.testing.assert_close(one.values, other.values, rtol=1e-5, atol=1e-7)
    assert ((one.lower <= other.upper) & (other.lower <= one.upper)).all()
    assert ("streamed" in one.to_dict()) == (not pairs_fit)
    assert "streamed" not in other.to_dict()


@pytest.mark.slow
def test_a_loss_streams_its_points_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of tensors in host memory and a GPU that does not hold them; by whatever it has."""
    streaming = host_points.Streaming(torch.device("cpu"), 1)
    source, target = datasets()[:2]
    draw = torch.Generator().manual_seed(1)
    table = torch.rand(7, 7, generator=draw).double()
    given = {"x": source.features, "y": target.features, "a": source.masses, "b": target.masses}
    given |= {"class_table": table + table.T, "lambda_x": torch.tensor(0.6).double()}
    given |= {"lambda_y": torch.tensor(0.4).double()}
    fixed = {"labels_x": source.labels, "labels_y": target.labels, "epsilon": 2.0}
    fixed |= {"options": otdd.Converged(1e-4)}

    def solved() -> tuple[Tensor, list[Tensor]]:
        leaves = {name: part.clone().requires_grad_() for name, part in given.items()}
        return otdd.sinkhorn_loss(**leaves, **fixed), list(leaves.values())

    value, leaves = solved()
    expected = torch.autograd.grad(value, leaves)
    monkeypatch.setattr(comparison, "_streaming", lambda *_: streaming)
    found, leaves = solved()
    assert streaming.tally.moved > 0
    torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-9)
    gradients = torch.autograd.grad(found, leaves)
    for name, one, other in zip(given, gradients, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-7 * (1 + float(other.abs().max())), name
    # One input at a time takes other ways to the same numbers.
    for name, gradient in zip(given, gradients, strict=True):
        if name in ("x", "class_table"):
            leaf = given[name].clone().requires_grad_()
            loss = otdd.sinkhorn_loss(**given | {name: leaf}, **fixed)
            (alone,) = torch.autograd.grad(loss, leaf, create_graph=name == "x")
            torch.testing.assert_close(alone.detach(), gradient, rtol=1e-9, atol=1e-9)
            if name == "x":
                second = "second derivatives need all points on the device"
                with pytest.raises(otdd.InputError, match=second):
                    alone.sum().backward()


@pytest.mark.slow
def test_gradients_hold_no_points_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 32 blocks takes what a few blocks take, but for the gradient itself."""
    n, dim = 32 * 64, 256
    monkeypatch.setattr(blocked, "LEAST_POINTS", 64)
    monkeypatch.setattr("otdd_flash.derivatives.centred.STREAMED_ROWS", 64)
    points = np.random.default_rng(0).normal(size=(n, dim)).astype("float32")
    np.save(tmp_path / "x.npy", points)
    samples = otdd.LabeledSamples(otdd.features_file(tmp_path / "x.npy"), None, ())
    compute = otdd.ComputeOptions("cpu", "torch", memory_budget=1)
    given = Comparison.between(samples, replace(samples, name="y"), 1.0, compute=compute)
    proof: dict[str, Any] = {"converged": False, "stopped_by": "max_iterations"}
    zero = torch.zeros(n)
    term = TransportTerm(zero, zero, 100.0, 0.0, (0.0, 0.0), 1.0, 1e-3, 1, 1, **proof)
    operator = given.operator("xy")
    live = LiveBytes()
    with live:
        cross_gradient(operator, term, given, frozenset({"x", "lambda_x"}))
    whole = points.nbytes
    assert whole <= live.highest <= whole + 20 * 64 * dim * 8 + 40 * 8 * n
