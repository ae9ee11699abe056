"""Packed blocks in host memory: what is read again, what comes back, and that nothing changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch

import otdd_flash as otdd
from otdd_flash.kernels.passes import plan_marginals
from otdd_flash.operators import blocked, kernel, lattice, packed_blocks, request
from otdd_flash.operators.base import refined
from otdd_flash.operators.blocked import BlockedOperator
from otdd_flash.operators.build import ComputeOptions, build_operator
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.host_points import Tally
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.labelled_cost import LabelledCost, on_host
from otdd_flash.operators.lattice import lattice_of
from otdd_flash.operators.packed_blocks import Slabs
from otdd_flash.operators.request import Request

N, M, DIM, EPSILON = 140, 90, 5, 0.7
CROSS, SYMMETRIC = (0, 1), (0, 0)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 and fewer, and slabs that end within them."""
    monkeypatch.setattr(blocked, "LEAST_POINTS", 64)
    monkeypatch.setattr(request, "UNASKED", 0)
    monkeypatch.setattr(packed_blocks, "SLAB_BYTES", 1000)


def operator(
    tmp_path: Path, pair: tuple[int, int], room: int, on_device: int = 1
) -> tuple[BlockedOperator, Tally]:
    """As beside a GPU with so much memory for points, and host memory for their blocks."""
    draw = torch.Generator().manual_seed(0)
    sides = []
    (folder := tmp_path / str(room)).mkdir()
    for name, count in (("x", N), ("y", M)):
        path = folder / f"{name}.npy"
        np.save(path, torch.randn(count, DIM, generator=draw).numpy())
        labels = torch.randint(0, 3, (count,), generator=draw)
        sides.append(otdd.LabeledSamples(otdd.features_file(path), labels, ("a", "b", "c")))
    compute = ComputeOptions("cpu", "triton", memory_budget=1)
    prepared = Request.prepare(sides, GroundCost(), compute)
    assert prepared.streaming is not None
    streaming = replace(prepared.streaming, host_room=room, room=on_device)
    prepared = replace(prepared, streaming=streaming)
    table = (1 - torch.eye(3)).double()
    found = build_operator(prepared.inputs(pair, table))
    assert isinstance(found, BlockedOperator)
    assert prepared.streaming is not None
    return found, prepared.streaming.tally


@pytest.mark.slow
@pytest.mark.parametrize("pair", [CROSS, SYMMETRIC])
def test_later_passes_read_nothing(pair: tuple[int, int], tmp_path: Path) -> None:
    without, _ = operator(tmp_path, pair, 0)
    found, tally = operator(tmp_path, pair, 1 << 20)
    g = torch.randn(found.shape[1], generator=torch.Generator().manual_seed(1))
    near = g if pair == SYMMETRIC else None
    expected = without.softmin_rows(g, EPSILON, near)
    reads = []
    for _ in range(3):
        before = tally.moved, tally.copied
        assert torch.equal(found.softmin_rows(g, EPSILON, near), expected)
        reads.append((tally.moved - before[0], tally.copied - before[1]))
    # Once each, but for the block of a cloud with itself that is on its way when it is packed.
    assert reads[0][0] >= 4 * DIM * (N + (0 if pair == SYMMETRIC else M))
    assert [moved for moved, _ in reads[1:]] == [0, 0]
    # Float16 of rows padded to a multiple of 8 coordinates: one part, for either side of a tile.
    assert reads[1] == reads[2]
    assert tally.held >= 2 * 2 * 8 * (N + (0 if pair == SYMMETRIC else M))
    exact, plain = refined(found), refined(without)
    before = tally.moved, tally.copied
    assert torch.equal(exact.softmin_rows(g, EPSILON), plain.softmin_rows(g, EPSILON))
    assert tally.moved - before[0] <= 2 * 4 * DIM
    first = tally.copied
    found.softmin_rows(g, EPSILON)
    one = tally.copied - first
    exact.softmin_rows(g, EPSILON)
    assert tally.copied - first == one + 2 * one > 0
    # Sums are those of the points themselves, which are read for them.
    before = tally.moved, tally.copied
    sums = found.marginals(g.new_zeros(found.shape[0]), g, EPSILON)
    assert tally.moved > before[0]
    assert tally.copied == before[1]
    assert torch.equal(sums.rows, without.marginals(g.new_zeros(N), g, EPSILON).rows)


def floats(points: int) -> int:
    """Bytes of so many points."""
    return 4 * DIM * points


