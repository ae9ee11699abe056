"""A cost whose points are streamed, against the dense cost and against one that is held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from live_bytes import LiveBytes
from safetensors.torch import save_file

import otdd_flash as otdd
from otdd_flash.operators import blocked, host_points, request
from otdd_flash.operators.base import Operator, refined
from otdd_flash.operators.block_tiles import Tile
from otdd_flash.operators.blocked import BlockedOperator
from otdd_flash.operators.build import ComputeOptions, build_operator
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.request import Request

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
N, M, DIM, CLASSES, EPSILON = 140, 90, 5, 3, 0.7
SYMMETRIC, CROSS = (0, 0), (0, 1)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that divide neither side: 47 + 47 + 46 rows, 45 + 45 columns."""
    monkeypatch.setattr(blocked, "LEAST_POINTS", 64)
    monkeypatch.setattr(request, "UNASKED", 0)


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


def table() -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    means = torch.randn(CLASSES, 2, generator=draw).double()
    return torch.cdist(means, means).square()


def operator(folder: Path | None, backend: str, precision: str, pair: tuple[int, int]) -> Operator:
    budget = "auto" if folder is None else 1000
    compute = ComputeOptions(str(HERE), backend, precision, budget)
    prepared = Request.prepare(sides(folder), GroundCost(), compute)
    return build_operator(prepared.inputs(pair, table().to(HERE)))


