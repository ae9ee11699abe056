"""Plans in float16, held or evaluated anew, against dense float64."""

from __future__ import annotations

import math

import operation_counts
import pytest
import reference
import torch

from otdd_flash.kernels.linear.halves import to_halves
from otdd_flash.kernels.passes import plan_blocks
from otdd_flash.operators import kernel_plans, memory
from otdd_flash.operators.base import refined
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.plan import KeptPlan, StreamedPlan, plan_of
from otdd_flash.operators.triton_plans import ExactFusedPlan, FusedPlan, HeldPlan
from otdd_flash.solver.schur import SchurSystem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = 0.4
# Entries and the points that they are made of have eleven bits each.
UNIT = 2.0**-11


def operator(n: int, m: int, classes: int) -> KernelOperator:
    draw = torch.Generator().manual_seed(n)
    x, y = (torch.randn(size, 5, generator=draw).to(DEVICE) / 2 for size in (n, m))
    a, b = (torch.rand(size, generator=draw).double().to(DEVICE) + 0.1 for size in (n, m))
    a[n // 2], b[0] = 0, 0
    costs = torch.rand(classes, classes, generator=draw).double().to(DEVICE)
    labels = (torch.arange(size, device=DEVICE) % classes for size in (n, m))
    cost = LabelledCost(
        x,
        y,
        a / a.sum(),
        b / b.sum(),
        labels_x=next(labels),
        labels_y=next(labels),
        class_costs=costs,
        lambda_x=0.5,
    )
    return KernelOperator(cost, "fast")


def potentials(cost: KernelOperator) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.rand(cost.shape[1], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for _ in range(3):
        g = cost.softmin_columns(cost.softmin_rows(g, EPSILON), EPSILON)
    return cost.softmin_rows(g, EPSILON), g


def dense(cost: KernelOperator, f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    x, y = cost.seen_points()
    labels_x, labels_y = cost.cost.labels
    costs = reference.dense_cost(x, y, 0.5, cost.cost.class_costs, labels_x, labels_y)
    return reference.plan(costs, cost.a, cost.b, f, g, EPSILON)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [HeldPlan, FusedPlan])
@pytest.mark.parametrize(("n", "m", "classes"), [(150, 270, 1), (270, 140, 2), (130, 90, 40)])
def test_products_and_sums(
    n: int, m: int, classes: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is FusedPlan:
        without_memory(monkeypatch)
    monkeypatch.setattr(plan_blocks, "BLOCK_HEIGHT", 128)
    cost = operator(n, m, classes)
    f, g = potentials(cost)
    # Of a point without mass nothing is known.
    f[n // 2] = 1e4
    held = plan_of(cost, f, g, EPSILON).quick
    assert isinstance(held, kind)
    plan = dense(cost, f, g)
    draw = torch.Generator().manual_seed(2)
    values, others = (torch.randn(size, 19, generator=draw).double().to(DEVICE) for size in (m, n))
    values[:, 2] *= 1e-9
    for found, entries, given in (
        (held.times(values), plan, values),
        (held.transposed_times(others), plan.T, others),
    ):
        assert found.dtype == torch.float64
        error = (found - entries @ given).abs() / (entries @ given.abs()).clamp_min(1e-300)
        assert float(error.max()) <= 4 * UNIT
    assert float((held.rows - plan.sum(1)).abs().sum()) <= 4 * UNIT
    assert float((held.columns - plan.sum(0)).abs().sum()) <= 4 * UNIT
    # Sums are of the numbers that are multiplied: far nearer to each other than to the plan's.
    ones = torch.ones(m, 1, dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(held.times(ones)[:, 0], held.rows, rtol=1e-6, atol=0)
    # Numbers that are evaluated anew are rounded anew.
    rtol = 1e-6 if kind is HeldPlan else UNIT / 10
    torch.testing.assert_close(held.rows.sum(), held.columns.sum(), rtol=rtol, atol=0)


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
@pytest.mark.parametrize(("width", "blocks"), [(1024, 1), (512, 2), (316, 2), (256, 4)])
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


@pytest.mark.slow
def test_a_held_plan_is_of_points_that_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_blocks, "BLOCK_HEIGHT", 128)
    # In float16 such coordinates are multiples of a sixteenth, and costs of 400 move by some 2.
    far = 64 * torch.eye(5, device=DEVICE)
    x, y = (
        torch.cat((far + side[:5] + shift, side[5:]))
        for side, shift in zip(operator(150, 140, 1).cost.points, (0.0, 9.0), strict=True)
    )
    a, b = (torch.full((len(side),), 1 / len(side)).double().to(DEVICE) for side in (x, y))
    whole = LabelledCost(
        x,
        y,
        a,
        b,
        labels_x=torch.zeros(len(x), dtype=torch.int64, device=DEVICE),
        labels_y=torch.zeros(len(y), dtype=torch.int64, device=DEVICE),
        class_costs=a.new_zeros(1, 1),
        lambda_x=1.0,
    )
    cost = refined(KernelOperator(whole, "fast"))
    assert isinstance(cost, KernelOperator)
    f, g = potentials(cost)
    held = plan_of(cost, f, g, EPSILON).quick
    assert isinstance(held, HeldPlan)
    plan = reference.plan(reference.dense_cost(x, y, 1.0), a, b, f, g, EPSILON)
    entries = held.times(torch.eye(len(y), dtype=torch.float64, device=DEVICE))
    # Scores near 20,000 in float32, and then eleven bits.
    assert float((entries - plan).abs().max()) <= 2e-2 * float(plan.max())


@pytest.mark.slow
def test_columns_of_any_size_are_multiplied_alike() -> None:
    cost = operator(150, 140, 1)
    f, g = potentials(cost)
    values = torch.randn(140, 2, generator=torch.Generator().manual_seed(2)).double().to(DEVICE)
    values[:, 1] = 1e-9 * values[:, 0]
    for found in (
        StreamedPlan(cost, f, g, EPSILON).times(values),
        plan_of(cost, f, g, EPSILON).quick.times(values),
    ):
        torch.testing.assert_close(found[:, 1], 1e-9 * found[:, 0], rtol=1e-5, atol=1e-13)


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
@pytest.mark.parametrize("classes", [1, 3])
def test_a_plan_in_float64_is_that_of_the_points_themselves(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, m = 150, 140
    cost = operator(n, m, classes)
    f, g = potentials(cost)
    # Of points without mass nothing is known.
    unknown = f.clone(), g.clone()
    unknown[0][n // 2], unknown[1][0] = torch.nan, torch.nan
    held = plan_of(cost, *unknown, EPSILON)
    assert isinstance(held, KeptPlan)
    (x, y), (labels_x, labels_y) = cost.cost.points, cost.cost.labels
    costs = reference.dense_cost(
        x.double(), y.double(), 0.5, cost.cost.class_costs, labels_x, labels_y
    )
    plan = reference.plan(costs, cost.a, cost.b, f, g, EPSILON)
    identity = torch.eye(m, dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(held.times(identity), plan, rtol=1e-12, atol=0)
    # A plan of many coordinates is kept while it is small, one of few while memory allows.
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
@pytest.mark.parametrize("classes", [1, 3])
def test_a_fused_plan_is_that_of_the_points_themselves(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products one way and back, sums, many columns, weighted entries, and rows out of range."""
    n, m = 150, 270
    cost = refined(operator(n, m, classes))
    assert isinstance(cost, KernelOperator)
    f, g = potentials(cost)
    without_memory(monkeypatch)
    plan, found = dense(cost, f, g), plan_of(cost, f, g, EPSILON)
    assert isinstance(found, ExactFusedPlan)
    draw = torch.Generator().manual_seed(2)
    for count in (1, 20, 400):
        values, others = (
            torch.randn(size, count, generator=draw).double().to(DEVICE) for size in (m, n)
        )
        for got, entries, given in (
            (found.times(values), plan, values),
            (found.transposed_times(others), plan.T, others),
        ):
            error = (got - entries @ given).abs() / (entries @ given.abs()).clamp_min(1e-300)
            assert float(error.max()) <= 2e-5
    torch.testing.assert_close(found.rows, plan.sum(1), rtol=2e-5, atol=1e-30)
    torch.testing.assert_close(found.columns, plan.sum(0), rtol=2e-5, atol=1e-30)
    left, right = (torch.rand(size, 2, generator=draw).double().to(DEVICE) for size in (n, m))
    weighted = (plan * (left @ right.T)) @ values
    got = found.times(values, (left, right))
    assert float((got - weighted).abs().max()) <= 1e-4 * float(weighted.abs().max())
    far = plan_of(cost, f + 8 * EPSILON, g, EPSILON)
    scale = math.exp(8)
    torch.testing.assert_close(far.rows, scale * plan.sum(1), rtol=1e-4, atol=1e-30)
    torch.testing.assert_close(far.columns, scale * plan.sum(0), rtol=1e-4, atol=1e-30)
    assert float((far.times(values) - scale * plan @ values).abs().max()) <= 1e-3 * scale


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeptPlan, StreamedPlan, ExactFusedPlan])
def test_entries_are_weighted_by_two_products(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of factors of very different sizes, whose products are alike, both ways."""
    n, m = 150, 130
    monkeypatch.setattr(kernel_plans, "KEPT_BYTES", 8 * n * m * (kind is KeptPlan))
    monkeypatch.setattr(kernel_plans, "FEW_COORDINATES", 4)
    cost = refined(operator(n, m, 1))
    f, g = potentials(cost)
    plan = (
        StreamedPlan(cost, f, g, EPSILON) if kind is StreamedPlan else plan_of(cost, f, g, EPSILON)
    )
    assert isinstance(plan, kind)
    draw = torch.Generator().manual_seed(2)
    (left, one), (right, two) = (
        torch.rand(2, size, 3, generator=draw).double().to(DEVICE) for size in (n, m)
    )
    left, two = 1e7 * left, 1e7 * two
    weights = dense(cost, f, g) * (left @ right.T + one @ two.T)
    values, others = (torch.rand(size, 5, generator=draw).double().to(DEVICE) for size in (m, n))
    for got, expected in (
        (plan.times(values.to(plan.dtype), (left, right), (one, two)), weights @ values),
        (
            plan.transposed_times(others.to(plan.dtype), (left, right), (one, two)),
            weights.T @ others,
        ),
    ):
        assert float((got - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter runs")
def test_what_weights_entries_on_both_sides_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = operator(150, 150, 1).cost
    x, labels = of.points[0], of.labels[0]
    given = {"labels_x": labels, "labels_y": labels, "class_costs": of.class_costs, "lambda_x": 0.5}
    cost = KernelOperator(LabelledCost(x, x, of.a, of.a, **given), "high")
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
    of = operator(150, 150, 3).cost
    x, labels = of.points[0], of.labels[0]
    costs = (of.class_costs + of.class_costs.T) / 2
    given = {"labels_x": labels, "labels_y": labels, "class_costs": costs, "lambda_x": 0.5}
    cost = KernelOperator(LabelledCost(x, x, of.a, of.a, **given), "high")
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
