"""What ranks of a flow send each other, and that copies of the points stay equal to them.

Points have so many coordinates that whatever else is sent, potentials and orders, is little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from rank_pool import lead, pool
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.distributed.copies import Copied
from otdd_flash.distributed.ranks import PAGE, Dealt, Ranks
from otdd_flash.flows.stepping import Stepping
from otdd_flash.operators import sharing

pytestmark = pytest.mark.xdist_group("ranks")

SIZES = [2, pytest.param(3, marks=pytest.mark.slow)]
COUNT, DIM, STEPS = 31, 10_000, 4
# Of the points' bytes: potentials and orders of all passes of a step.
REST = 0.5


def sides() -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    draw = torch.Generator().manual_seed(3)
    labels = torch.arange(COUNT) % 3
    return tuple(
        otdd.LabeledSamples(
            torch.randn(COUNT, DIM, generator=draw) + labels[:, None] + k, labels, tuple("abc")
        )
        for k in range(2)
    )


def moved(ranks: Ranks | None, options: dict[str, Any]) -> tuple[Tensor, list[float]]:
    """Where a flow led, and what it sent in each step but the last, over the points' bytes."""
    sent: list[int] = []
    result = otdd.gradient_flow(
        *sides(),
        otdd.Flow(STEPS, **options),
        epsilon=2e3,
        compute=otdd.ComputeOptions("cpu", group=ranks),
        callbacks=otdd.Callbacks(
            progress=lambda _: None if ranks is None else sent.append(ranks.shared.bytes_moved)
        ),
    )
    points = 4 * COUNT * DIM
    # Told after every step, and of the end.
    shares = [(b - a) / points for a, b in pairwise(sent[:-1])]
    return result.samples.features, shares


