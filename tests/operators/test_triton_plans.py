"""Which plan is prepared where, and what that launches; products are in tests/conformance."""

from __future__ import annotations

import operation_counts
import pytest
import reference
import torch
from labelled_costs import dense_labelled_cost, labelled_cost

from otdd_flash import memory
from otdd_flash.kernels.passes import plan_blocks
from otdd_flash.operators import triton_plans
from otdd_flash.operators.base import StoredPlan
from otdd_flash.operators.triton_operator import KernelOperator
from otdd_flash.operators.triton_plans import FusedPlan, HeldPlan, KernelPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = 0.4


def operator(n: int, m: int | None, precision: str = "fast") -> KernelOperator:
    draw = torch.Generator().manual_seed(n)
    x, y = (torch.randn(size or 1, 5, generator=draw).to(DEVICE) / 2 for size in (n, m))
    cost = labelled_cost(x, None if m is None else y, 1, massless=True)
    return KernelOperator(cost, precision)


def potentials(cost: KernelOperator) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.rand(cost.shape[1], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for _ in range(3):
        g = cost.softmin_columns(cost.softmin_rows(g, EPSILON), EPSILON)
    return cost.softmin_rows(g, EPSILON), g


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter runs")
def test_a_held_plan_is_written_where_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_blocks, "BLOCK_WIDTH", 128)
    cost = operator(150, 270).refined
    plan = cost.plan(*potentials(cost), EPSILON)
    with operation_counts.OperationCounts(monkeypatch) as counts:
        assert isinstance(plan.quick, HeldPlan)
    # All columns at once, none of them copied from a block: its sum and three of its masses.
    assert counts.launches["plan_block_kernel"] == 1
    assert counts.operations <= 4, counts.operations


def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ASSUMED_FREE", 0)
    monkeypatch.setattr(memory, "free_memory", lambda _: 0)


@pytest.mark.slow
def test_a_plan_is_kept_in_float64_where_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many coordinates while it is small, one of few while memory allows."""
    n, m = 150, 140
    cost = operator(n, m)
    f, g = potentials(cost)
    monkeypatch.setattr(triton_plans, "KEPT_BYTES", 8 * n * m - 1)
    assert isinstance(cost.plan(f, g, EPSILON).prepared, StoredPlan)
    monkeypatch.setattr(triton_plans, "FEW_COORDINATES", 4)
    assert isinstance(cost.plan(f, g, EPSILON).prepared, KernelPlan)
    monkeypatch.setattr(triton_plans, "KEPT_BYTES", 8 * n * m)
    assert isinstance(cost.plan(f, g, EPSILON).prepared, StoredPlan)
    without_memory(monkeypatch)
    assert isinstance(cost.plan(f, g, EPSILON).prepared, KernelPlan)


@pytest.mark.slow
def test_a_plan_is_held_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = operator(140, 130)
    f, g = potentials(cost)
    without_memory(monkeypatch)
    monkeypatch.setattr(memory, "free_memory", lambda _: 2 * 2 * 256 * 256)
    assert isinstance(cost.plan(f, g, EPSILON).prepared.quick, HeldPlan)
    monkeypatch.setattr(memory, "free_memory", lambda _: 2 * 2 * 100 * 100)
    assert isinstance(cost.plan(f, g, EPSILON).prepared.quick, FusedPlan)
    assert isinstance(cost.plan(f, g, EPSILON, 2 * 256 * 256).prepared.quick, HeldPlan)
    monkeypatch.setattr(memory, "free_memory", lambda _: 2 * 2 * 256 * 256)
    assert isinstance(cost.plan(f, g, EPSILON, 2 * 100 * 100).prepared.quick, FusedPlan)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter runs")
def test_what_weights_entries_on_both_sides_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = operator(150, None, "high")
    x = cost.cost.points[0]
    f, _ = potentials(cost)
    without_memory(monkeypatch)
    # So large that what products of weights may be is all that keeps them in float16.
    points = 1e3 * x.double()
    found, along = cost.plan(f, None, EPSILON).prepared, points.flip(0)
    with operation_counts.OperationCounts(monkeypatch) as counts:
        got = found.times(points, [(along, points), (points, along)])
    assert counts.launches["pack_kernel"] == 2
    costs = dense_labelled_cost(cost.cost, cost.rounded_points())
    plan = reference.plan(costs, cost.a, cost.b, f, f, EPSILON)
    weighted = (plan * (along @ points.T + points @ along.T)) @ points
    assert float((got - weighted).abs().max()) <= 1e-4 * float(weighted.abs().max())
