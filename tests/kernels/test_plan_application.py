"""Plans applied in blocks, against dense float64."""

from __future__ import annotations

import pytest
import reference
import torch
from kernel_cases import (
    DEVICE,
    EPSILON,
    LARGE_CASES,
    SMALL,
    SMALL_CASES,
    cost_of,
    dense_cost,
    largest_error,
    potentials,
)
from pairwise import pairwise

from otdd_flash.kernels.passes import plan_blocks
from otdd_flash.operators import kernel
from otdd_flash.operators.base import refined
from otdd_flash.operators.kernel import KernelOperator

# Of the largest value that a row could have: float16 keeps 11 bits, two of them 22.
TOLERANCE = {"fast": 2**-10, "high": 2e-6}


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(plan_blocks, "BLOCK_HEIGHT", 256)
        monkeypatch.setattr(plan_blocks, "BLOCK_WIDTH", 256)


class Applied:
    """A plan of a case, with rows that have their masses or far from it."""

    def __init__(self, case, precision, near):
        self.operator = KernelOperator(cost_of(case), precision)
        cost = dense_cost(self.operator)
        offset, self.g = potentials(self.operator, EPSILON)
        exact = reference.softmin_rows(cost, self.operator.b, self.g, EPSILON).float()
        # Far ones sum to e^-40 to e^40 of their mass in a row: float16 alone would not hold them.
        self.f = exact if near else exact + 15 * offset
        self.plan = reference.plan(cost, self.operator.a, self.operator.b, self.f, self.g, EPSILON)
        # The exponents' own error, as of any float32 computation.
        self.rtol = 8e-6 * float(cost.max()) / EPSILON + largest_error(self.operator) / EPSILON
        self.precision = precision

    def check(self, got, weights, values):
        expected = weights @ values
        scale = weights.abs().sum(1, keepdim=True) * values.abs().max()
        error = (got.double() - expected).abs() / scale.clamp_min(1e-300)
        assert float(error.max()) <= TOLERANCE[self.precision] + self.rtol

    def check_masses(self, got, plan):
        torch.testing.assert_close(got, plan.sum(1), rtol=self.rtol + 1e-5, atol=1e-30)


CASES, PRECISIONS = [*SMALL_CASES, *LARGE_CASES], ["fast", "high"]
NEAR = [pytest.param(True, id="near"), pytest.param(False, id="far")]


@pytest.mark.slow(after=1)
@pairwise(case=CASES, near=NEAR, precision=PRECISIONS, columns=[1, 9, 20, 150], fused=[True, False])
def test_plan_times_matrix(case, precision, columns, near, fused, monkeypatch):
    """In tiles that are multiplied where they are computed, or in blocks."""
    if not fused:
        monkeypatch.setattr(kernel, "FEW_CHUNKS", 0)
    applied = Applied(case, precision, near)
    draw = torch.Generator().manual_seed(2)
    values = torch.randn(case[1], columns, generator=draw).double().to(DEVICE) * 30
    got = applied.operator.apply_plan(applied.f, applied.g, EPSILON, values)
    applied.check(got.values, applied.plan, values)
    applied.check_masses(got.masses, applied.plan)


@pytest.mark.slow
def test_the_refined_plan_is_that_of_the_original_points():
    """At so small an epsilon the plan of the rounded points is another one."""
    epsilon = 0.02
    fast = KernelOperator(cost_of(SMALL[2]), "fast")
    cost = dense_cost(KernelOperator(cost_of(SMALL[2]), "high"))
    _, g = potentials(fast, epsilon)
    f = reference.softmin_rows(cost, fast.b, g, epsilon).float()
    plan = reference.plan(cost, fast.a, fast.b, f, g, epsilon)
    values = torch.rand(SMALL[2][1], 1).double().to(DEVICE)
    carried = fast.a > 0
    expected = (plan @ values)[carried] / fast.a[carried, None]
    errors = []
    for operator in (refined(fast), fast):
        got = operator.apply_plan(f, g, epsilon, values).values[carried] / fast.a[carried, None]
        errors.append(float((got - expected).abs().max()))
    assert errors[0] < 2e-3 < errors[1]


@pytest.mark.slow(after=1)
@pairwise(case=CASES, near=NEAR, precision=PRECISIONS)
def test_transposed_plan_times_matrix(case, precision, near):
    applied = Applied(case, precision, near)
    draw = torch.Generator().manual_seed(2)
    values = torch.randn(case[0], 3, generator=draw).to(DEVICE)
    got = applied.operator.apply_plan(applied.f, applied.g, EPSILON, values, transposed=True)
    applied.check(got.values, applied.plan.T, values.double())
    applied.check_masses(got.masses, applied.plan.T)


@pytest.mark.slow(after=1)
@pairwise(case=CASES, near=NEAR, precision=PRECISIONS, rank=[1, 21])
def test_hadamard_weighted_plan_times_matrix(case, precision, rank, near):
    applied = Applied(case, precision, near)
    n, m, *_ = case
    draw = torch.Generator().manual_seed(3)
    left, right = (torch.randn(size, rank, generator=draw).to(DEVICE) for size in (n, m))
    values = torch.rand(m, 2, generator=draw).to(DEVICE)
    got = applied.operator.apply_plan(
        applied.f, applied.g, EPSILON, values, factors=(left * 1e3, right)
    )
    weights = applied.plan * (left.double() * 1e3 @ right.double().T)
    # Entries of A B^T are rounded relative to the largest that its norms allow.
    bound = float(left.norm(dim=1).max() * right.norm(dim=1).max()) * 1e3
    expected = weights @ values.double()
    error = (got.values.double() - expected).abs() / (applied.plan.sum(1, keepdim=True) * bound)
    assert float(error.nan_to_num(0).max()) <= 4 * TOLERANCE[precision] + applied.rtol
    applied.check_masses(got.masses, applied.plan)


@pytest.mark.slow(after=1)
@pairwise(case=CASES, near=NEAR, precision=PRECISIONS)
def test_hadamard_weighted_transposed_plan_times_matrix(case, precision, near):
    applied = Applied(case, precision, near)
    n, m, *_ = case
    draw = torch.Generator().manual_seed(3)
    left, right = (torch.randn(size, 3, generator=draw).to(DEVICE) for size in (n, m))
    values = torch.rand(n, 2, generator=draw).to(DEVICE)
    got = applied.operator.apply_plan(
        applied.f, applied.g, EPSILON, values, transposed=True, factors=(left, right)
    )
    bound = float(left.norm(dim=1).max() * right.norm(dim=1).max())
    expected = (applied.plan * (left.double() @ right.double().T)).T @ values.double()
    error = (got.values.double() - expected).abs() / (applied.plan.sum(0)[:, None] * bound)
    assert float(error.nan_to_num(0).max()) <= 4 * TOLERANCE[precision] + applied.rtol
