"""experiments.bench_scale: what is timed is not slowed by what is counted beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_pool import pool

from experiments.bench_scale import draw, table_of
from experiments.scale_workloads import exchanging, timed
from otdd_flash.distributed.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


def measured(ranks: Ranks) -> tuple[float | None, int, dict[str, float | None], float | None]:
    """Whether exchanges are timed in either run, what moved in one, and what is told of both."""
    within: list[float | None] = []

    def run() -> float | None:
        ranks.order(_gather)
        within.append(ranks.seconds)
        return ranks.seconds

    _, seconds, moved = timed(run, ranks)
    told = exchanging({"shares": True}, run, ranks)
    assert within[0] is None
    assert within[1] is not None
    assert exchanging({"shares": False}, run, ranks) == {"communication_share": None}
    assert len(within) == 2
    return seconds, moved["bytes_moved"], told, ranks.seconds


def _gather(ranks: Ranks) -> None:
    ranks.summed(torch.tensor(float(ranks.rank)))


def test_exchanges_are_timed_in_a_run_apart() -> None:
    seconds, moved, told, afterwards = pool(2).led(measured)[0]
    assert seconds is None
    assert afterwards is None
    assert moved > 0
    assert 0 < told["communication_share"] < 1


def test_rows_are_compared_with_that_of_one_process(tmp_path: Path) -> None:
    rows = [
        {"workload": "flow", "processes": count, "seconds": 8.0 / count, "speed_up": times}
        for count, times in ((1, 1.0), (2, 2.0), (4, None))
    ]
    lines = table_of(rows).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["flow", "1", "8.00", "1.00"],
        ["flow", "2", "4.00", "2.00"],
        ["flow", "4", "2.00"],
    ]
    draw(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000
