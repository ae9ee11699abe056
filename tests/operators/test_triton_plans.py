"""Which plan is prepared where, and what that launches; products are in tests/conformance."""

from __future__ import annotations

import operation_counts
import pytest
import reference
import torch
from labelled_costs import dense_labelled_cost, labelled_cost

from otdd_flash.kernels.linear.halves import to_halves
from otdd_flash.kernels.passes import plan_blocks
from otdd_flash.operators import kernel_plans, memory
from otdd_flash.operators.base import refined
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.plan import KeptPlan, StreamedPlan, plan_of
from otdd_flash.operators.triton_plans import ExactFusedPlan, FusedPlan, HeldPlan
from otdd_flash.solver.schur import SchurSystem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = 0.4


def operator(n: int, m: int | None, classes: int, precision: str = "fast") -> KernelOperator:
    draw = torch.Generator().manual_seed(n)
    x, y = (torch.randn(size or 1, 5, generator=draw).to(DEVICE) / 2 for size in (n, m))
    return KernelOperator(
        labelled_cost(x, None if m is None else y, classes, massless=True), precision
    )


def potentials(cost: KernelOperator) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.rand(cost.shape[1], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for _ in range(3):
        g = cost.softmin_columns(cost.softmin_rows(g, EPSILON), EPSILON)
    return cost.softmin_rows(g, EPSILON), g


def dense(cost: KernelOperator, f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    costs = dense_labelled_cost(cost.cost, cost.seen_points())
    return reference.plan(costs, cost.a, cost.b, f, g, EPSILON)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter runs")
def test_a_held_plan_is_written_where_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_blocks, "BLOCK_WIDTH", 128)
    cost = refined(operator(150, 270, 1))
    plan = StreamedPlan(cost, *potentials(cost), EPSILON)
    with operation_counts.OperationCounts(monkeypatch) as counts:
        assert isinstance(plan.quick, HeldPlan)
    # All columns at once, none of them copied from a block: its sum and three of its masses.
    assert counts.launches["plan_block_kernel"] == 1
    assert counts.operations <= 4, counts.operations


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter runs")
@pytest.mark.parametrize(("width", "blocks"), [(1024, 1), (316, 2), (256, 4)])
def test_entries_of_a_small_plan_are_weighted_in_few_blocks(
    width: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One up to the size of a block, two up to some more, then of that size."""
    # Of 256 rows and 1,024 columns with their padding.
    n, m = 150, 1000
    monkeypatch.setattr(plan_blocks, "BLOCK_HEIGHT", 256)
    monkeypatch.setattr(plan_blocks, "BLOCK_WIDTH", width)
    monkeypatch.setattr(kernel_plans, "KEPT_BYTES", 0)
    monkeypatch.setattr(kernel_plans, "FEW_COORDINATES", 4)
    cost = refined(operator(n, m, 1))
    f, g = potentials(cost)
    found = plan_of(cost, f, g, EPSILON)
    assert isinstance(found, ExactFusedPlan)
    draw = torch.Generator().manual_seed(2)
    left, right, values = (torch.rand(size, 2, generator=draw).double() for size in (n, m, m))
    with operation_counts.OperationCounts(monkeypatch) as counts:
        got = found.times(values, (left, right))
    assert counts.launches["plan_block_kernel"] == blocks
    launched = found._weighted[0]._blocks
    # Nothing describes to a GPU what is not read.
    given = launched.unweighted.factors
    assert len(given) == 4
    assert all(each is launched.terms.bias for each in given)
    weighted = (dense(cost, f, g) * (left @ right.T)) @ values
    assert float((got - weighted).abs().max()) <= 1e-4 * float(weighted.abs().max())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter runs")
def test_a_plan_and_the_one_rounded_to_float16_share_their_terms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_plans, "KEPT_BYTES", 0)
    monkeypatch.setattr(kernel_plans, "FEW_COORDINATES", 4)
    cost = refined(operator(150, 130, 1))
    at = *potentials(cost), EPSILON
    with operation_counts.OperationCounts(monkeypatch) as counts:
        plan = plan_of(cost, *at)
        assert isinstance(plan, ExactFusedPlan)
        assert isinstance(plan.quick, HeldPlan)
        assert plan.quick is plan.quick
    # Of products with P, and with its transpose.
    assert counts.launches["plan_terms_kernel"] == 2


def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "UNASKED", 0)
    monkeypatch.setattr(memory, "free_memory", lambda _: 0)


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True])
def test_what_float16_does_not_hold_is_evaluated_anew(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not held:
        without_memory(monkeypatch)
    cost = operator(140, 130, 1)
    f, g = potentials(cost)
    assert isinstance(plan_of(cost, f, g, EPSILON).quick, (HeldPlan, FusedPlan))
    exact = plan_of(cost, f + 4 * EPSILON, g, EPSILON)
    assert exact.quick is exact


@pytest.mark.slow
def test_a_plan_is_kept_in_float64_where_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many coordinates while it is small, one of few while memory allows."""
    n, m = 150, 140
    cost = operator(n, m, 1)
    f, g = potentials(cost)
    monkeypatch.setattr(kernel_plans, "KEPT_BYTES", 8 * n * m - 1)
    assert isinstance(plan_of(cost, f, g, EPSILON), KeptPlan)
    monkeypatch.setattr(kernel_plans, "FEW_COORDINATES", 4)
    assert isinstance(plan_of(cost, f, g, EPSILON), StreamedPlan)
    monkeypatch.setattr(kernel_plans, "KEPT_BYTES", 8 * n * m)
    assert isinstance(plan_of(cost, f, g, EPSILON), KeptPlan)
    without_memory(monkeypatch)
    assert isinstance(plan_of(cost, f, g, EPSILON), StreamedPlan)


@pytest.mark.slow
def test_a_plan_is_held_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = operator(140, 130, 1)
    f, g = potentials(cost)
    without_memory(monkeypatch)
    monkeypatch.setattr(memory, "free_memory", lambda _: 2 * 2 * 256 * 256)
    assert isinstance(plan_of(cost, f, g, EPSILON).quick, HeldPlan)
    monkeypatch.setattr(memory, "free_memory", lambda _: 2 * 2 * 100 * 100)
    assert isinstance(plan_of(cost, f, g, EPSILON).quick, FusedPlan)
    assert isinstance(plan_of(cost, f, g, EPSILON, 2 * 256 * 256).quick, HeldPlan)
    monkeypatch.setattr(memory, "free_memory", lambda _: 2 * 2 * 256 * 256)
    assert isinstance(plan_of(cost, f, g, EPSILON, 2 * 100 * 100).quick, FusedPlan)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter runs")
def test_what_weights_entries_on_both_sides_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = operator(150, None, 1, "high")
    x = cost.cost.points[0]
    f, _ = potentials(cost)
    without_memory(monkeypatch)
    found, along = plan_of(cost, f, f, EPSILON), x.double().flip(0)
    points = x.double()
    with operation_counts.OperationCounts(monkeypatch) as counts:
        got = found.times(points, (along, points), (points, along))
    assert counts.launches["pack_kernel"] == 2
    weighted = (dense(cost, f, f) * (along @ points.T + points @ along.T)) @ points
    assert float((got - weighted).abs().max()) <= 1e-4 * float(weighted.abs().max())


@pytest.mark.slow
def test_a_symmetric_plan_has_one_product_for_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cloud with itself at one potential; two equal ones are two."""
    cost = operator(150, None, 3, "high")
    f, _ = potentials(cost)
    without_memory(monkeypatch)
    plan, values = dense(cost, f, f), torch.rand(150, 3, dtype=torch.float64, device=DEVICE)
    for other, sides in ((f, 1), (f.clone(), 2)):
        found = plan_of(cost, f, other, EPSILON)
        assert isinstance(found, ExactFusedPlan)
        assert len({id(product) for product in found._products}) == sides
        for got in (found.times(values), found.transposed_times(values)):
            assert float((got - plan @ values).abs().max()) <= 2e-5 * float(plan.sum(1).max())
        torch.testing.assert_close(found.columns, plan.sum(0), rtol=2e-5, atol=1e-30)
        assert (found.columns is found.rows) == (sides == 1)
        left, right = values[:, :2], values[:, 1:]
        weighted = (plan * (left @ right.T)).T @ values
        got = found.transposed_times(values, (left, right))
        assert float((got - weighted).abs().max()) <= 1e-4 * float(weighted.abs().max())


@pytest.mark.slow
def test_images_of_systems_are_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan whose rows are computed in several ranges of columns."""
    cost = refined(operator(150, 270, 1))
    f, g = potentials(cost)
    monkeypatch.setattr(kernel_plans, "KEPT_BYTES", 0)
    monkeypatch.setattr(kernel_plans, "FEW_COORDINATES", 0)
    plan = plan_of(cost, f, g, EPSILON)
    assert isinstance(plan, ExactFusedPlan)
    system = SchurSystem(plan)
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(270, 3, generator=draw, dtype=torch.float64).to(DEVICE)
    assert system.layout is not None
    image = system.image(*to_halves(values, system.layout, multiple=16))
    assert image.found.slots > 1 or values.is_cuda
    products = image.found.merged().double().sum(1)[image.position, :3] / image.scales
    found = image.diagonal.view(-1, 1) * values + image.weights[:, None] * products
    expected = system.times(values)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
