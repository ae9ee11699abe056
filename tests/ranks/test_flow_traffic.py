"""What a step of a flow costs ranks: bytes, exchanges, and what is asked of their devices.

A GPU has done what a step asks for long before a host has asked it, where ranks share the work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from operation_counts import OperationCounts
from rank_pool import lead, pool
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.cost import points as cost_points
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.flows.result import StepRecord
from otdd_flash.operators import sharing
from otdd_flash.solver.small import route

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

# So many coordinates that whatever else is sent, potentials and orders, is little.
COUNT, DIM, STEPS = 31, 10_000, 4
# What gathers tensors is called, in newer versions of torch and in others.
GATHERS = "all_gather_single", "all_gather_into_tensor"
# Of the points' bytes: potentials and orders of all passes of a step.
REST = 0.5


def sides(
    count: int = COUNT, dim: int = DIM, classes: int = 3
) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    draw, labels = torch.Generator().manual_seed(3), torch.arange(count) % classes
    source, target = (
        otdd.LabeledSamples(
            torch.randn(count, dim, generator=draw) + labels[:, None] + k,
            labels.clone(),
            tuple("abc"[:classes]),
        )
        for k in range(2)
    )
    return source, target


def moved(ranks: Ranks | None, progress: Callable[[StepRecord], None] | None = None) -> Tensor:
    """Where a flow leads."""
    stepping = otdd.Stepping(0.3, "adam", box=(-1.0, 1.5))
    return otdd.gradient_flow(
        *sides(),
        otdd.Flow(STEPS, stepping=stepping),
        epsilon=2e3,
        compute=otdd.ComputeOptions("cpu", group=ranks),
        callbacks=otdd.Callbacks(progress=progress),
    ).samples.features


def misplaced() -> int:
    """Points of rank 0 in the order of classes, or in the given one, that are not its in both."""
    source, _ = sides()
    assert source.labels is not None
    sorted_first = {*source.labels.sort(stable=True).indices[: COUNT // 2].tolist()}
    return len(sorted_first ^ {*range(COUNT // 2)})


def exchanged(ranks: Ranks) -> tuple[Tensor, list[float], list[Counter[str]]]:
    """Where a flow leads, and of each step but the last bytes over the points', and exchanges."""
    counts, steps = Counter[str](), []

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            large = any(
                isinstance(each, Tensor) and each.numel() > COUNT * DIM / 4 for each in args
            )
            counts["large"] += large
            return function(*args, **kwargs)

        return call

    def progress(_: StepRecord) -> None:
        steps.append((ranks.shared.bytes_moved, counts.copy()))

    with pytest.MonkeyPatch.context() as patched:
        gather = next(name for name in GATHERS if hasattr(torch.distributed, name))
        pickled = "all_gather_object", "scatter_object_list"
        for name in (*pickled, "all_reduce", "broadcast", gather, "all_to_all_single"):
            patched.setattr(
                torch.distributed, name, counted(name, getattr(torch.distributed, name))
            )
        points = moved(ranks, progress)
    # Steps are reported, and the end.
    of_steps = list(pairwise(steps[:-1]))
    shares = [(b - a) / points.nbytes for (a, _), (b, _) in of_steps]
    return points, shares, [b - a for (_, a), (_, b) in of_steps]


def asked_for_memory(work: Any) -> Any:
    """Work of ranks that look how much memory there is, however few points they hold."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharing, "ASSUMED_FREE", 0)
        return lead(work)


def test_a_step_sends_shares_of_the_points_and_pickles_nothing() -> None:
    """Velocities of the rows of others go to these, and moved rows come from their owners."""
    points, shares, exchanges = pool(2).run(asked_for_memory, exchanged)[0]
    # Rows go to and come from the owners of their places; shares of points are padded to one size.
    formula = (misplaced() + -(-COUNT // 2)) / COUNT
    assert len(shares) == STEPS - 1
    assert all(formula <= share <= formula + REST for share in shares)
    for step in exchanges:
        # Of all that is exchanged by ranks at once nothing but these is as large as points.
        assert step["large"] == 2
        assert "all_gather_object" not in step
        # Whether parts of either term and rows of the self term were made, and how accurate sums of
        # either term's plan are.
        assert step["all_reduce"] == 5
    with pytest.MonkeyPatch.context() as patched:
        # Terms in turn, as ranks solve them: adam takes signs of gradients that rounding decides.
        patched.setattr(route, "MOST_POINTS", 0)
        alone = moved(None)
    torch.testing.assert_close(points, alone, rtol=1e-3, atol=1e-3)


# Of this process, while a step is counted.
COUNTED: list[OperationCounts] = []


def asked_of_the_device() -> tuple[int, int]:
    """Operations and reads of a third step, by when all that is found once is."""

    def progress(record: StepRecord) -> None:
        if record.step in (1, 2):
            ranks[0].order(_count, record.step)

    def work(here: Ranks) -> None:
        ranks.append(here)
        table = torch.ones(4, 4, dtype=torch.float64).fill_diagonal_(0)
        otdd.gradient_flow(
            *sides(48, 8, 2),
            otdd.Flow(3),
            epsilon=4.0,
            labels=otdd.labels.Given(otdd.ClassDistances.from_full(table, 2)),
            compute=otdd.ComputeOptions("cpu", "triton", group=here),
            callbacks=otdd.Callbacks(progress=progress),
        )

    ranks: list[Ranks] = []
    with pytest.MonkeyPatch.context() as patched:
        # Twelve pieces.
        patched.setattr(cost_points, "CHUNK_ELEMENTS_CPU", 4 * 8)
        COUNTED[:] = [OperationCounts(patched)]
        otdd.led(work)
        return COUNTED[0].operations, COUNTED[0].reads


def _count(ranks: Ranks, step: int) -> None:
    """Begin to count, or stop."""
    if step == 1:
        COUNTED[0].__enter__()
    else:
        COUNTED[0].__exit__(None, None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_a_step_asks_for_little() -> None:
    """Some tenth above what it does; on a GPU a copy less of every piece that is centred.

    Two of the reads are of checksums, which arrive while sums of a plan are computed.
    """
    most = (1080, 27), (780, 16)
    for found, (operations, reads) in zip(pool(2).run(asked_of_the_device), most, strict=True):
        assert 0.8 * operations <= found[0] <= operations
        assert found[1] <= reads
