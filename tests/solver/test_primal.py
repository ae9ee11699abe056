"""The plans behind the upper bounds, built densely: their marginals, and what they cost."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from test_certificate_evidence import assert_nearly_attained
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.operators.given_costs import GivenCosts, matrix_operator
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver.evidence import (
    RowSums,
    balancing,
    diagonal_of,
    dot,
    filled_slack,
    filled_value,
    filling_of,
    fitting_scale,
    off_diagonal_sums,
)

SIZES = [(1, 1), (1, 7), (33, 20)]
EPSILONS = [0.02, 20.0]


def draw_cost(n: int, m: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A cost (n, m) without structure, and masses of which some are zero."""
    draw = torch.Generator().manual_seed(seed)
    cost = 3 * torch.rand(n, m, generator=draw).double()
    a, b = (torch.rand(size, generator=draw).double() + 0.1 for size in (n, m))
    if n > 2:
        a[1] = 0
    if m > 2:
        b[2] = 0
    return cost, a / a.sum(), b / b.sum()


def primal_value(cost: Tensor, a: Tensor, b: Tensor, plan: Tensor, epsilon: float) -> Tensor:
    """<C, P> + epsilon sum P log (P / a b^T)."""
    product = a[:, None] * b[None, :]
    ratio = torch.where(product > 0, plan / product, 1)
    return (plan * cost).sum() + epsilon * torch.xlogy(plan, ratio).sum()


