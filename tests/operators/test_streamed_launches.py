"""What a pass over points that stream launches and waits for, for each pair of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

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


class Counted(TorchDispatchMode):
    """Launches of kernels, and operations outside of them that a GPU would be waited for."""

    waits = frozenset(
        ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        launch = interpreter.GridExecutor.__call__
        self._inside = False

        def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.counts["launches"] += 1
            self._inside = True
            try:
                launch(executor, *args, **kwargs)
            finally:
                self._inside = False

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
        read = Tensor.tolist

        def listed(tensor: Tensor) -> Any:
            # On a CPU no operation tells of it.
            self.counts["waits"] += not self._inside
            return read(tensor)

        monkeypatch.setattr(Tensor, "tolist", listed)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        waits = function.__name__.split(".")[0] in self.waits
        self.counts["waits"] += waits and not self._inside
        return function(*args, **(kwargs or {}))

    def of(self, work: Callable[[], object]) -> tuple[int, int]:
        """Launches and waits of some work."""
        before = self.counts.copy()
        with self:
            work()
        return tuple(self.counts[name] - before[name] for name in ("launches", "waits"))


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
    counted = Counted(monkeypatch)
    for name, launches, waits, work in (
        ("softmin", 3 * PAIRS + copied, 0, lambda: found.softmin_rows(g, EPSILON)),
        ("beside a guess", 3 * PAIRS + copied, 1, lambda: found.softmin_columns(f, EPSILON, g)),
        ("refined", 3 * PAIRS + copied, 0, lambda: exact.softmin_rows(g, EPSILON)),
        ("marginals", 4 * PAIRS + packs, PAIRS, lambda: found.marginals(f, g, EPSILON)),
        ("plan", 4 * PAIRS + packs, PAIRS, lambda: found.plan(f, g, EPSILON).applied(values)),
        ("costs", ROWS + COLUMNS, 0, lambda: found.expected_costs(found.b)),
    ):
        got = counted.of(work)
        assert got[0] <= launches, (name, got)
        assert got[1] == waits, (name, got)
