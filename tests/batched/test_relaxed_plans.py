"""Many small plans with relaxed marginals: values, bounds, gradients, and those of single ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from refusals import naming
from torch import Tensor

import otdd_flash as otdd

EPSILON = 0.2
PENALTIES = [(0.02, 0.02), (0.5, 0.5), (200.0, 200.0), (0.3, None), (None, 0.05), (0.1, 50.0)]
CPU = otdd.ComputeOptions("cpu")


def drawn(count: int = 3, n: int = 6, m: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    costs = torch.rand(count, n, m, generator=draw).double() * 2
    a, b = (torch.rand(count, size, generator=draw).double() + 0.2 for size in (n, m))
    return costs, a / a.sum(1, keepdim=True), b / b.sum(1, keepdim=True)


def penalties_of(rho: tuple[float | None, float | None]) -> tuple[float, float]:
    one, other = (math.inf if each is None else each for each in rho)
    return one, other


def solved(costs: Tensor, a: Tensor, b: Tensor, epsilon: Any = EPSILON, **settings: Any) -> Any:
    settings = {"tolerance": 1e-11, "max_iterations": 20_000, "compute": CPU} | settings
    return otdd.sinkhorn_plans(costs, a, b, epsilon=epsilon, **settings)


@pytest.mark.parametrize("rho", PENALTIES)
def test_they_are_those_of_dense_solves(rho: tuple[float | None, float | None]) -> None:
    """Also of a row and a column without mass, and with a forbidden pair."""
    costs, a, b = drawn()
    a[:, 2], b[:, 5] = 0, 0
    a, b = a / a.sum(1, keepdim=True), b / b.sum(1, keepdim=True)
    costs[1, 0, 0] = math.inf
    given = [each.clone().requires_grad_() for each in (costs, a, b)]
    epsilon = torch.tensor([0.2, 0.25, 0.3], dtype=torch.float64, requires_grad=True)
    found = solved(*given, epsilon=epsilon, unbalanced=rho)
    assert bool(found.converged.all())
    draw = torch.Generator().manual_seed(1)
    along = [torch.randn(each.shape, generator=draw).double() for each in (costs, a, b)]
    total = (found.plans * along[0]).sum() + (found.f * along[1]).sum() + (found.g * along[2]).sum()
    got = torch.autograd.grad(total, (*given, epsilon))
    for k in range(len(costs)):
        held = [each[k].clone().requires_grad_() for each in (costs, a, b)]
        finite = torch.where(held[0] < math.inf, held[0], 1e3)
        eps = float(epsilon[k].detach())
        f, g = reference.potentials_of(finite, held[1], held[2], eps, penalties_of(rho))
        plan = held[1][:, None] * ((f[:, None] + g - finite) / eps).exp() * held[2]
        for one, other in ((found.plans[k], plan), (found.f[k], f), (found.g[k], g)):
            torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-7, atol=1e-8)
        total = (plan * along[0][k]).sum() + (f * along[1][k]).sum() + (g * along[2][k]).sum()
        for one, other in zip(got, torch.autograd.grad(total, held), strict=False):
            size = float(other.abs().max())
            torch.testing.assert_close(one[k], other, rtol=1e-6, atol=1e-6 * size)
    # By epsilon, in differences.
    step, ends = 1e-5, []
    for sign in (1, -1):
        at = solved(costs, a, b, epsilon=epsilon.detach() + sign * step, unbalanced=rho)
        parts = (at.plans * along[0]).sum((1, 2)), (at.f * along[1]).sum(1)
        ends.append(sum(parts) + (at.g * along[2]).sum(1))
    slopes = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(got[3], slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rho", PENALTIES)
def test_values_and_their_slopes(rho: tuple[float | None, float | None]) -> None:
    costs, a, b = drawn()
    given = [each.clone().requires_grad_() for each in (costs, a)]
    epsilon = torch.tensor(EPSILON, dtype=torch.float64, requires_grad=True)
    found = solved(given[0], given[1], b, epsilon=epsilon, unbalanced=rho)
    truth = [
        reference.unbalanced_transport(costs[k], a[k], b[k], EPSILON, penalties_of(rho))[0]
        for k in range(len(costs))
    ]
    torch.testing.assert_close(found.value.detach(), torch.tensor(truth, dtype=torch.float64))
    by_costs, by_a, by_epsilon = torch.autograd.grad(found.value.sum(), (*given, epsilon))
    torch.testing.assert_close(by_costs, found.plans.detach(), rtol=1e-6, atol=1e-10)
    step, move = 1e-5, torch.linspace(-1, 1, 6).double()
    for moved, slope in (((step * move, 0.0), by_a @ move), ((0.0, step), by_epsilon)):
        ends = [
            solved(costs, a + s * moved[0], b, epsilon=EPSILON + s * moved[1], unbalanced=rho)
            for s in (1, -1)
        ]
        difference = (ends[0].value - ends[1].value) / (2 * step)
        if slope.ndim == 0:
            difference = difference.sum()
        torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-6)


@pytest.mark.slow(after=8)
@pytest.mark.parametrize("rho", [*PENALTIES, (1e-6, 1e-6), (1e-4, None), (1e6, 1e6)])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_bounds_hold_wherever_a_solve_stops(
    rho: tuple[float | None, float | None], kind: torch.dtype
) -> None:
    costs, a, b = drawn(8)
    costs[:, 0] += 5
    costs = costs.to(kind).double()
    truth = torch.tensor(
        [
            reference.unbalanced_transport(costs[k], a[k], b[k], EPSILON, penalties_of(rho))[0]
            for k in range(len(costs))
        ],
        dtype=torch.float64,
    )
    width = []
    for most in (1, 5, 5000):
        settings = {"max_iterations": most, "tolerance": 1e-7, "unbalanced": rho}
        low, high = solved(costs.to(kind), a, b, **settings).bounds.unbind(1)
        slack = 1e-12 * truth.abs()
        assert bool((low - slack <= truth).all() & (truth <= high + slack).all())
        width.append(float(((high - low) / truth.abs()).max()))
    assert width[-1] <= 1e-5


def test_a_problem_is_the_same_alone_and_with_sizes() -> None:
    costs, a, b = drawn(5)
    whole = solved(costs, a, b, unbalanced=0.4)
    for k in range(5):
        alone = solved(costs[k : k + 1], a[k : k + 1], b[k : k + 1], unbalanced=0.4)
        assert torch.equal(alone.plans[0], whole.plans[k])
        assert int(alone.iterations[0]) == int(whole.iterations[k])
    padded = torch.full((5, 9, 10), math.nan).double()
    padded[:, :6, :7] = costs
    sizes = torch.tensor([[6, 7]] * 5)
    ways = [
        otdd.sinkhorn_plans(each, epsilon=EPSILON, unbalanced=[0.4, None], sizes=given, compute=CPU)
        for each, given in ((costs, None), (padded, sizes))
    ]
    torch.testing.assert_close(ways[1].plans[:, :6, :7], ways[0].plans)
    assert float(ways[1].plans[:, 6:].abs().max()) == 0
    torch.testing.assert_close(ways[1].value, ways[0].value)


def test_a_large_penalty_is_nearly_none() -> None:
    costs, a, b = drawn()
    relaxed, exact = (solved(costs, a, b, unbalanced=rho) for rho in (1e9, None))
    torch.testing.assert_close(relaxed.plans, exact.plans, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(relaxed.value, exact.value, rtol=1e-7, atol=0)


def test_refusals() -> None:
    costs, a, b = drawn()
    costs.requires_grad_()
    for settings, message in (
        ({"gradient": "unrolled"}, "gradients of plans are those of the solution"),
        ({"unbalanced": 1e-40}, "potentials as small as this vanish"),
        ({"unbalanced": [1.0, 1e18]}, r"penalty of 1e\+18 .*leave unbalanced out"),
    ):
        with naming(message), pytest.raises(otdd.InputError, match=message):
            solved(costs, a, b, **{"unbalanced": 1.0} | settings)
