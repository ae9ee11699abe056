"""What is proved of potentials: of random ones, and of those that rounding spoils."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import reference
import torch
from labelled_costs import cost_between
from operation_counts import OperationCounts
from refusals import Refusals
from torch import Tensor

from otdd_flash.operators.base import Marginals
from otdd_flash.operators.point_scores import streamed_operator
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.operators.triton_operator import KernelOperator
from otdd_flash.solver.certificate import (
    Certificate,
    CrossNumbers,
    SelfNumbers,
    certify,
    certify_self,
    conclude_many,
    find_unresolved,
    read_numbers,
    self_evidence,
    self_plan,
)


def few_points(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two or three points on a line, (n, 1), and masses over seven orders of magnitude."""
    n = int(torch.randint(2, 4, (1,), generator=draw))
    masses = torch.rand(n, generator=draw).double() ** 4 + 1e-6
    return torch.randn(n, 1, generator=draw).double(), masses / masses.sum()


def log_uniform(draw: torch.Generator, low: float, high: float) -> float:
    return float(10 ** (low + (high - low) * torch.rand(1, generator=draw).double()))


def assert_proved(found: Certificate, cost: Tensor, a: Tensor, b: Tensor, epsilon: float) -> None:
    truth, _, _ = reference.entropic_transport(cost, a, b, epsilon)
    slack = 1e-10 * (1 + abs(truth))
    assert found.bounds[0] - slack <= truth <= found.bounds[1] + slack
    plan = reference.plan(cost, a, b, found.f, found.g, epsilon)
    error = max(float((plan.sum(1) - a).abs().sum()), float((plan.sum(0) - b).abs().sum()))
    assert error <= found.marginal_error + 1e-9


def one_potential(seed: int) -> tuple[TorchOperator[Any], Tensor, Tensor, float]:
    """A few points' cost with itself, their masses, a potential and epsilon."""
    draw = torch.Generator().manual_seed(seed)
    x, a = few_points(draw)
    operator = streamed_operator(cost_between(x, x, a, a, lambda_x=1.0), torch.float64)
    epsilon = log_uniform(draw, -2, 2) * operator.costs.mean
    f = torch.randn(len(x), generator=draw).double() * log_uniform(draw, -2, 1)
    return operator, a, (f * operator.costs.spread).clamp_max(300 * epsilon), epsilon


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seeds", [range(15), range(15, 100)])
def test_of_one_potential(seeds: range) -> None:
    """In a third of these the bound by oscillation is less than three times what it has to be."""
    for seed in seeds:
        operator, a, f, epsilon = one_potential(seed)
        cost = -next(operator.source.negative_costs())[1]
        assert_proved(certify_self(operator, f, epsilon), cost, a, a, epsilon)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seeds", [range(10), range(10, 80)])
def test_of_two_potentials(seeds: range) -> None:
    refusals = Refusals("overflow")
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        (x, a), (y, b) = few_points(draw), few_points(draw)
        operator = streamed_operator(cost_between(x, y, a, b, lambda_x=1.0), torch.float64)
        epsilon = log_uniform(draw, -2, 2) * operator.costs.mean
        f, g = (
            (torch.randn(n, generator=draw).double() * log_uniform(draw, -2, 1)).clamp_max(
                300 * epsilon
            )
            for n in operator.shape
        )
        cost = reference.dense_cost(x, y, 1.0)
        assert_proved(certify(operator, f, g, epsilon), cost, a, b, epsilon)
        # As they are, without the updates that a solve ends with.
        found = refusals.outcome(partial(certify, operator, f, g, epsilon, updated=g))
        if found is not None:
            assert_proved(found, cost, a, b, epsilon)
    refusals.check()