def assert_has_marginals(plan: Tensor, a: Tensor, b: Tensor) -> None:
    assert float(plan.min()) >= 0
    torch.testing.assert_close(plan.sum(1), a, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(plan.sum(0), b, rtol=1e-12, atol=1e-15)


def filled(
    operator: Operator,
    potentials: tuple[Tensor, Tensor],
    sums: tuple[Tensor, Tensor],
    epsilon: float,
) -> float:
    """The value of a plan with these sums that is not scaled."""
    masses, one = torch.cat((operator.a, operator.b)), torch.ones((), dtype=torch.float64)
    held = torch.where(masses > 0, torch.cat(potentials), 0)
    filling = filling_of(operator, masses, masses == 0, masses, torch.cat(sums), one)
    numbers = filling._make(map(float, filling))
    paid, kept = (
        float(dot(torch.cat(sums), held)),
        float(torch.stack([*map(torch.sum, sums)]).min()),
    )
    return filled_value(numbers, paid, kept, epsilon)


def balanced_value(
    operator: TorchOperator[GivenCosts], f: Tensor, sums: RowSums, epsilon: float
) -> Tensor:
    """The value of a balanced plan of f."""
    a = operator.a
    held = torch.where(a > 0, f, 0)
    diagonal = diagonal_of(a, held, operator.source.diagonal(), epsilon)
    return 2 * dot(a, held) + epsilon * balancing(a, a == 0, diagonal, sums)


@pytest.mark.parametrize(("size", "scale"), [(1, 1.0), (2, 0.01), (33, 0.01), (33, 1.0)])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_a_balanced_plan(size: int, epsilon: float, scale: float) -> None:
    cost, a, _ = draw_cost(size, size, seed=size)
    cost = cost + cost.T
    _, f, g = reference.entropic_transport(cost, a, a, epsilon)
    f = (f + g) / 2 + scale * epsilon * torch.sin(torch.arange(size).double())
    f = f - epsilon / 2 * reference.plan(cost, a, a, f, f, epsilon).sum().log()
    plan = reference.plan(cost, a, a, f, f, epsilon)
    rows = plan.sum(1)
    outside = rows - plan.diagonal()
    operator = matrix_operator(cost, a, a)
    value = balanced_value(operator, f, RowSums(outside, outside), epsilon)

    support = a > 0
    room = a - torch.minimum(plan.diagonal(), a) / 2
    kept = (room / outside)[support & (outside > 0)].min().clamp_max(1) if size > 1 else a.sum()
    balanced = kept * plan
    balanced.diagonal().copy_(a - kept * outside)
    assert_has_marginals(balanced, a, a)
    torch.testing.assert_close(value, primal_value(cost, a, a, balanced, epsilon))


def test_a_balanced_plan_of_sums_known_to_an_interval() -> None:
    epsilon = 0.5
    cost, a, _ = draw_cost(33, 33, seed=1)
    cost = cost + cost.T
    f = torch.sin(torch.arange(33).double()) / 10
    plan = reference.plan(cost, a, a, f, f, epsilon)
    outside, operator = plan.sum(1) - plan.diagonal(), matrix_operator(cost, a, a)
    lowest, highest = 0.9 * outside, outside * 1.1
    worst = balanced_value(operator, f, RowSums(lowest, highest), epsilon)
    room = a - torch.minimum(plan.diagonal(), a) / 2
    kept = (room / highest)[highest > 0].min().clamp_max(1)
    for share in torch.rand(20, 33, generator=torch.Generator().manual_seed(0)).double():
        factor = 0.9 + 0.2 * share
        own = a - kept * factor * outside
        # The value is that of any plan with such sums and the potentials' exponents.
        moved = kept * factor * outside
        value = moved @ (2 * f + epsilon * kept.log())
        prices = cost.diagonal() + epsilon * torch.where(a > 0, (own / a.square()).log(), 0)
        assert value + own @ prices <= worst + 1e-12


def test_the_interval_of_a_diagonal() -> None:
    cost, a, _ = draw_cost(9, 9, seed=2)
    f, errors = torch.linspace(-1, 1, 9).double(), torch.linspace(0, 0.1, 9).double()
    rows = torch.full_like(a, 100.0)
    diagonal = diagonal_of(a, f, cost.diagonal(), 0.5)
    ends = off_diagonal_sums(diagonal, rows, 0.125, errors / 0.5)
    for sign, end in zip((-1, 1), ends, strict=True):
        moved = cost + torch.diag(sign * errors)
        entries = reference.plan(moved, a, a, f, f, 0.5).diagonal()
        torch.testing.assert_close(end, (1 + sign * 0.125) * rows - entries)


@pytest.mark.parametrize("outside", [0.0, 1e-320])
def test_a_balanced_plan_is_not_scaled_for_a_point_of_the_least_mass(outside: float) -> None:
    """It keeps half of what it has, which is less than any normal number."""
    a = torch.tensor([0.5, 0.5, 3e-308], dtype=torch.float64)
    diagonal = torch.tensor([0.25, 0.25, 1.0], dtype=torch.float64).log()
    z = torch.tensor([0.25, 0.25, outside], dtype=torch.float64)
    assert abs(float(balancing(a, a == 0, diagonal, RowSums(z, z)))) < 1e-300


@pytest.mark.parametrize("side", ["row", "column"])
def test_a_plan_is_scaled_until_its_fullest_row_or_column_just_fits(side: str) -> None:
    """One that has all that the error of sums may hide."""
    _, a, b = draw_cost(9, 6, seed=3)
    excess, relative = 1.25, 1e-2
    rows, columns = a / 2, b / 2
    fullest, masses = (rows, a) if side == "row" else (columns, b)
    fullest[4] = excess * masses[4]
    both, seen = torch.cat((a, b)), torch.cat((rows, columns)) / (1 + relative)
    kappa = fitting_scale(both, both == 0, seen, relative)
    assert_nearly_attained(kappa * fullest[4], masses[4], 1 - 1e-9)
    assert float(fitting_scale(both, both == 0, both / 2, relative)) == 1


def test_the_slack_of_a_filled_plan() -> None:
    """Large potentials that cancel, over sums of rows that look smaller and columns larger."""
    _, a, b = draw_cost(9, 6, seed=3)
    relative, epsilon, large = 1e-6, 0.1, 1e5
    cost = torch.ones(9, 6).double()
    operator = matrix_operator(cost, a, b)
    potentials = torch.full((9,), large).double(), torch.full((6,), 1 - large).double()
    seen, true = (
        filled(operator, potentials, (0.99 * (1 - off) * a, 0.99 * (1 + off) * b), epsilon)
        for off in (relative, 0.0)
    )
    size = a @ potentials[0].abs() + b @ potentials[1].abs()
    spread = torch.tensor(operator.costs.spread)
    assert_nearly_attained(true - seen, filled_slack(relative, size, spread, epsilon))


def test_the_slack_of_a_filled_plan_is_that_of_the_formula() -> None:
    """Its logarithms count where epsilon is large beside potentials and costs."""
    found = filled_slack(1e-3, 2.0, 0.25, 4.0)
    assert found == pytest.approx(1e-3 * (2.0 + 4 * 0.25 + 2 * 4.0 * (1 - math.log(1e-3))))
