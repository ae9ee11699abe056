"""Bounds of OT_epsilon hold for any matrix, stopped at any iteration, in every type."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import matrix_cases as cases
import pytest
import reference
import torch
from refusals import Refusals
from torch import Tensor

import otdd_flash as otdd

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
REFUSALS = r"too small for|too tight for|overflow|out of the range|too far above the mean"


class Drawn(NamedTuple):
    """A random problem, and when its solve stops."""

    costs: Tensor
    a: Tensor
    b: Tensor
    epsilon: float
    options: otdd.Converged


def pick(values: list, draw: torch.Generator):
    return values[int(torch.randint(len(values), (1,), generator=draw))]


def drawn(seed: int) -> Drawn:
    draw = cases.generator(seed, 1)
    n, m = (pick([1, 2, 3, 7, 12, 20], draw) for _ in range(2))
    costs = cases.KINDS[pick([*cases.KINDS], draw)](n, m, draw)
    shape = pick(["as it is"] * 3 + ["repeated", "constant rows", "one far", "squared"], draw)
    if shape == "repeated":
        costs = costs[torch.randint(n, (n,), generator=draw)]
    elif shape == "constant rows":
        costs = costs[:, :1].expand(n, m).clone()
    elif shape == "one far":
        costs[0, 0] += 50
    elif shape == "squared":
        costs = costs * costs.abs()
    costs = (costs * 10 ** float(torch.randint(-2, 3, (1,), generator=draw))).to(pick(TYPES, draw))
    a, b = (cases.masses(size, draw, zero=seed % 3 == 0) for size in (n, m))
    scale = max(float(costs.double().abs().mean()), 1e-3)
    epsilon = scale * 10 ** (4 * float(torch.rand(1, generator=draw)) - 3)
    most = pick([1, 2, 3, 5, 10, 2000], draw)
    return Drawn(costs, a, b, epsilon, otdd.Converged(max_iterations=most))


def truth_of(problem: Drawn) -> tuple[float, float] | None:
    """OT_epsilon in float64 and what it may be off by; None where Newton's method gets nowhere."""
    costs, (a, b), epsilon = problem.costs.double(), (problem.a, problem.b), problem.epsilon
    for tolerance in (1e-11, 1e-8):
        try:
            value, f, g = reference.entropic_transport(costs, a, b, epsilon, tolerance)
            break
        except AssertionError:
            continue
    else:
        return None
    plan = reference.plan(costs, a, b, f, g, epsilon)
    off = float((plan.sum(1) - a).abs().sum() + (plan.sum(0) - b).abs().sum())
    spread = float(costs.max() - costs.min())
    return value, off * (spread + epsilon) + 1e-13 * (float(costs.abs().max()) + epsilon)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(k, k + 50) for k in range(0, 150, 50)])
def test_hold_for_random_problems(seeds: range) -> None:
    refusals, unknown = Refusals(REFUSALS), 0
    for seed in seeds:
        problem = drawn(seed)

        def solve(problem: Drawn = problem) -> otdd.MatrixTransport:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", otdd.NotConvergedWarning)
                return otdd.matrix_transport(
                    *problem[:3], epsilon=problem.epsilon, options=problem.options
                )

        found = refusals.outcome(solve)
        if found is None:
            continue
        low, high = found.bounds
        assert low <= found.value <= high, seed
        truth = truth_of(problem)
        if truth is None:
            unknown += 1
        else:
            value, slack = truth
            assert low - slack <= value <= high + slack, seed
        plan = reference.plan(
            problem.costs.double(), problem.a, problem.b, found.f, found.g, found.epsilon
        ).nan_to_num()
        off = (plan.sum(1) - problem.a).abs().sum(), (plan.sum(0) - problem.b).abs().sum()
        assert max(map(float, off)) <= found.marginal_error + 1e-12, seed
    refusals.check()
    assert unknown <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hold_where_terms_of_sums_repeat(dtype: torch.dtype) -> None:
    """Sums of n equal terms: their roundings add up where a type rounds them all alike."""
    n = 20_000
    costs = torch.full((2, n), 0.7).to(dtype)
    costs[1] = 0.1
    a, b = torch.tensor([1 / 3, 2 / 3]).double(), cases.uniform(n)
    a = a / a.sum()
    found = otdd.matrix_transport(costs, a, b, epsilon=0.3)
    # Constant rows: the plan is the product.
    exact = float(a @ costs[:, 0].double())
    assert found.bounds[0] <= exact <= found.bounds[1]
    assert found.bounds[1] - found.bounds[0] < 1e-6


# At the smallest of them points exchange less with their neighbours than masses are rounded by.
@pytest.mark.filterwarnings("ignore:potentials are not determined")
@pytest.mark.slow
@pytest.mark.parametrize("largest", [1.0, 1000.0])
def test_the_stability_grid(largest: float) -> None:
    """Every epsilon converges or is refused in words, where exp(-C / epsilon) underflows."""
    x = torch.linspace(0, 1, 32, dtype=torch.float64)
    costs = (largest * (x[:, None] - x).square()).float()
    a, b = (torch.exp(-((x - at) ** 2) / (2 * 0.08**2)) + 1e-9 for at in (0.3, 0.7))
    a, b = a / a.sum(), b / b.sum()
    converged = []
    for epsilon in (1.0, 0.1, 0.01, 0.001, 0.0001):
        try:
            found = otdd.matrix_transport(costs, a, b, epsilon=epsilon)
        except otdd.InputError as error:
            assert "too small for float32" in str(error)  # noqa: PT017
            continue
        converged.append(epsilon)
        assert found.converged
        assert found.tolerance <= 0.1
        assert bool(found.f.isfinite().all() & found.g.isfinite().all())
        assert found.bounds[0] <= found.value <= found.bounds[1]
        double = otdd.matrix_transport(costs.double(), a, b, epsilon=epsilon, start={"xy": found.g})
        low, high = double.bounds
        assert found.bounds[0] <= high
        assert found.bounds[1] >= low
    # What rounding allows: 2 u (|f| + |g| + 2 mean C) / epsilon at most a tenth.
    assert set(converged) >= {
        epsilon for epsilon in (1.0, 0.1, 0.01, 0.001) if epsilon >= 1e-5 * largest
    }
    underflown = torch.exp(-costs / min(converged)) == 0
    assert bool(underflown.any())