# What rounding adds to the bounds of a cross term, and when its plan is evaluated once more.


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
@pytest.mark.parametrize(("own", "operations", "launches"), [(False, 140, 3), (True, 95, 2)])
def test_what_a_certificate_asks_of_a_device(
    own: bool, operations: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all that is found once is known: it reads once, with few operations and launches."""
    draw, epsilon = torch.Generator().manual_seed(0), 4.0
    x, y = (torch.randn(count, 8, generator=draw) for count in (48, 33))
    one, other = (torch.arange(len(side)) % 2 for side in (x, y))
    table = torch.ones(2, 2, dtype=torch.float64).fill_diagonal_(0)
    y, other = (x, one) if own else (y, other)
    cost = cost_between(x, y, labels_x=one, labels_y=other, class_costs=table)
    dense = reference.dense_cost(*cost.points, 0.5, table, *cost.labels)
    _, f, g = reference.entropic_transport(dense, cost.a, cost.b, epsilon)
    operator, f, g = KernelOperator(cost, "high"), f.float(), g.float()
    prove = (
        partial(certify_self, operator, (f + g) / 2, epsilon)
        if own
        else partial(certify, operator, f, g, epsilon, updated=g)
    )
    prove()
    with OperationCounts(monkeypatch) as counts:
        found = prove()
    assert found.passes == 1
    assert 0.8 * operations <= counts.operations <= operations
    assert sum(counts.launches.values()) == launches
    assert counts.reads == 1


def test_self_terms_side_by_side_say_where_a_point_is_unresolved() -> None:
    """Its mass may be missing from both marginals."""
    unresolved = torch.tensor([0.0, 0.125])
    numbers = SelfNumbers(*(torch.zeros(2) for _ in SelfNumbers._fields[:-1]))
    numbers = numbers._replace(
        mass=torch.ones(2), missed=torch.full((2,), 0.25), unresolved=unresolved
    )
    sums = Marginals(*(torch.zeros(1) for _ in range(4)), 0.0, 2.0**-10, 0.0)
    _, error, fine = conclude_many(numbers, sums, 2.0**-24, 1.0)
    assert fine.tolist() == [True, False]
    assert (error - 2 * unresolved).tolist() == [0.25 + 2.0**-9] * 2


def test_points_are_unresolved_whose_errors_of_costs_exceed_half_of_epsilon() -> None:
    """A sum of which as much may be hidden: those above, not those at it or without an error."""
    operator, a, f, epsilon = one_potential(3)
    plan = self_plan(operator, f, epsilon, accurate=True)
    errors = torch.linspace(0.4, 0.6, len(a)).double()
    unresolved = find_unresolved(errors * epsilon, epsilon)
    assert unresolved.tolist() == (errors > 0.5).tolist()
    numbers = self_evidence(operator, plan._replace(unresolved=unresolved), epsilon).numbers
    assert float(read_numbers(SelfNumbers, numbers).unresolved) == float(a[errors > 0.5].sum())


class Off:
    """An operator whose costs may be off by so much for every row and every column."""

    def __init__(self, exact: TorchOperator[Any], of_row: float, of_column: float) -> None:
        self.exact, self.of_row, self.of_column = exact, of_row, of_column

    def marginals(self, *given: Any, **more: Any) -> Marginals:
        found = self.exact.marginals(*given, **more)
        errors = torch.full_like(found.rows, self.of_row)
        return found._replace(
            row_errors=errors, column_errors=torch.full_like(found.columns, self.of_column)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exact, name)


def test_what_errors_of_costs_may_hide_of_the_marginals() -> None:
    """Half of the growth of rows and half of that of columns, whose sums are masses."""
    draw, epsilon = torch.Generator().manual_seed(0), 0.5
    x, a = torch.randn(6, 2, generator=draw).double(), torch.rand(6, generator=draw).double()
    a /= a.sum()
    _, f, g = reference.entropic_transport(reference.dense_cost(x, x + 1, 1.0), a, a, epsilon)
    cost = cost_between(x, x + 1, a, a, lambda_x=1.0)
    operator = Off(streamed_operator(cost, torch.float64), 0.01, 0.03)
    expected = (math.expm1(2 * 0.01 / epsilon) + math.expm1(2 * 0.03 / epsilon)) / 2
    for updated in (g, None):
        found = certify(operator, f, g, epsilon, updated=updated)
        assert found.undetectable == pytest.approx(expected, rel=1e-6)


def test_a_plan_with_too_much_mass_in_a_column_is_evaluated_once_more() -> None:
    """Unless it may be scaled down by as much."""
    x, a = torch.arange(4.0).double()[:, None], torch.full((4,), 0.25, dtype=torch.float64)
    operator = streamed_operator(cost_between(x, x + 1, a, a, lambda_x=1.0), torch.float64)
    f, cost = torch.zeros(4).double(), reference.dense_cost(x, x + 1, 1.0)
    f -= reference.plan(cost, a, a, f, f, 1.0).sum().log()
    prove = partial(certify, operator, f, 0 * f, 1.0, updated=0 * f)
    assert prove().passes == 3
    assert prove(scaled=1.0).passes == 1


def test_points_without_mass_get_the_potential_of_the_others() -> None:
    x, b = torch.arange(4.0).double()[:, None], torch.tensor([0.5, 0.0, 0.25, 0.25]).double()
    cost = cost_between(x, x + 1, b=b, lambda_x=1.0)
    operator = streamed_operator(cost, torch.float64)
    low = torch.tensor([0.0, -100.0, 0.0, 0.0], dtype=torch.float64)
    found = certify(operator, torch.zeros(4).double(), low, 1.0)
    assert found.passes == 1
    updated = operator.softmin_columns(operator.softmin_rows(low, 1.0), 1.0)
    assert float(found.g[1]) == pytest.approx(float(updated[1]), rel=1e-12)


def test_terms_side_by_side_say_where_their_plans_would_be_evaluated_once_more() -> None:
    """One that is fine, one with too much mass in a column, one with a unresolved point."""
    numbers = CrossNumbers(*(torch.zeros(3) for _ in CrossNumbers._fields[:-1]))
    numbers = numbers._replace(
        kappa=torch.tensor([1.0, 0.9, 1.0]),
        mass=torch.ones(3),
        unresolved=torch.tensor([0.0, 0.0, 0.125]),
        row_gap=torch.tensor([0.25, 0.25, 0.25]),
    )
    sums = Marginals(*(torch.zeros(1) for _ in range(4)), 0.0, 2.0**-10, 0.0)
    _, error, fine = conclude_many(numbers, sums, 2.0**-24, 1.0)
    assert fine.tolist() == [True, False, False]
    assert (error - numbers.unresolved).tolist() == [0.25 + 2.0**-9] * 3
