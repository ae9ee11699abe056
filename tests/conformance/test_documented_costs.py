"""The cost that docs/extending.md shows as a file promises what every way of holding a cost does.

Its operator is asked for everything that `test_operators` asks of matrices, and a solve of it is
compared with a dense one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import adapter
import pytest
import reference
import test_operators
import torch
from problems import DELTA, DEVICE, Case, Problem, problem_of
from ring_package import shown_module

import otdd_flash as otdd
from otdd_flash.solver.matrix_comparison import MatrixComparison

WAY = "the Huber cost of the page"
# Asked of clouds with themselves, which a cost between two sides is not.
OF_ONE_CLOUD = {
    "test_softmin_of_a_cloud_with_itself",
    "test_sums_of_a_plan_of_a_cloud_with_itself_of_two_potentials",
    "test_own_costs",
}
PROMISES = {
    name: promise
    for name, promise in vars(test_operators).items()
    if name.startswith("test_") and name not in OF_ONE_CLOUD
}
AXES = test_operators.OF_MATRICES | {"classes": [1], "matrix": ["huber"]}

huber = shown_module("huber").huber


def blocks_of(given: Problem) -> otdd.CostBlocks:
    """The cost of the page between the points of a problem."""
    return huber(given.x.double(), given.y.double(), DELTA)


def _held(given: Problem, way: adapter.Way) -> adapter.Held:
    blocks, (n, m) = blocks_of(given), given.cost.shape
    options = otdd.ComputeOptions(str(DEVICE), memory_budget=0)
    whole = MatrixComparison.prepare(blocks, given.a, given.b, options)
    # Its own matrix, to the last bit; `test_is_the_huber_cost` compares this with the formula.
    matrix = blocks.block(slice(0, n), slice(0, m))
    return adapter.Held(given, whole.operator("xy"), way.precision, matrix, matrix)


@pytest.fixture(scope="module", autouse=True)
def _held_in_small_blocks() -> Iterator[None]:
    way = adapter.Way(_held, "double", {})
    with pytest.MonkeyPatch.context() as patched:
        for ways in (adapter.WAYS, adapter.MATRICES):
            patched.setitem(ways, WAY, way)
        for module, name, value in adapter.SMALL:
            patched.setattr(module, name, value)
        yield


of_cases = pytest.mark.parametrize(
    "case", [row.values[1] for row in test_operators.pairs([WAY], AXES)], ids=lambda case: case.name
)


@pytest.mark.parametrize("promise", PROMISES.values(), ids=PROMISES)
@of_cases
def test_it_promises_what_all_do(promise: Callable[..., Any], case: Case) -> None:
    promise(WAY, case)


@of_cases
def test_is_the_huber_cost(case: Case) -> None:
    given = problem_of(case)
    n, m = given.cost.shape
    found = blocks_of(given).block(slice(0, n), slice(0, m))
    # The formula takes the difference of two squares.
    atol = 1e-13 * float(reference.dense_cost(given.x, given.y, 1.0).max())
    torch.testing.assert_close(found, given.cost, rtol=1e-13, atol=atol)


@pytest.mark.parametrize("epsilon", [0.01, 0.3])
@pytest.mark.parametrize("held", [True, False])
def test_value_plan_and_gradient_are_those_of_a_dense_solve(epsilon: float, held: bool) -> None:
    given = problem_of(Case((33, 70, 3), "one far point", massless=True, matrix="huber"))
    blocks, a, b = blocks_of(given), given.a, given.b
    compute = otdd.ComputeOptions(str(DEVICE), memory_budget="1GiB" if held else 0)
    options = otdd.Converged(tolerance=1e-10)
    found = otdd.matrix_transport(blocks, a, b, epsilon=epsilon, options=options, compute=compute)
    value, f, g = reference.entropic_transport(given.cost, a, b, epsilon)
    lower, upper = found.bounds
    assert lower <= value <= upper
    assert upper - lower <= 1e-8 * value
    plan = reference.plan(given.cost, a, b, f, g, epsilon)
    torch.testing.assert_close(found.plan(), plan, rtol=0, atol=1e-9)
    # The gradient by points, from the matrix and by the formula of the page.
    points = given.x.double().requires_grad_()
    matrix = huber(points, given.y.double(), DELTA).block(slice(0, 33), slice(0, 70))
    otdd.matrix_loss(matrix, a, b, epsilon=epsilon, options=options).backward()
    apart = given.x.double()[:, None] - given.y.double()
    shares = (DELTA / apart.norm(dim=2)).clamp_max(1)
    expected = ((plan * shares)[:, :, None] * apart).sum(1)
    torch.testing.assert_close(points.grad, expected, rtol=1e-7, atol=1e-9)
