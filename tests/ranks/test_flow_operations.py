"""What a step of a flow in Triton asks of the devices of two processes.

A GPU has done what a step asks for long before a host has asked it, where ranks share the work.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from operation_counts import OperationCounts
from rank_pool import pool

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.flows.history import StepRecord
from otdd_flash.operators import float64_rows

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter"),
]

COUNT, DIM, PIECES = 48, 8, 12
# Of this process, while a step is counted.
COUNTED: list[OperationCounts] = []


class Asked(NamedTuple):
    """What one process asked for in a step."""

    operations: int
    reads: int


def flow(ranks: Ranks) -> None:
    """Of which the third step is counted, by when all that is found once is."""
    draw, labels = torch.Generator().manual_seed(0), torch.arange(COUNT) % 2
    clouds = [
        otdd.LabeledSamples(torch.randn(COUNT, DIM, generator=draw) + k, labels.clone(), ("a", "b"))
        for k in range(2)
    ]
    table = torch.ones(4, 4, dtype=torch.float64).fill_diagonal_(0)

    def progress(record: StepRecord) -> None:
        if record.step in (1, 2):
            ranks.order(counts, record.step)

    otdd.gradient_flow(
        *clouds,
        otdd.Flow(3),
        epsilon=4.0,
        labels=otdd.labels.Given(otdd.ClassDistances.from_full(table, 2)),
        compute=otdd.ComputeOptions("cpu", "triton", group=ranks),
        callbacks=otdd.Callbacks(progress=progress),
    )


def counts(ranks: Ranks, step: int) -> None:
    """Begin to count, or stop."""
    if step == 1:
        COUNTED[0].__enter__()
    else:
        COUNTED[0].__exit__(None, None, None)


def counted() -> Asked:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float64_rows, "CHUNK_ELEMENTS_CPU", COUNT // PIECES * DIM)
        COUNTED[:] = [OperationCounts(patch)]
        otdd.led(flow)
        return Asked(COUNTED[0].operations, COUNTED[0].reads)


# Some tenth above what they are; on a GPU a copy less of every piece that is centred.
MOST = [Asked(1070, 27), Asked(720, 18)]


@pytest.mark.slow
def test_a_step_asks_for_little() -> None:
    for each, most in zip(pool(2).run(counted), MOST, strict=True):
        assert 0.8 * most.operations <= each.operations <= most.operations
        assert each.reads <= most.reads
