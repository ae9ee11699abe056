"""What a pass over points that stream launches and waits for, for each pair of blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from operation_counts import OperationCounts

import otdd_flash as otdd
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.operators import blocked, comparison
from otdd_flash.operators.blocked import BlockedOperator
from otdd_flash.operators.comparison import Comparison

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter is given"),
]
SIZE, DIM, EPSILON = 32, 5, 0.7
ROWS, COLUMNS = 2, 1
PAIRS = ROWS * COLUMNS


def operator(folder: Path, host_room: int, monkeypatch: pytest.MonkeyPatch) -> BlockedOperator:
    monkeypatch.setattr(blocked, "LEAST_POINTS", SIZE)
    monkeypatch.setattr(comparison, "ASSUMED_FREE", 0)
    draw, sides = torch.Generator().manual_seed(0), []
    for name, blocks in (("x", ROWS), ("y", COLUMNS)):
        np.save(folder / f"{name}.npy", torch.randn(blocks * SIZE, DIM, generator=draw).numpy())
        labels = torch.randint(0, 3, (blocks * SIZE,), generator=draw)
        features = otdd.features_file(folder / f"{name}.npy")
        sides.append(otdd.LabeledSamples(features, labels, ("a", "b", "c")))
    compute = ComputeOptions("cpu", "triton", memory_budget=1)
    prepared = Comparison.prepare(sides, GroundCost(), compute)
    assert prepared.streaming is not None
    prepared = replace(prepared, streaming=replace(prepared.streaming, host_room=host_room))
    found = prepared.with_classes((1 - torch.eye(3)).repeat(2, 2)).operator("xy")
    assert isinstance(found, BlockedOperator)
    assert f"in blocks of {SIZE} x {SIZE}" in found.passes.backend
    return found


@pytest.mark.parametrize("held", [False, True])
def test_a_pair_of_blocks_is_few_launches_and_no_wait(
    held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what says how plans are added up, and whether their sums are in range."""
    found = operator(tmp_path, (1 << 28) if held else 0, monkeypatch)
    exact, g = found.refined, torch.zeros(COLUMNS * SIZE)
    values = torch.randn(COLUMNS * SIZE, 2)
    # Every block has come once, and what is known of its points and masses is.
    assert found.costs.error > 0
    f = exact.softmin_rows(g, EPSILON)
    # What comes as it is is packed: rows once, columns once for each block of rows.
    packs = ROWS + PAIRS
    copied = 0 if held else packs
    # Rows of files are chosen by numbers of the host.
    counted = OperationCounts(monkeypatch, reads=("tolist", "item", "__bool__", "__float__"))
    for name, launches, waits, work in (
        ("softmin", 3 * PAIRS + copied, 0, lambda: found.softmin_rows(g, EPSILON)),
        ("beside a guess", 3 * PAIRS + copied, 1, lambda: found.softmin_columns(f, EPSILON, g)),
        ("refined", 3 * PAIRS + copied, 0, lambda: exact.softmin_rows(g, EPSILON)),
        ("marginals", 4 * PAIRS + packs, PAIRS, lambda: found.marginals(f, g, EPSILON)),
        ("plan", 4 * PAIRS + packs, PAIRS, lambda: found.plan(f, g, EPSILON).applied(values)),
        ("costs", ROWS + COLUMNS, 0, lambda: found.expected_costs(found.b)),
    ):
        before = counted.launches.total(), counted.reads
        with counted:
            work()
        assert counted.launches.total() - before[0] <= launches, name
        assert counted.reads - before[1] == waits, name