@pytest.mark.slow
def test_a_step_sends_shares_of_the_points() -> None:
    """Products of both plans and moved rows come from their owners, velocities go there."""
    size, options = 2, {"stepping": Stepping(0.3, "adam", box=(-1.0, 1.5))}
    points, shares = pool(size).led(moved, options)[0]
    width = -(-COUNT // size)
    # Shares are padded to one size.
    formula = 4 * (size - 1) * width / COUNT
    assert len(shares) == STEPS - 1
    for share in shares:
        assert formula <= share <= formula + REST
    alone, _ = moved(None, options)
    torch.testing.assert_close(points, alone, rtol=1e-3, atol=1e-3)


def exchanges(ranks: Ranks) -> list[dict[str, int]]:
    """How often each step of a flow but the first and the last called what takes ranks long."""
    steps: list[Counter[str]] = []
    with counting() as counts:
        otdd.gradient_flow(
            *sides(),
            otdd.Flow(STEPS),
            epsilon=2e3,
            compute=otdd.ComputeOptions("cpu", group=ranks),
            callbacks=otdd.Callbacks(progress=lambda _: steps.append(counts.copy())),
        )
    return [dict(b - a) for a, b in pairwise(steps[:-1])]


def asked_for_room(work: Any) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharing, "UNASKED", 0)
        return lead(work)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count calls of what ranks exchange in host memory."""
    counts = Counter[str]()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in ("all_gather_object", "broadcast", "all_reduce"):
            function = getattr(torch.distributed, name)
            patched.setattr(torch.distributed, name, counted(name, function))
        yield counts


@pytest.mark.slow
def test_a_step_pickles_nothing_that_all_ranks_say() -> None:
    """Room is asked for once, and what is said of parts, and of failures, is numbers."""
    for step in pool(2).run(asked_for_room, exchanges)[0]:
        assert "all_gather_object" not in step
        # Whether parts of either term and rows of the self term were made, and how accurate sums of
        # either term's plan are.
        assert step["all_reduce"] == 5


def clouds_sent(ranks: Ranks) -> list[list[bool]]:
    """Of every cloud that ranks were told of, which of its parts were tensors."""
    source, target = sides()
    weights = torch.full((COUNT,), 1 / COUNT, dtype=torch.float64)
    assert target.labels is not None
    source, target = replace(source, weights=weights), replace(target, labels=target.labels.clone())
    before, found = Ranks.order, []

    def order(ranks: Ranks, function: Any, *given: Any) -> Any:
        if function is sharing._hold_parts:
            tensors = [isinstance(each, Tensor) for each in given[8:]]
            found.extend(tensors[first : first + 3] for first in range(0, len(tensors), 3))
        return before(ranks, function, *given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Ranks, "order", order)
        compute = otdd.ComputeOptions("cpu", group=ranks)
        otdd.gradient_flow(source, target, otdd.Flow(STEPS), epsilon=2e3, compute=compute)
    return found


@pytest.mark.slow
def test_labels_and_weights_of_particles_are_sent_once() -> None:
    first, target, *later = pool(2).led(clouds_sent)[0]
    assert {tuple(first), tuple(target)} == {(False, False, False), (True, True, False)}
    assert later == [[False, False, False]] * STEPS


def messages(ranks: Ranks) -> list[Any]:
    """What ranks got of orders of so many bytes, and in how many broadcasts."""
    found = []
    for size in (0, 1000, PAGE, 3 * PAGE, *range(PAGE - 200, PAGE, 10)):
        content = bytes(range(256)) * (size // 256) + bytes(size % 256)
        with counting() as counts:
            got = ranks.order(_content, content)
        found.append((size, got == [content] * ranks.size, counts["broadcast"]))
    return found


def _content(ranks: Ranks, content: bytes) -> list[bytes]:
    return ranks.all_gathered_objects(content)


@pytest.mark.slow
def test_an_order_is_one_message_but_where_it_is_long() -> None:
    found = pool(2).led(messages)[0]
    assert all(same for _, same, _ in found)
    assert [broadcasts for _, _, broadcasts in found[:4]] == [1, 1, 2, 2]
    # At some size it does not fit any longer.
    assert {broadcasts for _, _, broadcasts in found[4:]} == {1, 2}


@pytest.mark.slow
def test_points_that_are_no_copies_are_sent() -> None:
    """Displaced points are new at every step, and copies would be of no use."""
    (_, plain), (_, noisy) = (
        pool(2).led(moved, {"stepping": Stepping(0.3, noise=noise)})[0] for noise in (0.0, 0.1)
    )
    for share, more in zip(plain, noisy, strict=True):
        assert share + 0.95 <= more <= share + 1.05


class Owner:
    """What a tensor is changed by."""


def copies(ranks: Ranks) -> list[Any]:
    """Of a tensor of rank 0: whether copies were known equal, what they are, bytes sent."""
    found: list[Any] = []
    points, owner = torch.arange(1000.0), Owner()
    copied = Copied(ranks, points, owner)

    def note() -> None:
        equal, before = copied.number is not None, ranks.shared.bytes_moved
        number = copied.sent()
        sent = ranks.shared.bytes_moved - before
        assert copied.number == number
        sums = ranks.order(_sums_of_copies, number)
        found.append((equal, [float(points.sum()), *sums[1:]], sent >= points.nbytes))

    note()
    note()
    points.add_(1)
    note()
    points[3] = -7
    note()
    del owner
    ranks.order(_nothing)
    found.append((sorted(ranks.copied), ranks.order(_held)))
    return found


def _nothing(ranks: Ranks) -> None:
    pass


def _held(ranks: Ranks) -> list[int]:
    return ranks.all_gathered_objects(len(ranks.held))


def _sums_of_copies(ranks: Ranks, number: int) -> list[float]:
    copy = ranks.held.get(number)
    return ranks.all_gathered_objects(0.0 if copy is None else float(copy.sum()))


def test_a_tensor_that_was_changed_is_sent_anew() -> None:
    *found, left = pool(2).led(copies)[0]
    assert [equal for equal, _, _ in found] == [False, True, False, False]
    assert [sent for _, _, sent in found] == [True, False, True, True]
    for _, sums, _ in found:
        assert sums[1:] == [sums[0]]
    assert left == ([], [0, 0])


def failed_flow(ranks: Ranks) -> list[Any]:
    """Distances of labels changed by NumPy after a flow failed, of the same and new tensors."""
    compute = otdd.ComputeOptions("cpu", group=ranks)
    pair = tuple(
        otdd.LabeledSamples(side.features[:, :2].clone(), side.labels.clone(), side.class_names)
        for side in sides()
    )
    asked = {"labels": "means", "epsilon": 50.0, "compute": compute}
    # The exception keeps the flow, and that its copies.
    with pytest.raises(RuntimeError, match="that is enough") as kept:
        otdd.gradient_flow(*pair, otdd.Flow(2), callbacks=otdd.Callbacks(_refuse), **asked)
    draw, held = torch.Generator().manual_seed(0), len(ranks.copied)
    pair[0].labels.numpy()[:] = pair[0].labels[torch.randperm(COUNT, generator=draw)].numpy()
    new = tuple(
        otdd.LabeledSamples(side.features, side.labels.clone(), side.class_names) for side in pair
    )
    found = [otdd.dataset_distance(*each, **asked).value for each in (pair, new)]
    del kept
    return [held, *found]


def _refuse(step: Any) -> None:
    raise RuntimeError("that is enough")


@pytest.mark.slow
def test_labels_that_change_after_a_failed_flow_are_sent_anew() -> None:
    held, found, expected = pool(2).led(failed_flow)[0]
    assert held == 2
    assert found == expected


def dealt(ranks: Ranks) -> list[Any]:
    before = ranks.shared.bytes_moved
    rows = torch.arange(14.0).reshape(7, 2)
    found = ranks.order(_rows, Dealt(rows), torch.ones(1), Dealt(rows[:1]))
    return [found, ranks.shared.bytes_moved - before]


def _rows(ranks: Ranks, own: Tensor, whole: Tensor, few: Tensor) -> list[Any]:
    return ranks.all_gathered_objects((own.tolist(), whole.tolist(), few.tolist()))


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_is_given_its_own_rows(size: int) -> None:
    found, _ = pool(size).led(dealt)[0]
    rows = torch.arange(14.0).reshape(7, 2).tolist()
    assert [row for own, _, _ in found for row in own] == rows
    assert [len(own) for own, _, _ in found] == ([3, 4] if size == 2 else [2, 2, 3])
    assert all(whole == [1.0] for _, whole, _ in found)
    # Of one row the last rank has all.
    assert [few for _, _, few in found] == [[]] * (size - 1) + [rows[:1]]