def dense(pair: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cost and both masses, float64."""
    given = sides(None)
    x, y = (given[place] for place in pair)
    squares = torch.cdist(x.features.double(), y.features.double()).square()
    assert x.labels is not None
    assert y.labels is not None
    return (squares + table()[x.labels][:, y.labels]) / 2, x.masses, y.masses


BACKENDS = [
    ("torch", "double"),
    ("torch", "high"),
    pytest.param("triton", "fast", marks=pytest.mark.slow),
    pytest.param("triton", "high", marks=pytest.mark.slow),
]
TOLERANCES = {"double": 1e-12, "high": 2e-5, "fast": 2e-2}


@pytest.mark.parametrize(("backend", "precision"), BACKENDS)
@pytest.mark.parametrize("pair", [CROSS, SYMMETRIC])
def test_every_operation_is_that_of_the_dense_cost(
    backend: str, precision: str, pair: tuple[int, int], tmp_path: Path
) -> None:
    found = operator(tmp_path, backend, precision, pair)
    assert isinstance(found, BlockedOperator)
    assert f"in blocks of 47 x {47 if pair == SYMMETRIC else 45}" in found.execution.backend
    cost, a, b = dense(pair)
    draw = torch.Generator().manual_seed(2)
    f, g = (torch.randn(len(masses), generator=draw).double() for masses in (a, b))
    near = {"rtol": TOLERANCES[precision], "atol": TOLERANCES[precision]}
    at = [potential.to(HERE, found.costs.dtype) for potential in (f, g)]
    f, g = (potential.double().cpu() for potential in at)

    def same(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got.double().cpu(), expected, **near)

    same(found.softmin_rows(at[1], EPSILON), reference.softmin_rows(cost, b, g, EPSILON))
    same(found.softmin_columns(at[0], EPSILON), reference.softmin_rows(cost.T, a, f, EPSILON))
    over_columns, some = found.execution.over_columns, torch.arange(5, len(b), 3)
    assert over_columns is not None
    here = some.to(HERE)
    expected = reference.softmin_rows(cost[:, some], b[some], g[some], EPSILON)
    same(over_columns(here, at[1][here], EPSILON), expected)
    plan = a[:, None] * b * ((f[:, None] + g - cost) / EPSILON).exp()
    sums = found.marginals(*at, EPSILON, accurate=True)
    close = {"rtol": 1e-12 if precision == "double" else 2e-6, "atol": 0.0}
    torch.testing.assert_close(sums.rows.cpu(), plan.sum(1), **close)
    torch.testing.assert_close(sums.columns.cpu(), plan.sum(0), **close)
    expected = cost @ b
    torch.testing.assert_close(found.expected_costs(b.to(HERE)).cpu(), expected)
    values, turned = torch.randn(len(b), 2, generator=draw), torch.randn(len(a), 2, generator=draw)
    applied = found.apply_plan(*at, EPSILON, values.to(HERE))
    same(applied.values, plan @ values.double())
    same(applied.masses, plan.sum(1))
    applied = found.apply_plan(*at, EPSILON, turned.to(HERE), transposed=True)
    same(applied.values, plan.T @ turned.double())
    left, right = torch.randn(len(a), 2).double(), torch.randn(len(b), 2).double()
    factors = left.to(HERE), right.to(HERE)
    applied = found.apply_plan(*at, EPSILON, values.to(HERE), factors=factors)
    same(applied.values, (plan * (left @ right.T)) @ values.double())


@pytest.mark.parametrize(
    ("backend", "precision"),
    [("torch", "double"), ("torch", "high"), ("triton", "high")],
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
    prepared = Request.prepare((source, target), GroundCost(), compute)
    found = build_operator(prepared.inputs(CROSS, torch.zeros(1, 1).double().to(HERE)))
    assert isinstance(found, BlockedOperator)
    cost = torch.cdist(points.double(), points[:1].double()).square() / 2
    values = torch.randn(70, 2, generator=draw)
    expected = (weights / 6) @ values.double()
    near = {"rtol": 1e-2 if precision == "high" else 1e-9, "atol": 1e-6}
    # What stands for the logarithm of no mass is rounded up or down.
    for small in (3e-4, 3e-4 * 9 / 7, 3e-4 * 12 / 7, 3e-4 * 13 / 7):
        g = torch.tensor([200 * small]).to(HERE, found.dtype)
        f = (cost[:, 0].to(HERE) - g).to(found.dtype)
        applied = found.apply_plan(f, g, small, values.to(HERE), transposed=True)
        torch.testing.assert_close(applied.values[0].double().cpu(), expected, **near)
        torch.testing.assert_close(applied.masses.cpu(), torch.ones(1).double(), **near)
    softmin = found.softmin_columns(f, small)
    torch.testing.assert_close(softmin.double(), g.double(), rtol=0, atol=1e-5)
    sums = found.marginals(f, g, small)
    torch.testing.assert_close(sums.columns.cpu(), torch.ones(1).double(), **near)


@pytest.mark.parametrize(("backend", "precision"), BACKENDS)
def test_errors_of_sums_hold_and_are_not_much_wider(
    backend: str, precision: str, tmp_path: Path
) -> None:
    streamed, held = (operator(at, backend, precision, CROSS) for at in (tmp_path, None))
    assert refined(streamed).costs.error <= 1.5 * refined(held).costs.error
    assert streamed.costs.lowest == held.costs.lowest
    assert streamed.costs.highest == pytest.approx(held.costs.highest, rel=1e-12)
    assert streamed.costs.mean == pytest.approx(held.costs.mean, rel=1e-12)


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_distance_is_that_of_points_in_memory(backend: str, kind: str, tmp_path: Path) -> None:
    def run(folder: Path | None) -> otdd.DistanceResult:
        budget = "auto" if folder is None else 1000
        compute = ComputeOptions(str(HERE), backend, memory_budget=budget)
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


def test_points_are_not_in_memory_at_once(tmp_path: Path) -> None:
    """A pass over 32 blocks holds a few of them."""
    n, dim = 32 * 64, 512
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(0).normal(size=(n, dim)).astype("float32"))
    samples = otdd.LabeledSamples(otdd.features_file(path), None, ())
    compute = ComputeOptions("cpu", "torch", memory_budget=1000)
    prepared = Request.prepare((samples, samples), GroundCost(), compute)
    found = build_operator(prepared.inputs(CROSS, torch.zeros(1, 1).double()))
    live = LiveBytes()
    with live:
        found.softmin_rows(torch.zeros(n), 1.0)
    # Of either side two that were read, and in other types; scores of a block.
    assert live.highest <= 10 * 64 * dim * 4 + 40 * 8 * n
    assert live.highest < n * dim * 4 / 2


def test_a_budget_says_whether_points_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sides(tmp_path)
    compute = ComputeOptions("cpu", "torch")
    assert Request.prepare(given, GroundCost(), compute).streaming is None
    small = ComputeOptions("cpu", "torch", memory_budget="1KiB")
    streaming = Request.prepare(given, GroundCost(), small).streaming
    assert streaming is not None
    assert streaming.room == 1024
    # What is taken to be there is not asked for.
    monkeypatch.setattr(request, "UNASKED", 1 << 26)
    assert Request.prepare(given, GroundCost(), small).streaming is None
    monkeypatch.setattr(request, "UNASKED", 0)
    # Second derivatives ask for more than operators.
    assert Request.prepare(given, GroundCost(), small, resident=True).streaming is None
    # In memory already, on this device, is where they stay.
    assert Request.prepare(sides(None), GroundCost(), small).streaming is None
    with pytest.raises(otdd.InputError, match="ground=cosine needs all points on the device"):
        Request.prepare(given, GroundCost(ground="cosine"), small)


def test_blocks_by_class_hold_every_point_once() -> None:
    labels = torch.tensor([2, 0, 1, 2, 0, 1, 2])
    blocks = host_points.by_class(labels, 3, 3)
    rows = torch.cat([torch.as_tensor(block.rows) for block in blocks])
    assert torch.equal(rows.sort().values, torch.arange(7))
    assert torch.equal(labels[rows], labels.sort().values)


@pytest.mark.parametrize(("backend", "precision"), BACKENDS)
def test_a_self_term_takes_every_pair_of_blocks_once(
    backend: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = operator(tmp_path, backend, precision, SYMMETRIC)
    cost, a, _ = dense(SYMMETRIC)
    f = torch.randn(N, generator=torch.Generator().manual_seed(2)).to(HERE, found.costs.dtype)
    near = {"rtol": TOLERANCES[precision], "atol": TOLERANCES[precision]}
    taken: list[bool] = []
    tiles = BlockedOperator.tiles

    def counted(self: BlockedOperator, **how: bool) -> Iterator[Tile]:
        for tile in tiles(self, **how):
            taken.append(tile.diagonal)
            yield tile

    monkeypatch.setattr(BlockedOperator, "tiles", counted)
    for _ in range(2):
        expected = reference.softmin_rows(cost, a, f.double().cpu(), EPSILON)
        got = found.softmin_rows(f, EPSILON, f)
        torch.testing.assert_close(got.double().cpu(), expected, **near)
        f = (f + got) / 2
    # Of 47 + 47 + 46 points.
    assert taken == [True, False, False, True, False, True] * 2
    plan = a[:, None] * a * ((f[:, None] + f - cost.to(HERE)) / EPSILON).double().cpu().exp()
    sums = found.marginals(f, f, EPSILON, accurate=True)
    close = {"rtol": 1e-12 if precision == "double" else 2e-6, "atol": 0.0}
    torch.testing.assert_close(sums.rows.cpu(), plan.sum(1), **close)
    assert sums.columns is sums.rows
    assert len(taken) == 18


@pytest.mark.slow
def test_a_potential_far_from_its_softmin_is_done_with_a_maximum(tmp_path: Path) -> None:
    found = operator(tmp_path, "triton", "high", SYMMETRIC)
    cost, a, _ = dense(SYMMETRIC)
    f = torch.randn(N, generator=torch.Generator().manual_seed(2)) * 100
    expected = reference.softmin_rows(cost, a, f.double(), EPSILON)
    got = found.softmin_rows(near := f.to(HERE), EPSILON, near)
    torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("distance", [0.0, 3.0, 1e4], ids=["exact", "near", "far"])
@pytest.mark.parametrize("precision", ["fast", "high"])
def test_a_guess_changes_nothing_but_the_way(
    distance: float, precision: str, tmp_path: Path
) -> None:
    """Of blocks that are far from all others, sums beside a guess are 0."""
    found = operator(tmp_path, "triton", precision, CROSS)
    draw = torch.Generator().manual_seed(3)
    epsilon = 0.02
    for softmin, own, other in (
        (found.softmin_rows, N, M),
        (found.softmin_columns, M, N),
    ):
        potential = torch.randn(other, generator=draw).to(HERE)
        expected = softmin(potential, epsilon)
        guess = expected + distance * epsilon * torch.randn(own, generator=draw).to(HERE)
        got = softmin(potential, epsilon, guess)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
