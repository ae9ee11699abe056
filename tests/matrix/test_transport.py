"""`matrix_transport` against dense float64 formulas, exact solvers and itself."""

from __future__ import annotations

import math

import matrix_cases as cases
import numpy as np
import pytest
import reference
import torch
from pairwise import pairwise
from tiers import slow

import otdd_flash as otdd

SIZES = [(1, 1), (33, 70), (200, 3), (1, 9)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def held(interval: tuple[float, float], value: float, slack: float) -> bool:
    """Whether an interval holds a number that itself is known to a share of 1e-9 of the costs."""
    return interval[0] - slack <= value <= interval[1] + slack


@pytest.mark.slow(after=6)
@pairwise(size=[*SIZES, *slow([(300, 300)])], kind=cases.KINDS, dtype=DTYPES, relative=[0.5, 0.05])
def test_is_the_dense_solution(
    size: tuple[int, int], kind: str, dtype: torch.dtype, relative: float
) -> None:
    draw = cases.generator(*size, len(kind))
    costs = cases.KINDS[kind](*size, draw).to(dtype)
    a, b = (cases.masses(side, draw, zero=True) for side in size)
    epsilon = relative * max(float(costs.double().abs().mean()), 0.1)
    found = otdd.matrix_transport(costs, a, b, epsilon=epsilon)
    truth, f, g = reference.entropic_transport(costs.double(), a, b, epsilon, 1e-9)
    scale = max(float(costs.double().abs().max()), epsilon)
    assert found.converged
    assert found.stopped_by in ("tolerance", "rounding")
    assert held(found.bounds, truth, 1e-8 * scale)
    assert found.bounds[1] - found.bounds[0] <= 2e-3 * scale
    plan = reference.plan(costs.double(), a, b, f, g, epsilon)
    assert float((found.plan().double() - plan).abs().sum()) < 3e-3
    error = float((found.plan().double().sum(1) - a).abs().sum())
    error = max(error, float((found.plan().double().sum(0) - b).abs().sum()))
    assert error <= found.marginal_error + 1e-6
    assert found.transport_cost == pytest.approx(
        float((found.plan().double() * costs.double()).sum()), abs=1e-6 * scale
    )


def test_products_are_those_of_the_plan() -> None:
    draw = cases.generator(1)
    costs, (a, b) = cases.random(33, 70, draw), (cases.masses(k, draw, zero=True) for k in (33, 70))
    found = otdd.matrix_transport(costs, a, b, epsilon=0.1)
    plan, (u, v) = found.plan(), (torch.randn(k, 4, generator=draw).double() for k in (33, 70))
    torch.testing.assert_close(found.apply(v), plan @ v)
    torch.testing.assert_close(found.apply_transposed(u), plan.T @ u)
    torch.testing.assert_close(found.apply(v[:, 0].numpy()), plan @ v[:, 0])
    torch.testing.assert_close(found.apply_transposed(u[:, 0]), plan.T @ u[:, 0])
    for values in (v[:-1], v[None], torch.ones(())):
        with pytest.raises(otdd.InputError, match=r"values must be \(70,\) or \(70, k\)"):
            found.apply(values)


def test_masses_of_zero_have_no_influence() -> None:
    """Nor have subnormal ones; others are divided by their sum."""
    draw = cases.generator(6)
    costs, b = cases.random(6, 5, draw), cases.masses(5, draw)
    a = torch.tensor([0.3, 1e-310, 0.2, 0.5, 0, 0], dtype=torch.float64)
    costs[1], costs[4], costs[5] = 1e6, math.inf, -1e6
    present = a > 0.1
    one = otdd.matrix_transport(costs, a, b, epsilon=0.1)
    two = otdd.matrix_transport(costs[present], (1 + 5e-7) * a[present], b, epsilon=0.1)
    assert one.value == pytest.approx(two.value, rel=1e-12)
    torch.testing.assert_close(one.g, two.g)
    torch.testing.assert_close(one.f[present], two.f)
    assert one.plan()[~present].abs().max() == 0
    assert one.f[4] == math.inf
    assert bool(one.f[[1, 5]].isfinite().all())


@pytest.mark.parametrize("kind", [np.uint8, np.int64, bool])
def test_integers_are_held_exactly(kind: type) -> None:
    whole = np.random.default_rng(0).integers(0, 2 if kind is bool else 100, (9, 8)).astype(kind)
    found = otdd.matrix_transport(whole, epsilon=30.0)
    assert found.f.dtype == torch.float32
    expected = otdd.matrix_transport(whole * 1.0, epsilon=30.0)
    assert found.value == pytest.approx(expected.value, rel=1e-6)
    # What float32 does not hold takes double precision.
    large = torch.tensor([[2**24 + 1, 0], [3, 2**24]])
    assert otdd.matrix_transport(large, epsilon=1e6).f.dtype == torch.float64
    assert otdd.matrix_transport(large - 1, epsilon=1e6).f.dtype == torch.float32


def test_epsilon_relative_is_a_share_of_the_mean_cost() -> None:
    draw = cases.generator(9)
    costs, a, b = cases.random(9, 8, draw), cases.masses(9, draw), cases.masses(8, draw)
    found = otdd.matrix_transport(costs, a, b, epsilon_relative=0.2)
    assert found.epsilon == pytest.approx(0.2 * float(a @ costs @ b))
    costs[0, 0] = math.inf
    found = otdd.matrix_transport(costs, a, b, epsilon_relative=0.2)
    costs[0, 0] = 0
    assert found.epsilon == pytest.approx(0.2 * float(a @ costs @ b))


def test_progress_and_budgets_are_those_of_clouds() -> None:
    costs, seen = cases.random(60, 50, cases.generator(11)), []
    found = otdd.matrix_transport(
        costs, epsilon=0.1, progress=lambda name, step, error: seen.append((name, step, error))
    )
    assert seen[-1][0] == "xy"
    assert seen[-1][1] == found.iterations
    few = otdd.Converged(1e-8, max_iterations=2)
    with pytest.warns(otdd.NotConvergedWarning, match="after 2 iterations in xy"):
        found = otdd.matrix_transport(costs, epsilon=0.001, options=few)
    assert (found.stopped_by, found.converged, found.iterations) == ("max_iterations", False, 2)
    masses = cases.uniform(60), cases.uniform(50)
    truth, *_ = reference.entropic_transport(costs, *masses, 0.001, 1e-9)
    assert held(found.bounds, truth, 1e-8)
    strict = otdd.Converged(1e-8, max_iterations=2, require_convergence=True)
    with pytest.raises(otdd.ConvergenceError, match="not converged"):
        otdd.matrix_transport(costs, epsilon=0.001, options=strict)
    narrow = otdd.matrix_transport(costs, epsilon=0.1, options=otdd.Converged(bound_width=1e-5))
    low, high = narrow.bounds
    assert high - low <= 1e-5 * abs(narrow.value)
    assert (narrow.stopped_by, narrow.tolerance) == ("bound_width", None)
