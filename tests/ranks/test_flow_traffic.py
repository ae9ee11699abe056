"""What ranks of a flow send each other, and that copies of the points stay equal to them.

Points have so many coordinates that whatever else is sent, potentials and orders, is little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from rank_pool import lead, pool
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.flows.stepping import Stepping
from otdd_flash.operators import sharing

pytestmark = pytest.mark.xdist_group("ranks")

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
