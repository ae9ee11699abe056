"""A cost whose points are streamed: in which blocks, how often they are read, what is held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from live_bytes import LiveBytes
from safetensors.torch import save_file

import otdd_flash as otdd
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.operators import blocked, comparison
from otdd_flash.operators.blocked import BlockedOperator
from otdd_flash.operators.comparison import Comparison

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
N, M, DIM, CLASSES, EPSILON = 140, 90, 5, 3, 0.7
SYMMETRIC, CROSS = (0, 0), (0, 1)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that divide neither side: 47 + 47 + 46 rows, 45 + 45 columns."""
    monkeypatch.setattr(blocked, "LEAST_POINTS", 64)
    monkeypatch.setattr(comparison, "ASSUMED_FREE", 0)


def sides(folder: Path | None, kind: str = "npy") -> tuple[otdd.LabeledSamples, ...]:
    """Two clouds, some of their masses 0, in files or in memory."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for name, count in (("x", N), ("y", M)):
        points: torch.Tensor = torch.randn(count, DIM, generator=draw)
        labels = torch.randint(0, CLASSES, (count,), generator=draw)
        weights = torch.rand(count, generator=draw)
        weights[:3] = 0
        if folder is not None:
            path = folder / f"{name}.{kind}"
            if kind == "npy":
                np.save(path, points.numpy())
            else:
                save_file({"points": points}, path)
            points = otdd.features_file(path)
        made.append(otdd.LabeledSamples(points, labels, ("a", "b", "c"), weights, name=name))
    return tuple(made)


@pytest.mark.parametrize(
    ("backend", "precision"),
    [("torch", "double"), pytest.param("triton", "high", marks=pytest.mark.slow)],
)
def test_a_block_without_mass_adds_nothing(backend: str, precision: str, tmp_path: Path) -> None:
    """The first block of rows, far below the others' potentials."""
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(70, DIM, generator=draw)
    np.save(tmp_path / "x.npy", points.numpy())
    weights = (torch.arange(70) >= 64).double()
    source = otdd.LabeledSamples(otdd.features_file(tmp_path / "x.npy"), None, (), weights)
    np.save(tmp_path / "y.npy", points[:1].numpy())
    target = otdd.LabeledSamples(otdd.features_file(tmp_path / "y.npy"), None, ())
    compute = ComputeOptions(str(HERE), backend, precision, memory_budget=1)
    prepared = Comparison.prepare((source, target), GroundCost(), compute)
    found = prepared.operator("xy")
    assert isinstance(found, BlockedOperator)
    cost = torch.cdist(points.double(), points[:1].double()).square() / 2
    values = torch.randn(70, 2, generator=draw)
    expected = (weights / 6) @ values.double()
    near = {"rtol": 1e-2 if precision == "high" else 1e-9, "atol": 1e-6}
    # What stands for the logarithm of no mass is rounded up or down.
    for small in (3e-4, 3e-4 * 9 / 7):
        g = torch.tensor([200 * small]).to(HERE, found.dtype)
        f = (cost[:, 0].to(HERE) - g).to(found.dtype)
        applied = found.plan(f, g, small).applied(values.to(HERE), transposed=True)
        torch.testing.assert_close(applied.values[0].double().cpu(), expected, **near)
        torch.testing.assert_close(applied.masses.cpu(), torch.ones(1).double(), **near)
    softmin = found.softmin_columns(f, small)
    torch.testing.assert_close(softmin.double(), g.double(), rtol=0, atol=1e-5)
    sums = found.marginals(f, g, small)
    torch.testing.assert_close(sums.columns.cpu(), torch.ones(1).double(), **near)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "npy"])
