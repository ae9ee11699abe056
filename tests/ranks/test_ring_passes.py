"""What goes round in a ring: pairs, bytes and launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from operation_counts import OperationCounts
from rank_pool import pool
from torch import Tensor

from otdd_flash.distributed.exchange import Exchange
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators import kernel, parts
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.lattice import lattice_of
from otdd_flash.operators.parts import sides_of
from otdd_flash.operators.ring import ring_parts
from otdd_flash.operators.streamed import StreamedOperator

pytestmark = pytest.mark.xdist_group("ranks")

EPSILON, DIM = 0.4, 5
SIZES = [2, pytest.param(3, marks=pytest.mark.slow)]
CLASSES = (3, 4)

BUILDS: dict[str, Any] = {
    "double": lambda part: StreamedOperator(part, torch.float64),
    "fast": lambda part: KernelOperator(part, "fast"),
    "high": lambda part: KernelOperator(part, "high"),
}


def cost_of(n: int, m: int | None) -> LabelledCost:
    """Between two clouds, or of one with itself for None; a third of the points has no mass."""
    sides: list[Any] = []
    for seed, count, classes in ((1, n, CLASSES[0]), (2, m, CLASSES[m is not None])):
        if count is None:
            sides.append(sides[0])
            continue
        draw = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, classes, (count,), generator=draw)
        points = torch.randn(count, DIM, generator=draw) + labels[:, None] / 2
        masses = torch.rand(count, generator=draw, dtype=torch.float64) + 0.1
        masses[1::3] = 0
        sides.append((points, labels, masses / masses.sum()))
    (x, labels_x, a), (y, labels_y, b) = sides
    table = torch.rand(CLASSES[0], CLASSES[m is not None], dtype=torch.float64, generator=draw)
    return LabelledCost(
        x,
        y,
        a,
        b,
        labels_x=labels_x,
        labels_y=labels_y,
        class_costs=table if m is not None else table + table.T,
        lambda_x=0.5,
    )


def held(ranks: Ranks, how: str, n: int, m: int | None) -> tuple[LabelledCost, Any]:
    """The cost, and what this rank holds of it, as number 0."""
    cost = cost_of(n, m)
    if how != "double":
        lattice_of(cost)
    points: list[Any] = [
        side[owned.of(ranks)] for side, owned in zip(cost.held, sides_of(cost), strict=True)
    ]
    first = cost.held[0][:1], cost.held[1][:1]
    found = ring_parts(ranks, cost.without_points(), (points[0], points[1]), first, BUILDS[how])
    ranks.held[0] = found
    return cost, found


def potentials(cost: LabelledCost, far: float) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    f = far * torch.randn(cost.shape[0], generator=draw)
    return f, f if cost.symmetric else far * torch.randn(cost.shape[1], generator=draw)


def pairs_of(n: int) -> list[tuple[int, int, bool]]:
    """Rows and columns of all scores of one rank's pairs, in the points' own order."""
    ranks = Ranks()
    _, mine = held(ranks, "double", n, None)
    every = torch.arange(n)
    return [
        (int(row), int(column), tile.diagonal)
        for tile in mine.share._pairs.tiles(upper=True)
        for row in every[tile.rows]
        for column in every[tile.columns]
    ]


@pytest.mark.parametrize("size", SIZES)
def test_ranks_take_each_pair_of_points_once(size: int) -> None:
    for n in (1, 2, 7, 24, 29):
        answers = pool(size).run(pairs_of, n)
        scores: list[tuple[int, int]] = []
        for answer in answers:
            for row, column, diagonal in answer:
                # A block with itself has a pair in both orders.
                scores += [(row, column)] if diagonal else [(row, column), (column, row)]
        assert sorted(scores) == [(row, column) for row in range(n) for column in range(n)], n
        if n == 24:
            pairs = [sum(0.5 if diagonal else 1 for *_, diagonal in each) for each in answers]
            assert max(pairs) <= 1.1 * min(pairs)


@contextmanager
def watched() -> Iterator[tuple[list[tuple[torch.dtype, int, int | None]], list[int]]]:
    """What goes round, as (type, bytes of this rank's, of how many ranks), and what is packed."""
    rounds: list[Any] = []
    packed: list[int] = []
    circulated, pack = Exchange.circulated, kernel.pack

    def seen(self: Exchange, own: Any, shapes: Any, count: int | None = None) -> Any:
        rounds.append((own[0].dtype, sum(each.nbytes for each in own), count))
        return circulated(self, own, shapes, count)

    def counted(points: Tensor, *how: Any) -> Any:
        packed.append(len(points))
        return pack(points, *how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Exchange, "circulated", seen)
        patched.setattr(kernel, "pack", counted)
        yield rounds, packed


def gone_round(how: str, symmetric: bool) -> dict[str, Any]:
    """What goes round, and is packed, when a cost is built and in its passes."""
    ranks, n = Ranks(), 300
    with watched() as (rounds, packed):
        cost, mine = held(ranks, how, n, None if symmetric else 200)
        f, g = potentials(cost, 0.1)
        built, packed[:] = list(packed), []
        del rounds[:]
        for _ in range(2):
            if symmetric:
                parts.softmin_self(ranks, 0, f, EPSILON)
            else:
                parts.softmin(ranks, 0, False, g, EPSILON, f)
        passes, again = list(rounds), list(packed)
        del rounds[:]
        before = ranks.shared.bytes_moved
        if symmetric:
            list(mine.share._pairs.tiles(upper=True))
        else:
            list(mine.rows.operator.tiles())
        moved = ranks.shared.bytes_moved - before
        parts.refine(ranks, 0, 1)
        own = mine.sides[0 if symmetric else 1].of(ranks)
        blocks = mine.share._pairs._blocks if symmetric else mine.rows.operator._sides[1]
        size = sum(each.layout.size for each in blocks._packed[ranks.rank] if each.layout.size)
        other = sum(each.layout.size for each in blocks._packed[1 - ranks.rank])
    return {
        "built": built,
        "passes": passes,
        "again": again,
        "moved": moved,
        "packed rows": (size, other),
        "points": len(cost.b[own]),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "parts_read", "symmetric"), [("fast", 1, True), ("high", 2, False)]
)
def test_shards_are_packed_once_and_go_round_packed(
    how: str, parts_read: int, symmetric: bool
) -> None:
    for answer in pool(2).run(gone_round, how, symmetric):
        # Of each side the first point, and the shard: in two blocks of a cloud with itself.
        one, both = answer["packed rows"]
        if symmetric:
            assert sorted(answer["built"])[-2:] == [75, 75]
            assert sum(answer["built"]) == 150 + 3
        else:
            assert sum(answer["built"]) == 150 + 100 + 4
        assert answer["again"] == []
        # 5 coordinates take the room of 8.
        count = 2 if symmetric else None
        bytes_of = 8 * 2 * parts_read
        assert answer["passes"] == [(torch.float16, bytes_of * one, count)] * 2
        assert answer["moved"] == bytes_of * (one + both)


