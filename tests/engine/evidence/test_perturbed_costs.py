"""Bounds on what errors of costs do, where all errors are equal and nothing cancels."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from attained import assert_nearly_attained
from torch import Tensor

from otdd_flash.engine.evidence.dual import dual_value
from otdd_flash.engine.evidence.perturbed_costs import (
    growth,
    hidden_after_update,
    outwards,
    share_of_costs,
)
from otdd_flash.operators.base import Marginals
from otdd_flash.operators.matrix import MatrixOperator

EPSILON = 0.5


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.rand(size, generator=draw).double() + 0.1 for size in (7, 5))
    return torch.rand(7, 5, generator=draw).double(), a / a.sum(), b / b.sum()


def sums_of(
    plan: Tensor, *, rows: float = 0.0, columns: float = 0.0, share: float = 0.0, off: float = 0.0
) -> Marginals:
    """Marginals of a plan (n, m) with errors of costs by rows and columns, of them, and of sums."""
    return Marginals(
        plan.sum(1),
        plan.sum(0),
        torch.full((plan.shape[0],), rows, dtype=torch.float64),
        torch.full((plan.shape[1],), columns, dtype=torch.float64),
        cost_rounding=share,
        relative_error=off,
        lost=0.0,
    )


def hidden_mass(sums: Tensor, errors: Tensor) -> float:
    """One side of (2)."""
    return float(sums @ growth(sums, errors, EPSILON)) / 2


@pytest.mark.parametrize("error", [1e-6, 0.1, 1.0])
def test_errors_hide_mass(error: float) -> None:
    """Every cost is too high by as much as its row and its column allow."""
    cost, a, b = drawn()
    _, f, g = reference.entropic_transport(cost, a, b, EPSILON)
    true = reference.plan(cost, a, b, f, g, EPSILON)
    computed = reference.plan(cost + 2 * error, a, b, f, g, EPSILON)
    sides = (computed.sum(1), 7), (computed.sum(0), 5)
    found = sum(
        hidden_mass(sums, torch.full((size,), error, dtype=torch.float64)) for sums, size in sides
    )
    for side in (0, 1):
        gap = (true.sum(side) - computed.sum(side)).abs().sum()
        assert_nearly_attained(gap, found, 1 - 1e-9)


def test_points_without_mass_hide_none() -> None:
    sums, errors = real(0, 1), real(1e9, 0)
    assert hidden_mass(sums, errors) == 0


def diagonal() -> tuple[Marginals, Tensor]:
    """One row that grows much, and whose column alone has errors."""
    return sums_of(torch.diag(real(0.2, 0.8))), real(3, 1)


@pytest.mark.parametrize("errors", [real(0.1, 0), real(0.1, 0.1)])
def test_errors_hide_mass_of_columns_that_grew(errors: Tensor) -> None:
    """Either the one that grew most has all errors, or what grew has the largest."""
    sums, factors = diagonal()
    true, before = hidden_mass(sums.columns * factors, errors), hidden_mass(sums.columns, errors)
    largest = float(growth(sums.columns, errors, EPSILON).max()) / 2
    moved = float(sums.rows @ (factors - 1).abs())
    found = hidden_after_update(before, largest, float(factors.max()), moved)
    assert_nearly_attained(true, found, 1 - 1e-9)


def test_a_share_of_every_cost() -> None:
    """Costs whose mean is near 0: nearly all of them are just below, the dearest weigh up most."""
    far, share = 0.005, 1e-3
    b = real(1 - far, far)
    cost = real(-1, (1 - far) / far)[None]
    one = torch.ones(1, dtype=torch.float64)
    # There is one plan between one point and two.
    truth, moved = ((one @ each @ b) for each in (cost, cost - share * cost.abs()))
    found = share_of_costs(share, truth, float(cost.min()))
    assert_nearly_attained(truth - moved, found, 0.98)


def test_a_share_of_costs_above_zero_is_one_of_the_value() -> None:
    assert float(share_of_costs(0.25, torch.tensor(3.0), 1.0)) == 1.5
    assert float(share_of_costs(0.25, torch.tensor(-3.0), -4.0)) == 3.5


@pytest.mark.parametrize("sign", [1, -1])
def test_ends_move_by_the_errors_of_costs(sign: int) -> None:
    """Of costs that are all off by as much as their rows and columns allow, one way."""
    cost, a, b = drawn()
    truth, f, g = reference.entropic_transport(cost, a, b, EPSILON)
    perturbed, _, _ = reference.entropic_transport(cost + sign * 3e-3, a, b, EPSILON)
    sums = sums_of(reference.plan(cost, a, b, f, g, EPSILON), rows=1e-3, columns=2e-3)
    mean = a @ sums.row_errors + b @ sums.column_errors
    ends = real(perturbed)[0], real(perturbed)[0]
    operator = MatrixOperator(cost, a, b)
    low, high = outwards(operator.costs, sums, ends, mean, a @ f.abs() + b @ g.abs(), EPSILON)
    moved = (perturbed - low, high - perturbed)[sign < 0]
    assert_nearly_attained(sign * (perturbed - truth), moved, 1 - 1e-6)


def test_ends_move_by_the_errors_of_sums() -> None:
    """Rows that look smaller than they are get potentials that are too high."""
    cost, a, b = drawn()
    truth, f, g = reference.entropic_transport(cost, a, b, EPSILON)
    off = 1e-3
    sums = sums_of(reference.plan(cost, a, b, f, g, EPSILON), off=off)
    high = f + EPSILON * math.log1p(off)
    dual = dual_value(a @ high + b @ g, torch.ones((), dtype=torch.float64), EPSILON)
    none = torch.zeros((), dtype=torch.float64)
    operator = MatrixOperator(cost, a, b)
    low, _ = outwards(operator.costs, sums, (dual, dual), none, a @ f.abs() + b @ g.abs(), EPSILON)
    assert_nearly_attained(dual - truth, dual - low, 0.99)


def test_ends_move_by_shares_of_the_upper_one_and_by_sums_over_points() -> None:
    cost, a, b = drawn()
    ends = torch.tensor(1.0).double(), torch.tensor(2.0).double()
    none, size = torch.zeros((), dtype=torch.float64), torch.tensor(2.0**30).double()
    operator = MatrixOperator(cost, a, b)
    low, high = outwards(operator.costs, sums_of(cost, share=0.25), ends, none, none, EPSILON)
    assert (low, high) == pytest.approx((0.0, 3.0))
    low, high = outwards(operator.costs, sums_of(cost), ends, none, size, EPSILON)
    # Twelve points: as many roundings of the largest partial sum, and sixteen more.
    assert 1 - low >= 28 * 2.0**-53 * 2.0**30
    assert high - 2 == pytest.approx(1 - low)


def test_no_bound_is_proved_by_an_upper_one_that_is_not_a_number() -> None:
    cost, a, b = drawn()
    plan = reference.plan(cost, a, b, torch.zeros(7), torch.zeros(5), EPSILON)
    costs = MatrixOperator(cost, a, b).costs
    found = outwards(costs, sums_of(plan), (1.0, math.nan), 0.0, 1.0, EPSILON)
    assert math.isnan(found[1])