@pytest.mark.slow
def test_rows_of_one_block_stay_and_points_are_read_as_often_as_they_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One block of 140 rows, two of 45 columns.
    found, tally = operator(tmp_path, CROSS, 1 << 20, on_device=DIM * (8 * N + 16 * 60))
    assert "in blocks of 140 x 45" in found.execution.backend
    draw = torch.Generator().manual_seed(1)
    f, g = torch.randn(N, generator=draw), torch.randn(M, generator=draw)

    def moved(work: Callable[[], object]) -> tuple[int, int]:
        before = tally.moved, tally.copied
        work()
        return tally.moved - before[0], tally.copied - before[1]

    # Errors of costs ask each point once, and packing comes along.
    assert moved(lambda: found.costs)[0] == floats(N + M)
    packed = 2 * 8 * sum(len(held.without.layout.origin) for held in columns_held(found))
    for softmin in (
        lambda: found.softmin_rows(g, EPSILON),
        lambda: found.softmin_columns(f, EPSILON, g),
    ):
        assert moved(softmin) == (0, packed)
    assert moved(lambda: refined(found).softmin_rows(g, EPSILON)) == (2 * floats(1), 2 * packed)
    # Columns as they are, for their digits, in the order that is known.
    with monkeypatch.context() as patched:
        patched.setattr(kernel, "arrange", None)
        assert moved(lambda: found.marginals(f, g, EPSILON)) == (floats(M), 0)
    assert moved(lambda: found.expected_costs(found.b)) == (floats(M), 0)
    over_columns = found.execution.over_columns
    assert over_columns is not None
    sampled = torch.tensor([1, 5, 80])
    # Of both sides one more, of which the operator is made to be asked what it can.
    read = moved(lambda: over_columns(sampled, g[sampled], EPSILON))
    assert read == (floats(3 + 2), 0)


def columns_held(found: BlockedOperator) -> Iterable[packed_blocks._Held]:
    return found._there._stores[1].held.values()


@pytest.mark.slow
def test_a_cloud_that_fits_is_one_block_of_half_the_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, tally = operator(tmp_path, SYMMETRIC, 1 << 20, on_device=DIM * 8 * N)
    assert "in blocks of 140 x 140" in found.execution.backend
    f = torch.randn(N, generator=torch.Generator().manual_seed(1))
    triangles: list[bool] = []
    launch = plan_marginals._Launch.__call__

    def noted(self: plan_marginals._Launch, *args: Any) -> Any:
        triangles.append(self._symmetric)
        return launch(self, *args)

    monkeypatch.setattr(plan_marginals._Launch, "__call__", noted)
    monkeypatch.setattr(KernelOperator, "softmin_part", None)
    before = tally.moved
    _ = found.costs
    assert tally.moved - before == floats(N)
    found.softmin_rows(f, EPSILON, f)
    found.marginals(f, f, EPSILON)
    assert tally.moved - before == floats(N)
    assert tally.copied == 0
    assert triangles == [True]


@pytest.mark.slow
def test_one_cost_at_a_time_has_points_that_stay(tmp_path: Path) -> None:
    found, tally = operator(tmp_path, SYMMETRIC, 1 << 20, on_device=DIM * 8 * N)
    streaming = on_host(found.cost)[0].streaming
    other = BlockedOperator(found.cost, found._build)
    f, read = torch.zeros(N), []
    for one, two in 3 * ((found, other), (other, found)):
        before = tally.moved
        one.softmin_rows(f, EPSILON, f)
        read.append((tally.moved - before) // floats(N))
        assert two._there._stores[0].stays is None
    # What had to go is held by the host when it comes again.
    assert read == [1, 1, 1, 1, 0, 0]
    assert list(streaming.staying) == [other._there._stores[0]]
    assert not pickle.loads(pickle.dumps(streaming)).staying
    del one, two, other
    assert not streaming.staying


def test_means_and_norms_are_found_once_and_a_lattice_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lattice, "STREAMED_ROWS", 16)
    found, tally = operator(tmp_path, CROSS, 0)
    before = tally.moved
    # What it is refined by is asked of one point a side; the first rows lie on no lattice.
    again = LabelledCost(
        *found.cost.points,
        found.cost.a,
        found.cost.b,
        labels_x=found.cost.labels[0],
        labels_y=found.cost.labels[1],
        class_costs=found.cost.class_costs,
        lambda_x=found.cost.lambda_x,
    )
    assert tally.moved == before
    assert lattice_of(again) is None
    # The second block may have been on its way.
    assert tally.moved - before in (floats(16), floats(2 * 16))
    assert again.cost_range == found.cost.cost_range
    # Norms about the mean of one cloud, too.
    before, (x, _), (labels, _) = tally.moved, found.cost.points, found.cost.labels
    mine = {"labels_x": labels, "labels_y": labels, "class_costs": again.class_costs}
    own = LabelledCost(x, x, found.a, found.a, **mine, lambda_x=again.lambda_x)
    assert own.symmetric
    assert tally.moved == before
    squares = (x[:] - x[:].double().mean(0)).square().sum(1)
    torch.testing.assert_close(own.squares[0], squares)
    assert again.mean_cost == found.cost.mean_cost


