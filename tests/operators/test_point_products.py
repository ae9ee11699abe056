"""Products of a plan with its own packed points and with directions, against dense float64."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import pytest
import reference
import torch
from labelled_costs import cost_between, dense_labelled_cost
from torch import Tensor

from otdd_flash.kernels.passes import plan_blocks
from otdd_flash.kernels.passes.block_products import Found
from otdd_flash.kernels.points.packed_points import PackedPoints
from otdd_flash.operators import triton_plans
from otdd_flash.operators.triton_operator import KernelOperator
from otdd_flash.operators.triton_plans import KernelPlan, PointProducts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.slow
EPSILON, DIM = 0.4, 136
N, M = 150, 70
# What multiplies has 22 bits; exponents are float32, and those of far rows large.
TOLERANCE = {False: 2e-7, True: 1e-5}
# Numbers are alike, so that their roundings add up.
OF_NUMBERS = 1e-5


@pytest.fixture(autouse=True)
def _several_blocks_of_a_streamed_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plans, "KEPT_BYTES", 0)
    monkeypatch.setattr(triton_plans, "holds", lambda *_: False)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(plan_blocks, "BLOCK_HEIGHT", 256)
        monkeypatch.setattr(plan_blocks, "BLOCK_WIDTH", 256)


class Case:
    """A plan with its products, and the same dense; some rows sum to far from their masses."""

    def __init__(self, classes: int, *, far: bool) -> None:
        draw = torch.Generator().manual_seed(0)
        x, y = (torch.randn(k, DIM, generator=draw) / DIM**0.5 + 3 for k in (N, M))
        a, b = (torch.rand(k, generator=draw).double() + 0.1 for k in (N, M))
        a[N // 2], b[0] = 0, 0
        self.a, self.b = (a / a.sum()).to(DEVICE), (b / b.sum()).to(DEVICE)
        one, other = (torch.arange(k, device=DEVICE) % classes for k in (N, M))
        sides = x.to(DEVICE), y.to(DEVICE), self.a, self.b
        costs = torch.rand(classes, classes, generator=draw).double().to(DEVICE)
        cost = cost_between(*sides, labels_x=one, labels_y=other, class_costs=costs)
        operator = KernelOperator(cost, "high")
        g = torch.zeros(M, device=DEVICE)
        for _ in range(5):
            f = operator.softmin_rows(g, EPSILON)
            g = operator.softmin_columns(f, EPSILON)
        if far:
            f = f + 12 * EPSILON * torch.randn(N, generator=draw).to(DEVICE)
        # Of a point without mass nothing is known.
        f[N // 2] = 1e4
        self.streamed = operator.plan(f, g, EPSILON).prepared
        assert isinstance(self.streamed, KernelPlan)
        found = self.streamed.with_points
        assert isinstance(found, PointProducts)
        self.products = found
        dense = dense_labelled_cost(cost)
        self.plan = reference.plan(dense, self.a, self.b, f, g, EPSILON)
        self.x, self.y = (points.to(DEVICE).double() - cost.centre for points in (x, y))
        self.directions = [
            torch.randn(k, DIM, generator=draw).to(DEVICE) * size + 5
            for k, size in ((N, 1.0), (M, 1e-3))
        ]

    def packed(self, side: int) -> PackedPoints:
        given = self.directions[side]
        left = self.left(side)
        return self.products.packed(given, given.mean(0), float(left.abs().max()), side)

    def left(self, side: int) -> Tensor:
        given = self.directions[side].double()
        return given - self.directions[side].mean(0).double()


@lru_cache
def case_of(classes: int, *, far: bool) -> Case:
    return Case(classes, far=far)


def joined(parts: Iterable[Found], size: int) -> tuple[Tensor, Tensor]:
    """All rows of a product, each once."""
    points = torch.full((size, DIM), torch.nan, device=DEVICE)
    numbers = torch.zeros(size, dtype=torch.float64, device=DEVICE)
    for part in parts:
        assert bool(points[part.rows].isnan().all())
        points[part.rows] = part.points
        if part.numbers is not None:
            numbers[part.rows] = part.numbers
    return points.double(), numbers


def agree(
    found: Tensor, weights: Tensor, values: Tensor, tolerance: float, size: Tensor | None = None
) -> None:
    """Up to what the sizes of all terms lose."""
    size = weights.abs() if size is None else size
    scale = size.sum(1, keepdim=True) * values.abs().max()
    error = (found - weights @ values).abs() / scale.clamp_min(1e-300)
    assert float(error.max()) <= tolerance


def test_products_with_points_and_directions() -> None:
    """There and back, with numbers beside; both parts of what is multiplied count."""
    case, tolerance = case_of(60, far=False), TOLERANCE[False]
    x, y = case.products.points
    agree(joined(case.products.times(y), N)[0], case.plan, case.y, tolerance)
    agree(joined(case.products.times(x, transposed=True), M)[0], case.plan.T, case.x, tolerance)
    for side, plan in ((0, case.plan.T), (1, case.plan)):
        q = torch.full((plan.shape[1],), 1e-4 / 3, device=DEVICE)
        found = case.products.times(case.packed(side), q, transposed=side == 0)
        points, numbers = joined(found, M if side == 0 else N)
        agree(points, plan, case.left(side), tolerance)
        agree(numbers[:, None], plan, q.double()[:, None], OF_NUMBERS)


def test_products_of_a_plan_that_changes() -> None:
    """Weights of directions on either side, whose sizes differ, and of numbers."""
    case, tolerance = case_of(2, far=True), TOLERANCE[True]
    x, y = case.products.points
    draw = torch.Generator().manual_seed(1)
    s, t = (torch.randn(k, generator=draw).to(DEVICE) for k in (N, M))
    pairs, factor = [(case.packed(0), y), (x, case.packed(1))], 1.5
    products = case.left(0) @ case.y.T + case.x @ case.left(1).T
    size = case.left(0).abs() @ case.y.abs().T + case.x.abs() @ case.left(1).abs().T
    weights = factor * products + s[:, None].double() + t.double()
    bound = case.plan * (factor * size.max() + s.abs().max() + t.abs().max())
    found, _ = joined(case.products.weighted(pairs, factor, (s, t)), N)
    agree(found, case.plan * weights, case.y, tolerance, bound)
    found, _ = joined(case.products.weighted(pairs, factor, (t, s), transposed=True), M)
    agree(found, (case.plan * weights).T, case.x, tolerance, bound.T)