def test_a_distance_is_that_of_points_in_memory(kind: str, tmp_path: Path) -> None:
    def run(folder: Path | None) -> otdd.DistanceResult:
        budget = "auto" if folder is None else 1000
        compute = ComputeOptions(str(HERE), memory_budget=budget)
        given = sides(folder, kind)
        return otdd.dataset_distance(*given, epsilon_relative=0.3, compute=compute)

    streamed, held = run(tmp_path), run(None)
    assert "streamed in blocks" in streamed.divergence.backend
    assert "streamed in blocks" not in held.divergence.backend
    assert streamed.converged
    read = streamed.streamed
    assert read is not None
    # Three terms, of which each reads both sides more than once.
    assert read["bytes"] > 6 * 4 * DIM * (N + M)
    assert read["bytes_per_second"] > 0
    assert held.streamed is None
    assert streamed.value == pytest.approx(held.value, rel=1e-5)
    (low, high), (lower, upper) = streamed.bounds, held.bounds
    assert max(low, lower) <= min(high, upper)
    assert high - low <= 1.5 * (upper - lower)
    # On a GPU the solve that holds its points is another one, which stops elsewhere.
    off = sum(one.divergence.xy.marginal_error for one in (streamed, held))
    apart = streamed.class_coupling() - held.class_coupling()
    assert apart.abs().sum() <= off


@pytest.mark.slow
def test_points_are_not_in_memory_at_once(tmp_path: Path) -> None:
    """A pass over 32 blocks holds a few of them."""
    n, dim = 32 * 64, 512
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(0).normal(size=(n, dim)).astype("float32"))
    np.save(tmp_path / "y.npy", np.zeros((64, dim), "float32"))
    sides = [
        otdd.LabeledSamples(otdd.features_file(each), None, ())
        for each in (path, tmp_path / "y.npy")
    ]
    compute = ComputeOptions("cpu", "torch", memory_budget=1000)
    prepared = Comparison.prepare(sides, GroundCost(), compute)
    found = prepared.operator("xy")
    live = LiveBytes()
    with live:
        found.softmin_columns(torch.zeros(n), 1.0)
    # Of either side two that were read, and in other types; scores of a block.
    assert live.highest <= 10 * 64 * dim * 4 + 40 * 8 * n
    assert live.highest < n * dim * 4 / 2


def test_the_largest_of_several_costs_says_whether_points_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sides(tmp_path)
    monkeypatch.setattr(comparison, "ASSUMED_FREE", 0)
    monkeypatch.setattr(comparison, "cost_size", lambda x, y: (len(x), len(y)))
    monkeypatch.setattr(comparison, "operator_bytes", lambda size, *_: size[0] * size[1])
    needed = max(N, M) ** 2
    for budget, streams in ((needed - 1, True), (needed, False)):
        compute = ComputeOptions("cpu", "torch", memory_budget=budget)
        for pairs in ([(0, 0), (0, 1), (1, 1)], [(1, 1), (0, 0)]):
            found = comparison._streaming(given, pairs, compute, torch.device("cpu"))
            assert (found is not None) == streams


def test_a_budget_says_whether_points_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sides(tmp_path)
    compute = ComputeOptions("cpu", "torch")
    assert Comparison.prepare(given, GroundCost(), compute).streaming is None
    small = ComputeOptions("cpu", "torch", memory_budget="1KiB")
    streaming = Comparison.prepare(given, GroundCost(), small).streaming
    assert streaming is not None
    assert streaming.room == 1024
    # What is taken to be there is not asked for.
    monkeypatch.setattr(comparison, "ASSUMED_FREE", 1 << 26)
    assert Comparison.prepare(given, GroundCost(), small).streaming is None
    monkeypatch.setattr(comparison, "ASSUMED_FREE", 0)
    # Second derivatives ask for more than operators.
    assert Comparison.prepare(given, GroundCost(), small, resident=True).streaming is None
    # In memory already, on this device, is where they stay.
    assert Comparison.prepare(sides(None), GroundCost(), small).streaming is None
    with pytest.raises(otdd.InputError, match="ground=cosine needs all points on the device"):
        Comparison.prepare(given, GroundCost(ground="cosine"), small)