@pytest.mark.slow
def test_what_has_no_room_is_read_again(tmp_path: Path) -> None:
    found, tally = operator(tmp_path, CROSS, 9000)
    g = torch.randn(M, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        softmin = found.softmin_rows(g, EPSILON)
    assert 0 < tally.held <= 9000
    before = tally.moved, tally.copied
    assert torch.equal(found.softmin_rows(g, EPSILON), softmin)
    assert 0 < tally.moved - before[0] < 4 * DIM * (N + 3 * M)
    assert tally.copied > before[1]
    cost = found.cost
    dense = reference.dense_cost(
        *(points.features[:] for points in cost.points),
        cost.lambda_x,
        cost.class_costs,
        *cost.labels,
    )
    expected = reference.softmin_rows(dense, cost.b, g.double(), EPSILON)
    torch.testing.assert_close(softmin.double(), expected, rtol=2e-2, atol=2e-2)


def test_slabs_are_filled_and_no_more_than_there_is_room() -> None:
    tally = Tally()
    slabs = Slabs(tally, 3500)
    first, second = (slabs.take(count, pinned=False) for count in (700, 900))
    assert first is not None
    assert second is not None
    assert [len(piece) for piece in first + second] == [700, 300, 600]
    for place, piece in enumerate(first + second):
        piece.fill_(place)
    assert [int(piece.float().mean()) for piece in first + second] == [0, 1, 2]
    # 1400 of three slabs are left.
    assert slabs.take(1500, pinned=False) is None
    last = slabs.take(1400, pinned=False)
    assert last is not None
    assert [len(piece) for piece in last] == [400, 1000]
    assert tally.held == 3000


@pytest.mark.gpu
def test_a_gpu_copies_packed_blocks_from_page_locked_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_blocks, "SLAB_BYTES", 1 << 20)
    monkeypatch.setattr(blocked, "LEAST_POINTS", 4096)
    draw = torch.Generator().manual_seed(0)
    sides = []
    for shift, count in ((0.0, 20_000), (0.5, 17_000)):
        labels = torch.randint(0, 10, (count,), generator=draw)
        points = torch.randn(count, 64, generator=draw) + shift + labels[:, None] / 10
        sides.append(otdd.LabeledSamples(points, labels, tuple("abcdefghij")))

    def distance(budget: str | int) -> otdd.DistanceResult:
        compute = ComputeOptions("cuda", memory_budget=budget)
        return otdd.dataset_distance(*sides, epsilon_relative=0.05, compute=compute)

    held, streamed = distance("auto"), distance(1)
    said = streamed.streamed
    assert held.streamed is None
    assert said is not None
    # Both parts of all points that are held at once, those of a cross term.
    assert said["bytes_held"] >= 2 * 2 * 64 * 37_000
    assert said["bytes_copied"] > 0
    monkeypatch.setattr(request, "HELD_SHARE", 0)
    again = distance(1).streamed
    assert again is not None
    assert again["bytes_held"] == again["bytes_copied"] == 0
    assert said["bytes"] < 0.8 * again["bytes"]
    assert streamed.value == pytest.approx(held.value, rel=1e-4)
    assert max(streamed.bounds[0], held.bounds[0]) <= min(streamed.bounds[1], held.bounds[1])
    torch.testing.assert_close(
        streamed.barycentric_map().cpu(), held.barycentric_map().cpu(), rtol=1e-2, atol=1e-2
    )
    streamed._operator.softmin_rows(streamed.potentials[1], streamed.epsilon)
    pieces = [
        piece
        for store in streamed._operator._there._stores  # type: ignore[attr-defined]
        for block in store.held.values()
        for piece in block.pieces
    ]
    assert pieces
    assert all(piece.is_pinned() for piece in pieces)


@pytest.mark.gpu
def test_flows_and_pairs_stream_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_blocks, "SLAB_BYTES", 1 << 24)
    monkeypatch.setattr(blocked, "LEAST_POINTS", 8192)
    draw = torch.Generator().manual_seed(0)
    sides = []
    for shift, count in ((0.0, 30_000), (0.5, 60_000), (1.0, 40_000)):
        labels = torch.randint(0, 10, (count,), generator=draw)
        points = torch.randn(count, 256, generator=draw) + shift + labels[:, None] / 10
        sides.append(otdd.LabeledSamples(points, labels, tuple("abcdefghij")))
    solver = otdd.Converged(tolerance=1e-3)
    settings = {"epsilon_relative": 0.1, "solver": solver}

    def flow(budget: str | int, mode: str) -> otdd.FlowResult:
        compute = ComputeOptions("cuda", memory_budget=budget)
        moves = otdd.Flow(1, mode=mode, stepping=otdd.Stepping(0.5))
        return otdd.gradient_flow(
            sides[0], sides[1], moves, labels="means", compute=compute, **settings
        )

    for mode in ("features", "attached"):
        held, streamed = flow("auto", mode), flow("40MiB", mode)
        assert "points streamed in blocks" in streamed.ran_on
        assert "streamed in blocks" not in held.ran_on
        assert streamed.after.divergence == pytest.approx(held.after.divergence, rel=1e-2)
        torch.testing.assert_close(
            streamed.samples.features, held.samples.features, rtol=1e-2, atol=2e-2
        )

    def pairs(budget: str | int) -> otdd.PairwiseResult:
        compute = ComputeOptions("cuda", memory_budget=budget)
        return otdd.pairwise_distances(sides, labels="means", compute=compute, **settings)

    held_pairs, streamed_pairs = pairs("auto"), pairs("40MiB")
    assert streamed_pairs.to_dict()["streamed"]["bytes"] > 0
    torch.testing.assert_close(streamed_pairs.values, held_pairs.values, rtol=1e-3, atol=1e-3)
