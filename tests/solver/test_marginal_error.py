"""One meaning of the marginal error: a bound of the larger L1 error, of rows or of columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import reference
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.errors import NotConvergedWarning

pytestmark = pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")


class Ended(NamedTuple):
    """Potentials, of which problem, and the marginal error that was reported of them."""

    reported: float
    cost: Tensor
    a: Tensor
    b: Tensor
    f: Tensor
    g: Tensor


def cloud(n: int, seed: int) -> otdd.LabeledSamples:
    """Points with unequal masses, one of them 0."""
    draw = torch.Generator().manual_seed(seed)
    masses = torch.rand(n, generator=draw, dtype=torch.float64) + 0.05
    masses[n // 2] = 0
    points = torch.randn(n, 4, generator=draw, dtype=torch.float64) + seed / 4
    return otdd.LabeledSamples(points, None, (), masses / masses.sum())


X, Y = cloud(33, 0), cloud(20, 1)


def cost(x: otdd.LabeledSamples, y: otdd.LabeledSamples) -> Tensor:
    return torch.cdist(x.features.double(), y.features.double()).square() / 2


def terms(
    options: otdd.Converged | otdd.GeomlossSchedule, epsilon: float, **compute: object
) -> Iterator[Ended]:
    """A divergence's cross term and both self terms, and the cross term by itself."""
    where = otdd.ComputeOptions(device="cpu", **compute)
    found = otdd.sinkhorn_divergence(X, Y, epsilon=epsilon, options=options, compute=where)
    alone = otdd.sinkhorn(X, Y, epsilon=epsilon, options=options, compute=where)
    for term, x, y in (
        (alone, X, Y),
        *((found.terms[name], *sides) for name, sides in SIDES.items()),
    ):
        yield Ended(term.marginal_error, cost(x, y), x.weights, y.weights, term.f, term.g)


SIDES = {"xy": (X, Y), "xx": (X, X), "yy": (Y, Y)}


def matrix(
    dtype: torch.dtype, options: otdd.Converged, epsilon: float, *, blocks: bool
) -> Iterator[Ended]:
    costs = cost(X, Y).to(dtype)
    n, m = costs.shape
    given = otdd.CostBlocks(n, m, lambda rows, columns: costs[rows, columns]) if blocks else costs
    found = otdd.matrix_transport(
        given, X.weights, Y.weights, epsilon=epsilon, options=options, compute="cpu"
    )
    yield Ended(found.marginal_error, costs, X.weights, Y.weights, found.f, found.g)


def plans(dtype: torch.dtype, options: otdd.Converged, epsilon: float) -> Iterator[Ended]:
    """Two problems of a batch."""
    costs = torch.stack([cost(X, Y), cost(X, Y).flip(0)]).to(dtype)
    a, b = X.weights.to(dtype), Y.weights.to(dtype)
    found = otdd.sinkhorn_plans(
        costs, a, b, epsilon=epsilon, tolerance=1e-4, max_iterations=options.max_iterations
    )
    for place, error in enumerate(found.marginal_error.tolist()):
        yield Ended(error, costs[place], a, b, found.f[place], found.g[place])


Route = Callable[[otdd.Converged, float], Iterator[Ended]]
FLOAT64: dict[str, Route] = {
    "float64": lambda o, e: terms(o, e, backend="torch", precision="double"),
    "geomloss": lambda o, e: terms(
        otdd.GeomlossSchedule(scaling=0.2 if o.max_iterations < 9 else 0.9),
        e,
        backend="torch",
        precision="double",
    ),
    "matrix": lambda o, e: matrix(torch.float64, o, e, blocks=False),
    "blocks": lambda o, e: matrix(torch.float64, o, e, blocks=True),
    "plans": lambda o, e: plans(torch.float64, o, e),
}
FLOAT32: dict[str, Route] = {
    "float32": lambda o, e: terms(o, e, backend="torch"),
    "streamed": lambda o, e: terms(o, e, backend="torch", memory_budget=2000),
    "matrix": lambda o, e: matrix(torch.float32, o, e, blocks=False),
    "blocks": lambda o, e: matrix(torch.float32, o, e, blocks=True),
    "plans": lambda o, e: plans(torch.float32, o, e),
}


def assert_bounds_the_larger(route: Route, unit: float, iterations: int, epsilon: float) -> None:
    """The number is no smaller than the larger error and not the sum, up to rounding."""
    for ended in route(otdd.Converged(tolerance=1e-4, max_iterations=iterations), epsilon):
        a, b = ended.a.double(), ended.b.double()
        costs = ended.cost.double()
        plan = reference.plan(costs, a, b, ended.f.double(), ended.g.double(), epsilon)
        larger = max(float((plan.sum(1) - a).abs().sum()), float((plan.sum(0) - b).abs().sum()))
        # Of exponents: of costs, and of potentials, which are at most as large.
        rounding = 4 * unit * float(costs.max()) / epsilon
        assert larger - rounding <= ended.reported <= 1.5 * larger + rounding
        assert math.isfinite(ended.reported)


CASES = [(2, 1.0), (2, 0.1), (100_000, 1.0), (100_000, 0.1)]


@pytest.mark.parametrize("route", list(FLOAT64))
@pytest.mark.parametrize(("iterations", "epsilon"), CASES)
def test_in_float64(route: str, iterations: int, epsilon: float) -> None:
    assert_bounds_the_larger(FLOAT64[route], 2.0**-53, iterations, epsilon)


@pytest.mark.parametrize("route", list(FLOAT32))
@pytest.mark.parametrize(("iterations", "epsilon"), CASES)
def test_in_float32(route: str, iterations: int, epsilon: float) -> None:
    assert_bounds_the_larger(FLOAT32[route], 2.0**-24, iterations, epsilon)


@pytest.mark.slow
def test_in_triton() -> None:
    """The cross term in the interpreter; tests of kernels and bounds hold others against it."""
    where = otdd.ComputeOptions(device="cpu", backend="triton", precision="high")

    def route(options: otdd.Converged, epsilon: float) -> Iterator[Ended]:
        term = otdd.sinkhorn(X, Y, epsilon=epsilon, options=options, compute=where)
        yield Ended(term.marginal_error, cost(X, Y), X.weights, Y.weights, term.f, term.g)

    assert_bounds_the_larger(route, 2.0**-24, 2, 1.0)


def test_a_solve_ends_at_the_first_evaluation_within_its_tolerance() -> None:
    """What is compared with the tolerance is the same number, so that a looser one ends earlier."""
    with pytest.warns(NotConvergedWarning):
        reached = otdd.sinkhorn(
            X,
            Y,
            epsilon=0.3,
            options=otdd.Converged(tolerance=1e-9, max_iterations=4),
            compute=otdd.ComputeOptions(device="cpu", precision="double"),
        )
    for share, converged in ((1.001, True), (0.999, False)):
        options = otdd.Converged(tolerance=share * reached.marginal_error, max_iterations=4)
        term = otdd.sinkhorn(
            X,
            Y,
            epsilon=0.3,
            options=options,
            compute=otdd.ComputeOptions(device="cpu", precision="double"),
        )
        assert term.converged == (term.marginal_error <= options.tolerance) == converged
