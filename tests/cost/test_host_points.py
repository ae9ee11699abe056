"""Points on their way to a device: when each block comes, and who reads those that are there."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.cost import host_points
from otdd_flash.cost.host_points import Arrived, Block, HostPoints, Streaming, slices
from otdd_flash.cost.points import Cloud

BLOCKS = slices(50, 10)


def on_cpu(count: int = 50) -> HostPoints:
    features = torch.arange(2.0 * count).view(count, 2)
    return HostPoints(features, Streaming(torch.device("cpu"), 1))


def test_a_block_comes_when_the_one_before_the_last_has_been_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With events that note who waits for them, as on a GPU that is told more than it has done."""
    points, read = on_cpu(), []
    used = 0

    class Told:
        def __init__(self) -> None:
            self.used = used

        def synchronize(self) -> None:
            read.append(f"await {self.used}")

    def arrive(block: Block) -> Arrived:
        read.append(f"bring {BLOCKS.index(block)}")
        return points.arrive(block)

    monkeypatch.setattr(points, "_after_passes", Told)
    for there in points.stream(BLOCKS, arrive):
        assert torch.equal(there, points.features[BLOCKS[used].rows])
        used += 1
    assert used == 5
    # While block 2 comes, block 0 has been used, and block 1 may be in use.
    expected = "bring 0, await 0, bring 1, await 1, bring 2, await 2, bring 3, await 3, bring 4"
    assert ", ".join(read) == expected


def test_points_on_the_device_are_read_where_passes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Particles change between passes: no other thread or stream reads them."""
    points = on_cpu()
    rows = torch.tensor([7, 3, 44])
    expected = points[rows]
    monkeypatch.setattr(HostPoints, "on_device", property(lambda _: True))
    monkeypatch.setattr(points, "_reader", None)
    assert torch.equal(points[rows], expected)
    assert torch.equal(torch.cat(list(points.stream(BLOCKS))), points.features)
    points.features += 1
    assert torch.equal(points[rows], expected + 1)
    assert torch.equal(points[4:6], points.features[4:6])


def test_blocks_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_points, "PIECE_BYTES", 3 * 8)
    points = on_cpu()
    rows = torch.tensor([7, 3, 44, 9, 0, 13, 21, 22])
    assert torch.equal(points[rows], points.features[rows])
    assert torch.equal(points[4:15], points.features[4:15])
    assert torch.equal(
        points.part(rows)[torch.tensor([5, 1, 2, 0])], points.features[[13, 3, 44, 7]]
    )
    assert points.streaming.tally.moved == 8 * (8 + 11 + 4)


@pytest.mark.gpu
def test_no_more_blocks_come_than_passes_use() -> None:
    """Of a pass of 100 blocks that the host has told all of, while the GPU does nothing."""
    device = torch.device("cuda", torch.cuda.current_device())
    features = torch.randn(100 * 1000, 1000)
    points = HostPoints(features, Streaming(device, 1))
    block = 1000 * 1000 * 4
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        total = torch.zeros(1000, device=device)
        torch.cuda._sleep(1_000_000_000)
        for there in points.stream(slices(len(features), 1000)):
            total += there.sum(0)
        most = torch.cuda.max_memory_allocated() - before
        torch.testing.assert_close(total.cpu(), features.sum(0), rtol=1e-3, atol=1e-2)
        assert most <= 6 * block
    assert points.streaming.tally.waited < 10


@pytest.mark.gpu
def test_particles_are_read_after_a_stream_of_the_users_wrote_them() -> None:
    particles = torch.zeros(1 << 20, 8, device="cuda")
    points = HostPoints(particles, Streaming(particles.device, 1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        particles += 1
        found = [there.clone() for there in points.stream(slices(1 << 20, 1 << 18))]
    torch.cuda.synchronize()
    assert all(bool((there == 1).all()) for there in found)


def test_distances_from_the_mean_come_with_those_from_another_centre() -> None:
    """The points are read once more for the mean, and once for both."""
    points = on_cpu()
    masses = torch.full((50,), 1 / 50, dtype=torch.float64)
    cloud = Cloud(points, masses, torch.zeros(50, dtype=torch.int64))
    mean, tally = cloud.extent.mean, points.streaming.tally
    once = tally.moved
    for centre in (torch.zeros(2).double(), mean):
        found = cloud.squares(centre)
        expected = (points.features.double() - centre).square().sum(1)
        torch.testing.assert_close(found, expected)
    assert tally.moved == 2 * once > 0
