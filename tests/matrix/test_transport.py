"""`matrix_transport` against dense float64 formulas, exact solvers and itself."""

from __future__ import annotations

import math

import matrix_cases as cases
import numpy as np
import pytest
import reference
import torch
from pairwise import pairwise
from scipy.optimize import linear_sum_assignment
from tiers import slow
from torch import Tensor

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


def test_small_epsilon_is_the_assignment() -> None:
    costs, epsilon = cases.random(24, 24, cases.generator(2)), 1e-5
    best = float(costs[linear_sum_assignment(costs.numpy())].mean())
    found = otdd.matrix_transport(costs, epsilon=epsilon)
    # OT <= OT_epsilon <= OT + epsilon log n.
    assert found.bounds[1] >= best - 1e-12
    assert found.bounds[0] <= best + epsilon * math.log(24)
    assert found.value == pytest.approx(best, abs=1e-3 * float(costs.max()))


def test_masses_of_zero_have_no_influence() -> None:
    draw = cases.generator(6)
    costs, b = cases.random(6, 5, draw), cases.masses(5, draw)
    a = torch.tensor([0.3, 0, 0.2, 0.5, 0, 0]).double()
    costs[1], costs[4], costs[5] = 1e6, math.inf, -1e6
    present = a > 0
    one = otdd.matrix_transport(costs, a, b, epsilon=0.1)
    two = otdd.matrix_transport(costs[present], a[present], b, epsilon=0.1)
    assert one.value == pytest.approx(two.value, rel=1e-12)
    torch.testing.assert_close(one.g, two.g)
    torch.testing.assert_close(one.f[present], two.f)
    assert one.plan()[~present].abs().max() == 0
    assert one.f[4] == math.inf
    assert bool(one.f[[1, 5]].isfinite().all())


@pytest.mark.parametrize("stride", ["columns", "steps", "backwards"])
def test_matrices_of_any_strides(stride: str) -> None:
    costs = cases.random(33, 70, cases.generator(7)).float()
    expected = otdd.matrix_transport(costs, epsilon=0.1)
    given: Tensor | np.ndarray = costs.T.contiguous().T
    if stride == "steps":
        given = costs.repeat_interleave(2, 1).repeat_interleave(3, 0)[::3, ::2].numpy()
    elif stride == "backwards":
        given = costs.numpy()[::-1, ::-1].copy()[::-1, ::-1]
    found = otdd.matrix_transport(given, epsilon=0.1)
    assert found.value == pytest.approx(expected.value, rel=1e-6)
    torch.testing.assert_close(found.plan(), expected.plan(), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int64, bool])
def test_integers_are_held_exactly(kind: type) -> None:
    whole = np.random.default_rng(0).integers(0, 2 if kind is bool else 100, (9, 8)).astype(kind)
    found = otdd.matrix_transport(whole, epsilon=30.0)
    assert found.f.dtype == torch.float32
    expected = otdd.matrix_transport(whole * 1.0, epsilon=30.0)
    assert found.value == pytest.approx(expected.value, rel=1e-6)


def test_large_integers_take_double_precision() -> None:
    whole = torch.tensor([[2**24 + 1, 0], [3, 2**24]])
    assert otdd.matrix_transport(whole, epsilon=1e6).f.dtype == torch.float64
    assert otdd.matrix_transport(whole - 1, epsilon=1e6).f.dtype == torch.float32


def test_epsilon_relative_is_a_share_of_the_mean_cost() -> None:
    draw = cases.generator(9)
    costs, a, b = cases.random(9, 8, draw), cases.masses(9, draw), cases.masses(8, draw)
    found = otdd.matrix_transport(costs, a, b, epsilon_relative=0.2)
    assert found.epsilon == pytest.approx(0.2 * float(a @ costs @ b))
    costs[0, 0] = math.inf
    found = otdd.matrix_transport(costs, a, b, epsilon_relative=0.2)
    costs[0, 0] = 0
    assert found.epsilon == pytest.approx(0.2 * float(a @ costs @ b))


def test_a_start_saves_iterations() -> None:
    costs = cases.random(30, 20, cases.generator(10))
    one = otdd.matrix_transport(costs, epsilon=0.01, options=otdd.Converged(1e-6))
    two = otdd.matrix_transport(
        costs, epsilon=0.01, options=otdd.Converged(1e-6), start={"xy": one.g.float()}
    )
    assert two.iterations < one.iterations / 2


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
    truth = reference.entropic_transport(costs, cases.uniform(60), cases.uniform(50), 0.001, 1e-9)[
        0
    ]
    assert held(found.bounds, truth, 1e-8)
    with pytest.raises(otdd.ConvergenceError, match="not converged"):
        otdd.matrix_transport(
            costs,
            epsilon=0.001,
            options=otdd.Converged(1e-8, max_iterations=2, require_convergence=True),
        )
    narrow = otdd.matrix_transport(costs, epsilon=0.1, options=otdd.Converged(bound_width=1e-5))
    low, high = narrow.bounds
    assert high - low <= 1e-5 * abs(narrow.value)
    assert (narrow.stopped_by, narrow.tolerance) == ("bound_width", None)


@pytest.mark.slow
def test_a_large_matrix_starts_from_a_sample() -> None:
    x = torch.linspace(0, 1, 1600, dtype=torch.float64)
    costs = (x[:, None] - x).abs().sqrt()
    a, b = torch.exp(-((x - 0.3) ** 2) / 0.02), torch.exp(-((x - 0.6) ** 2) / 0.01)
    found = otdd.matrix_transport(costs, a / a.sum(), b / b.sum(), epsilon=0.05)
    assert found.converged
    assert found.passes != round(found.passes)


def test_geomloss_needs_its_diameter() -> None:
    costs = cases.random(9, 8, cases.generator(12))
    with pytest.raises(otdd.InputError, match=r"set solver\.diameter"):
        otdd.matrix_transport(costs, epsilon=0.1, options=otdd.GeomlossSchedule())
    options = otdd.GeomlossSchedule(diameter=1.0)
    with pytest.warns(otdd.NotConvergedWarning, match="by the schedule of geomloss") as warned:
        found = otdd.matrix_transport(costs, epsilon=0.1, options=options)
    assert warned[0].filename == __file__
    assert found.stopped_by == "schedule"
