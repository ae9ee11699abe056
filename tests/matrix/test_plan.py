"""`matrix_plan` and its gradients by one linear solve."""

from __future__ import annotations

import math
import warnings

import matrix_cases as cases
import pytest
import reference
import torch
from torch import Tensor

import otdd_flash as otdd

pytestmark = pytest.mark.usefixtures("iterations_alone")
EPSILON = 0.5
SHARP = otdd.Converged(1e-12)
CG = otdd.CGOptions(tolerance=1e-11)

Problem = tuple[Tensor, Tensor, Tensor, Tensor]


def problem(n: int, m: int) -> Problem:
    """Costs, masses and a cotangent."""
    draw = cases.generator(n, m)
    cotangent = torch.randn(n, m, generator=draw, dtype=torch.float64)
    return cases.random(n, m, draw), cases.masses(n, draw), cases.masses(m, draw), cotangent


def dense_plan(costs: Tensor, a: Tensor, b: Tensor, epsilon: float = EPSILON) -> Tensor:
    _, f, g = reference.entropic_transport(costs, a, b, epsilon)
    return reference.plan(costs, a, b, f, g, epsilon)


def gradients(
    costs: Tensor, a: Tensor, b: Tensor, cotangent: Tensor, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    moved = [part.clone().requires_grad_() for part in (costs, a, b)]
    plan = otdd.matrix_plan(*moved, epsilon=EPSILON, **{"options": SHARP, "cg": CG, **options})
    plan.backward(cotangent)
    found = [part.grad for part in moved]
    return found[0], found[1], found[2]


@pytest.mark.parametrize("size", [(1, 1), (9, 11)])
def test_is_the_dense_plan(size: tuple[int, int]) -> None:
    costs, a, b, _ = problem(*size)
    found = otdd.matrix_plan(costs, a, b, epsilon=EPSILON, options=SHARP)
    torch.testing.assert_close(found, dense_plan(costs, a, b), rtol=0, atol=1e-10)
    relative = EPSILON / float(a @ costs @ b)
    again = otdd.matrix_plan(costs, a, b, epsilon_relative=relative, options=SHARP)
    torch.testing.assert_close(again, found)


@pytest.mark.parametrize("size", [(1, 1), (4, 3)])
def test_the_gradient_by_costs_is_differences(size: tuple[int, int]) -> None:
    costs, a, b, cotangent = problem(*size)
    found = gradients(costs, a, b, cotangent)[0]
    expected = reference.finite_differences(
        lambda point: (cotangent * dense_plan(point, a, b)).sum(), costs
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("side", "zero"), [(0, False), (1, False), (0, True)])
def test_gradients_by_masses_are_differences_along_the_simplex(side: int, zero: bool) -> None:
    costs, *masses, cotangent = problem(5, 4)
    if zero:
        masses = [cases.masses(len(one), cases.generator(3), zero=True) for one in masses]
    found = gradients(costs, *masses, cotangent)[1 + side]
    assert float(masses[side] @ found) == pytest.approx(0, abs=1e-12)

    def value(moved: Tensor) -> float:
        at = [moved if k == side else one for k, one in enumerate(masses)]
        return float((cotangent * dense_plan(costs, *at)).sum())

    for place in range(1, len(found)):
        step = torch.zeros_like(masses[side])
        step[place], step[0] = 1e-5, -1e-5
        one_sided = float(masses[side][place]) == 0
        low = masses[side] - (0 if one_sided else 1) * step
        expected = (value(masses[side] + step) - value(low)) / (1e-5 if one_sided else 2e-5)
        near = 1e-3 if one_sided else 1e-6
        assert float(found[place] - found[0]) == pytest.approx(expected, abs=near)


@pytest.mark.slow
def test_stopped_early_it_is_the_problem_of_the_masses_that_there_are() -> None:
    costs, a, b, cotangent = problem(4, 5)
    few = otdd.Converged(1e-6, max_iterations=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otdd.NotConvergedWarning)
        plan = otdd.matrix_plan(costs * 10, a, b, epsilon=EPSILON, options=few)
        moved = (costs * 10).requires_grad_()
        again = otdd.matrix_plan(moved, a, b, epsilon=EPSILON, options=few, cg=CG)
        again.backward(cotangent)
    r, c = plan.sum(1), plan.sum(0)
    assert float((r - a).abs().sum() + (c - b).abs().sum()) > 1e-3
    expected = reference.finite_differences(
        lambda point: (cotangent * dense_plan(point, r / r.sum(), c / c.sum())).sum(), costs * 10
    )
    torch.testing.assert_close(moved.grad, expected * float(r.sum()), rtol=0, atol=1e-6)


def test_forbidden_pairs_and_blocks() -> None:
    """Two blocks that share no pair: more null vectors, and the gradients of each block."""
    costs, _, _, cotangent = problem(8, 8)
    whole = torch.full((8, 8), math.inf, dtype=torch.float64)
    blocks = slice(0, 3), slice(3, 8)
    a = b = cases.uniform(8)
    for part in blocks:
        whole[part, part] = costs[part, part]
    with pytest.warns(otdd.NotConvergedWarning, match="allow more pairs"):
        found = gradients(whole, a, b, cotangent)[0]
    for part in blocks:
        inner, size = costs[part, part], part.stop - part.start
        alone = gradients(inner, *(cases.uniform(size),) * 2, cotangent[part, part])[0]
        torch.testing.assert_close(found[part, part], alone * size / 8, rtol=0, atol=1e-9)
    assert float(found[whole == math.inf].abs().max()) == 0


def test_a_missed_tolerance_warns_or_raises() -> None:
    costs, a, b, cotangent = problem(33, 70)
    few = otdd.CGOptions(tolerance=1e-11, max_iterations=1)
    with pytest.warns(otdd.NotConvergedWarning, match="relative residual"):
        gradients(costs, a, b, cotangent, cg=few)
    strict = otdd.Converged(1e-6, require_convergence=True)
    with pytest.raises(otdd.ConvergenceError, match="relative residual"):
        gradients(costs, a, b, cotangent, cg=few, options=strict)
    costs = torch.tensor([[0, math.inf, math.inf], [0, math.inf, math.inf], [0, 1, 1]])
    with pytest.warns(otdd.NotConvergedWarning, match=r"2 rows \(0, 1\) have more mass"):
        otdd.matrix_plan(costs, epsilon=0.1)


def test_what_is_refused() -> None:
    costs = problem(5, 4)[0]
    with pytest.raises(otdd.InputError, match="one of them; got none"):
        otdd.matrix_plan(costs)
    with pytest.raises(otdd.InputError, match="costs requires a gradient and is float16"):
        otdd.matrix_plan(costs.half().requires_grad_(), epsilon=1.0)
