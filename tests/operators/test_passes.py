"""What tiles of scores in PyTorch take and hold; their passes are tested in tests/conformance."""

from __future__ import annotations

import pytest
import torch
from labelled_costs import labelled_cost
from torch import Tensor

from otdd_flash.operators import float64_rows, memory, plan
from otdd_flash.operators.matrix import MatrixOperator
from otdd_flash.operators.streamed import StreamedOperator


def test_a_plan_is_kept_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "UNASKED", 0)
    cost = torch.rand(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    operator = MatrixOperator(cost, *(torch.full((k,), 1 / k).double() for k in (6, 5)))
    at = torch.zeros(6), torch.zeros(5), 0.3
    for free, kind in ((2 * 8 * 30, plan.KeptPlan), (8 * 30, plan.StreamedPlan)):
        monkeypatch.setattr(memory, "free_memory", lambda _, free=free: free)
        assert isinstance(plan.plan_of(operator, *at), kind)
    for most, kind in ((8 * 30, plan.KeptPlan), (8 * 30 - 1, plan.StreamedPlan)):
        assert isinstance(plan.plan_of(operator, *at, most), kind)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_coordinate_is_that_of_either_sign(
    sign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float64_rows, "CHUNK_ELEMENTS_CPU", 60)
    x = torch.randn(67, 3, generator=torch.Generator().manual_seed(0)).double()
    x[5, 1] = sign * 40.0
    labelled = labelled_cost(x, classes=1)
    assert labelled.largest == pytest.approx(float((x - labelled.a @ x).abs().max()), rel=1e-12)
    torch.testing.assert_close(labelled.centre, labelled.a @ x)


def test_streaming_holds_nothing_of_the_size_of_the_scores() -> None:
    operator = StreamedOperator(
        labelled_cost(torch.randn(400, 4), torch.randn(300, 4)), torch.float32
    )
    held = [value for value in vars(operator).values() if isinstance(value, Tensor)]
    assert sum(value.numel() for value in held) < 400 * 300 / 10
