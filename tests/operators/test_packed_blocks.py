"""Packed blocks in host memory: what is read again, launched and waited for; nothing changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from operation_counts import OperationCounts
from spying import calls_of

import otdd_flash as otdd
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.host_points import Tally
from otdd_flash.kernels.passes import plan_marginals
from otdd_flash.operators import blocked, comparison, packed_blocks
from otdd_flash.operators.blocked import BlockedOperator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.triton_operator import KernelOperator

N, M, DIM, EPSILON = 100, 60, 5, 0.7
CROSS, SYMMETRIC = "xy", "xx"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 and fewer, and slabs that end within them."""
    monkeypatch.setattr(blocked, "LEAST_POINTS", 64)
    monkeypatch.setattr(comparison, "ASSUMED_FREE", 0)
    monkeypatch.setattr(packed_blocks, "SLAB_BYTES", 1000)


def operator(
    tmp_path: Path, term: str, room: int, on_device: int = 1
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
    prepared = Comparison.prepare(sides, GroundCost(), compute)
    assert prepared.streaming is not None
    streaming = replace(prepared.streaming, host_room=room, room=on_device)
    prepared = replace(prepared, streaming=streaming)
    found = prepared.with_classes((1 - torch.eye(3)).repeat(2, 2)).operator(term)
    assert isinstance(found, BlockedOperator)
    assert prepared.streaming is not None
    return found, prepared.streaming.tally


@pytest.mark.slow
def test_later_passes_read_nothing(tmp_path: Path) -> None:
    without, _ = operator(tmp_path, CROSS, 0)
    found, tally = operator(tmp_path, CROSS, 1 << 20)
    g = torch.randn(found.shape[1], generator=torch.Generator().manual_seed(1))
    expected = without.softmin_rows(g, EPSILON)
    reads = []
    for _ in range(3):
        before = tally.moved, tally.copied
        assert torch.equal(found.softmin_rows(g, EPSILON), expected)
        reads.append((tally.moved - before[0], tally.copied - before[1]))
    assert reads[0][0] >= 4 * DIM * (N + M)
    assert [moved for moved, _ in reads[1:]] == [0, 0]
    # Float16 of rows padded to a multiple of 8 coordinates: one part, for either side of a tile.
    assert reads[1] == reads[2]
    assert tally.held >= 2 * 2 * 8 * (N + M)
    exact, plain = found.refined, without.refined
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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter is given")
@pytest.mark.parametrize("held", [False, True])
def test_a_pair_of_blocks_is_few_launches_and_no_wait(
    held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what says how plans are added up, and whether their sums are in range."""
    found, _ = operator(tmp_path, CROSS, (1 << 28) if held else 0)
    assert "in blocks of 50 x 60" in found.passes.backend
    rows, columns, pairs = 2, 1, 2
    exact, g, values = found.refined, torch.zeros(M), torch.randn(M, 2)
    # Every block has come once, and what is known of its points and masses is.
    assert found.costs.error > 0
    f = exact.softmin_rows(g, EPSILON)
    # What comes as it is is packed: rows once, columns once for each block of rows.
    packs = rows + pairs
    copied = 0 if held else packs
    # Rows of files are chosen by numbers of the host.
    counted = OperationCounts(monkeypatch, reads=("tolist", "item", "__bool__", "__float__"))
    for name, launches, waits, work in (
        ("softmin", 3 * pairs + copied, 0, lambda: found.softmin_rows(g, EPSILON)),
        ("beside a guess", 3 * pairs + copied, 1, lambda: found.softmin_columns(f, EPSILON, g)),
        ("refined", 3 * pairs + copied, 0, lambda: exact.softmin_rows(g, EPSILON)),
        ("marginals", 4 * pairs + packs, pairs, lambda: found.marginals(f, g, EPSILON)),
        ("plan", 4 * pairs + packs, pairs, lambda: found.plan(f, g, EPSILON).applied(values)),
        ("costs", rows + columns, 0, lambda: found.expected_costs(found.b)),
    ):
        before = counted.launches.total(), counted.reads
        with counted:
            work()
        assert counted.launches.total() - before[0] <= launches, name
        assert counted.reads - before[1] == waits, name


def floats(points: int) -> int:
    """Bytes of so many points."""
    return 4 * DIM * points


@pytest.mark.slow
def test_a_cloud_that_fits_is_one_block_of_half_the_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, tally = operator(tmp_path, SYMMETRIC, 1 << 20, on_device=DIM * 8 * N)
    assert "in blocks of 100 x 100" in found.passes.backend
    f = torch.randn(N, generator=torch.Generator().manual_seed(1))
    launches = calls_of(monkeypatch, plan_marginals._Launch, "__call__")
    monkeypatch.setattr(KernelOperator, "softmin_part", None)
    before = tally.moved
    _ = found.costs
    assert tally.moved - before == floats(N)
    found.softmin_self(f, EPSILON)
    found.marginals(f, None, EPSILON)
    assert tally.moved - before == floats(N)
    assert tally.copied == 0
    assert [launch._symmetric for launch, *_ in launches] == [True]


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
    monkeypatch.setattr(comparison, "HELD_SHARE", 0)
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
