"""Every way of holding a cost carries out the same passes, checked against dense float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.operators import float64_rows, memory, plan, streamed, tiled
from otdd_flash.operators.base import Applied
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.matrix import MatrixOperator
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.operators.tiled import TiledOperator

# Relative to the largest cost: float32 carries 24 bits, scores are sums of a few such terms.
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}
SIZES = [(1, 1, 1), (1, 7, 2), (33, 70, 3), (64, 128, 16), (257, 31, 5)]
LAMBDA_X = 0.7
EPSILON = 0.3


@dataclass(frozen=True)
class Case:
    """A dense problem and the operator under test."""

    operator: TiledOperator
    cost: Tensor
    a: Tensor
    b: Tensor
    f: Tensor
    g: Tensor

    @property
    def atol(self) -> float:
        return TOLERANCE[self.operator.dtype] * float(self.cost.max())

    @property
    def plan(self) -> Tensor:
        return reference.plan(self.cost, self.a, self.b, self.f, self.g, EPSILON)


@pytest.fixture(params=["streamed", "stored", "given"])
def held(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=SIZES, ids=str)
def case(
    request: pytest.FixtureRequest,
    held: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> Case:
    # So small that even these sizes are cut into several blocks and tiles.
    monkeypatch.setattr(streamed, "BLOCK_ELEMENTS_CPU", 900)
    monkeypatch.setattr(tiled, "TILE_ELEMENTS_CPU", 300)
    monkeypatch.setattr(float64_rows, "CHUNK_ELEMENTS_CPU", 60)
    return make_case(*request.param, held, dtype)


def make_case(n: int, m: int, d: int, held: str, dtype: torch.dtype) -> Case:
    draw = torch.Generator().manual_seed(n + m)
    x = torch.randn(n, d, generator=draw) + 3
    y = torch.randn(m, d, generator=draw) + 3
    a, b = torch.rand(n, generator=draw).double(), torch.rand(m, generator=draw).double()
    if n > 1 and m > 1:
        a[n // 2] = b[0] = 0
    a, b = a / a.sum(), b / b.sum()
    labels_x = torch.randint(0, 3, (n,), generator=draw)
    labels_y = torch.randint(0, 2, (m,), generator=draw)
    class_costs = torch.rand(3, 2, generator=draw).double() * 5
    labelled = LabelledCost(
        x,
        y,
        a,
        b,
        labels_x=labels_x,
        labels_y=labels_y,
        class_costs=class_costs,
        lambda_x=LAMBDA_X,
    )
    operator: TiledOperator = StreamedOperator(labelled, dtype)
    cost = reference.dense_cost(x, y, LAMBDA_X, class_costs, labels_x, labels_y)
    if held == "stored":
        operator = StoredOperator.keep(labelled, dtype)
    elif held == "given":
        operator = MatrixOperator(cost.to(dtype), a, b)
    f, g = (torch.randn(size, generator=draw, dtype=dtype) for size in (n, m))
    return Case(operator, cost, a, b, f, g)


def test_softmin_of_rows(case: Case) -> None:
    expected = reference.softmin_rows(case.cost, case.b, case.g, EPSILON)
    torch.testing.assert_close(
        case.operator.softmin_rows(case.g, EPSILON).double(), expected, rtol=0, atol=case.atol
    )


def test_softmin_of_columns(case: Case) -> None:
    expected = reference.softmin_rows(case.cost.T, case.a, case.f, EPSILON)
    torch.testing.assert_close(
        case.operator.softmin_columns(case.f, EPSILON).double(), expected, rtol=0, atol=case.atol
    )


@pytest.mark.parametrize("epsilon", [1e-3, 1e3])
def test_extreme_epsilon_neither_overflows_nor_loses_digits(case: Case, epsilon: float) -> None:
    # Exponents reach tens of thousands at the small epsilon: most terms underflow to 0.
    expected = reference.softmin_rows(case.cost, case.b, case.g, epsilon)
    atol = case.atol + TOLERANCE[case.operator.dtype] * epsilon
    torch.testing.assert_close(
        case.operator.softmin_rows(case.g, epsilon).double(), expected, rtol=0, atol=atol
    )
    expected = reference.softmin_rows(case.cost.T, case.a, case.f, epsilon)
    torch.testing.assert_close(
        case.operator.softmin_columns(case.f, epsilon).double(), expected, rtol=0, atol=atol
    )


def relative(case: Case) -> float:
    """An exponent's error is the cost's over epsilon."""
    return 4 * case.atol / EPSILON


def assert_near(got: Applied, plan: Tensor, values: Tensor, rtol: float) -> None:
    torch.testing.assert_close(got.values.double(), plan @ values, rtol=rtol, atol=1e-30)
    torch.testing.assert_close(got.masses, plan.sum(1), rtol=rtol, atol=1e-30)


def test_plan_application(case: Case) -> None:
    values = torch.rand(case.b.shape[0], 3, dtype=torch.float64) + 0.5
    got = case.operator.apply_plan(case.f, case.g, EPSILON, values)
    assert_near(got, case.plan, values, relative(case))


def test_transposed_plan_application(case: Case) -> None:
    values = torch.rand(case.a.shape[0], 2, dtype=torch.float64) + 0.5
    got = case.operator.apply_plan(case.f, case.g, EPSILON, values, transposed=True)
    assert_near(got, case.plan.T, values, relative(case))


def test_hadamard_weighted_plan_application(case: Case) -> None:
    (n, m) = case.operator.shape
    values = torch.rand(m, 2, dtype=torch.float64) + 0.5
    left, right = torch.rand(n, 4).double() + 0.5, torch.rand(m, 4).double() + 0.5
    got = case.operator.apply_plan(case.f, case.g, EPSILON, values, factors=(left, right))
    expected = (case.plan * (left @ right.T)) @ values
    rtol = relative(case)
    torch.testing.assert_close(got.values.double(), expected, rtol=rtol, atol=1e-30)
    torch.testing.assert_close(got.masses, case.plan.sum(1), rtol=rtol, atol=1e-30)


def test_transposed_hadamard_weighted_plan_application(case: Case) -> None:
    (n, m) = case.operator.shape
    values = torch.rand(n, 2, dtype=torch.float64) + 0.5
    factors = torch.rand(n, 4).double() + 0.5, torch.rand(m, 4).double() + 0.5
    got = case.operator.apply_plan(
        case.f, case.g, EPSILON, values, transposed=True, factors=factors
    )
    expected = (case.plan * (factors[0] @ factors[1].T)).T @ values
    rtol = relative(case)
    torch.testing.assert_close(got.values.double(), expected, rtol=rtol, atol=1e-30)
    torch.testing.assert_close(got.masses, case.plan.sum(0), rtol=rtol, atol=1e-30)


@pytest.mark.parametrize(("block", "few"), [(1 << 20, plan.FEW_COLUMNS), (1 << 20, 0), (64, 0)])
def test_plans_that_are_kept_and_that_are_not(
    case: Case, block: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "BLOCK_CPU", block)
    monkeypatch.setattr(plan, "FEW_COLUMNS", few)
    (n, m), rtol = case.operator.shape, relative(case)
    at = case.f, case.g, EPSILON
    kept = plan.plan_of(case.operator, *at)
    stored = isinstance(case.operator, StoredOperator | MatrixOperator)
    assert isinstance(kept, plan.KeptPlan if stored else plan.StreamedPlan)
    draw = torch.Generator().manual_seed(0)
    rows, columns, *factors = (
        torch.rand(size, k, generator=draw).double() + 0.5
        for size, k in ((m, 3), (n, 3), (n, 2), (m, 2))
    )
    for each in (kept, plan.StreamedPlan(case.operator, *at)):
        torch.testing.assert_close(each.rows, case.plan.sum(1), rtol=rtol, atol=1e-30)
        torch.testing.assert_close(each.columns, case.plan.sum(0), rtol=rtol, atol=1e-30)
        for weights in (None, (factors[0], factors[1])):
            entries = case.plan if weights is None else case.plan * (weights[0] @ weights[1].T)
            got = each.times(rows, weights), each.transposed_times(columns, weights)
            for found, expected in zip(got, (entries @ rows, entries.T @ columns), strict=True):
                assert found.dtype == each.dtype
                torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-30)


def test_a_plan_is_kept_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "UNASKED", 0)
    cost = torch.rand(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    operator = MatrixOperator(cost, *(torch.full((k,), 1 / k).double() for k in (6, 5)))
    at = torch.zeros(6), torch.zeros(5), EPSILON
    for free, kind in ((2 * 8 * 30, plan.KeptPlan), (8 * 30, plan.StreamedPlan)):
        monkeypatch.setattr(memory, "free_memory", lambda _, free=free: free)
        assert isinstance(plan.plan_of(operator, *at), kind)
    for most, kind in ((8 * 30, plan.KeptPlan), (8 * 30 - 1, plan.StreamedPlan)):
        assert isinstance(plan.plan_of(operator, *at, most), kind)


def test_mean_cost_and_range(case: Case) -> None:
    expected = float(case.a @ case.cost @ case.b)
    assert case.operator.costs.mean == pytest.approx(expected, abs=case.atol)
    carried = case.cost[case.a > 0][:, case.b > 0]
    costs = case.operator.costs
    assert costs.lowest <= float(carried.min()) + case.atol
    assert costs.highest >= float(carried.max()) - case.atol


def test_computed_costs_are_within_the_stated_error(case: Case) -> None:
    operator = case.operator
    computed = -torch.cat([block.clone() for _, block in operator.negative_costs()]).double()
    # A given matrix is taken as it is, in its own precision.
    given = operator.cost_rounding == 0 == max(float(side.max()) for side in operator.cost_errors)
    truth = case.cost.to(operator.dtype).double() if given else case.cost
    rows, columns = operator.magnitudes
    sizes = rows[:, None] + columns[None, :]
    carried = (case.a > 0)[:, None] & (case.b > 0)
    assert bool((truth.abs() <= sizes * (1 + 1e-12))[carried].all())
    of_rows, of_columns = operator.cost_errors
    allowed = operator.cost_rounding * truth.abs() + of_rows[:, None] + of_columns[None, :]
    # Of the reference itself.
    assert bool(((computed - truth).abs() <= allowed + 1e-15 * sizes).all())


def test_expected_costs(case: Case) -> None:
    masses = torch.rand(case.b.shape, dtype=torch.float64)
    got = case.operator.expected_costs(masses)
    atol = case.atol * float(masses.sum())
    torch.testing.assert_close(got, case.cost @ masses, rtol=0, atol=atol)


@pytest.mark.parametrize("size", [1, 33])
def test_own_costs(held: str, dtype: torch.dtype, size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    x, masses = torch.randn(size, 4, generator=draw) + 3, torch.ones(size).double() / size
    labels = torch.randint(0, 3, (size,), generator=draw)
    classes = torch.rand(3, 3, generator=draw).double()
    labelled = LabelledCost(
        x, x, masses, masses, labels_x=labels, labels_y=labels, class_costs=classes, lambda_x=0.5
    )
    operator: TiledOperator = StreamedOperator(labelled, dtype)
    cost = reference.dense_cost(x, x, 0.5, classes, labels, labels)
    if held == "stored":
        operator = StoredOperator.keep(labelled, dtype)
    elif held == "given":
        operator = MatrixOperator(cost.to(dtype), masses, masses)
    atol = TOLERANCE[dtype] * float(cost.max())
    torch.testing.assert_close(operator.own_costs(), cost.diagonal(), rtol=0, atol=atol)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_coordinate_is_that_of_either_sign(
    sign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float64_rows, "CHUNK_ELEMENTS_CPU", 60)
    x = torch.randn(67, 3, generator=torch.Generator().manual_seed(0)).double()
    x[5, 1] = sign * 40.0
    masses, labels = torch.ones(67).double() / 67, torch.zeros(67, dtype=torch.int64)
    labelled = LabelledCost(
        *(x, x, masses, masses),
        labels_x=labels,
        labels_y=labels,
        class_costs=torch.zeros(1, 1).double(),
        lambda_x=0.5,
    )
    assert labelled.largest == pytest.approx(float((x - x.mean(0)).abs().max()), rel=1e-12)
    torch.testing.assert_close(labelled.centre, x.mean(0))


def test_far_from_the_origin_costs_keep_their_digits() -> None:
    """Centring makes the cost of a cloud at 1,000 as exact as at 0."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 3, generator=draw), torch.rand(30, 3, generator=draw)
    x, y = ((points * 1024).round() / 1024 + 1000 for points in (x, y))
    uniform = torch.full((40,), 1 / 40).double(), torch.full((30,), 1 / 30).double()
    labelled = LabelledCost(
        x,
        y,
        *uniform,
        labels_x=torch.zeros(40, dtype=torch.int64),
        labels_y=torch.zeros(30, dtype=torch.int64),
        class_costs=torch.zeros(1, 1).double(),
        lambda_x=1.0,
    )
    operator = StreamedOperator(labelled, torch.float32)
    (_, scores), *_ = operator.score_blocks()
    computed = operator.row_offset[:, None] - scores
    expected = reference.dense_cost(x, y, 1.0)
    torch.testing.assert_close(computed.double(), expected, rtol=0, atol=1e-6)


def test_streaming_holds_nothing_of_the_size_of_the_scores() -> None:
    case = make_case(400, 300, 4, "streamed", torch.float32)
    held = [value for value in vars(case.operator).values() if isinstance(value, Tensor)]
    assert sum(value.numel() for value in held) < 400 * 300 / 10