def launches(symmetric: bool) -> dict[str, tuple[int, int]]:
    """Kernels launched by a pass, and what the host waits for, once everything has come by once."""
    ranks = Ranks()
    cost, _ = held(ranks, "fast", 61, None if symmetric else 45)
    f, g = potentials(cost, 0.1)
    ways: dict[str, Any] = {
        "softmin": lambda: parts.softmin(ranks, 0, False, g, EPSILON, None),
        "beside a guess": lambda: parts.softmin(ranks, 0, False, g, EPSILON, f),
        "pairs": lambda: parts.softmin_self(ranks, 0, f, EPSILON),
    }
    del ways["pairs" if not symmetric else "beside a guess"]
    found = {}
    with pytest.MonkeyPatch.context() as patched:
        for name, way in ways.items():
            way()
            with OperationCounts(patched) as counted:
                way()
            found[name] = sum(counted.launches.values()), counted.reads
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter is given")
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_pass_is_few_launches_and_no_wait(symmetric: bool) -> None:
    """But for whether sums are in range, which ranks tell each other once a pass."""
    # Of a pair of blocks a bias, a pass and a merge.
    expected = {"softmin": (2 * 3, 0), "beside a guess": (2 * 3, 1)}
    if symmetric:
        # By rows two blocks with four. In pairs two with themselves; with a bias and a pass, these
        # two and two pairs with the other rank's.
        expected = {"softmin": (8 * 3, 0), "pairs": (2 * 3 + 3 * 2, 1)}
    for found in pool(2).run(launches, symmetric):
        for name, counts in expected.items():
            assert found[name] == counts, name


def order_of_events() -> tuple[list[str], list[int]]:
    """When shards are sent for and used, and whether what came is there to the end."""
    ranks, events, kept = Ranks(), [], []
    send = torch.distributed.batch_isend_irecv

    def sent(moves: Any) -> Any:
        events.append("sent for")
        return send(moves)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "batch_isend_irecv", sent)
        shapes = [[torch.Size((3,))]] * ranks.size
        for _, came in ranks.circulated([torch.full((3,), ranks.rank)], shapes):
            events.append("used")
            kept += came
    return events, [int(each[0]) for each in kept]


@pytest.mark.slow
def test_the_next_shard_is_on_its_way_while_one_is_used() -> None:
    for rank, (events, kept) in enumerate(pool(3).run(order_of_events)):
        assert events == ["sent for", "used", "sent for", "used", "used"]
        assert kept == [(rank + step) % 3 for step in range(3)]
