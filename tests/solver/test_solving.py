"""What the solvers return, when they stop, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import reference
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning

DOUBLE = otdd.ComputeOptions(device="cpu", precision="double")
SOLVES = [otdd.sinkhorn, otdd.sinkhorn_divergence]


def cloud(n: int, seed: int, shift: float = 0.0) -> Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)).double() + shift


def test_values_of_a_closed_form() -> None:
    x, y = cloud(20, 0), cloud(25, 1, shift=1.0)
    means = 0.5 * float((x.mean(0) - y.mean(0)).square().sum())
    one, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    for name, sides, epsilon, expected in (
        ("between two points it is the cost", (one, other), 0.1, 12.5),
        # S_epsilon(x, x + v) = lambda_x |v|^2 for every epsilon.
        ("of a translated cloud", (x, x + torch.tensor([1.0, 2.0])), 0.5, 2.5),
        # S_epsilon tends to lambda_x |mean x - mean y|^2 as epsilon grows (an MMD).
        ("at a large epsilon", (x, y), 1e4, means),
    ):
        found = otdd.sinkhorn_divergence(
            *sides, epsilon=epsilon, options=otdd.Converged(1e-6), compute=DOUBLE
        )
        off = 1e-3 * expected if epsilon > 1 else 1e-7
        assert found.value == pytest.approx(expected, abs=off), name
        assert found.bounds[0] - off <= expected <= found.bounds[1] + off, name


@pytest.mark.parametrize("solve", SOLVES)
def test_stopping_early_warns_or_raises_and_says_so(solve: Callable[..., Any]) -> None:
    clouds, settings = (cloud(40, 0), cloud(30, 1, 2.0)), {"epsilon": 0.01, "compute": DOUBLE}
    with pytest.warns(
        NotConvergedWarning, match=r"after 2 iterations in .*xy.*solver\.tolerance=0.001"
    ) as told:
        found = solve(*clouds, options=otdd.Converged(max_iterations=2), **settings)
    assert [entry.filename for entry in told] == [__file__]
    assert not found.converged
    assert found.stopped_by == "max_iterations"
    assert found.marginal_error > 1e-3
    strict = otdd.Converged(max_iterations=2, require_convergence=True)
    with pytest.raises(ConvergenceError, match="not converged after 2 iterations"):
        solve(*clouds, options=strict, **settings)


@pytest.mark.parametrize("precision", ["fast", "double"])
def test_progress_hears_of_every_iteration(precision: otdd.Precision) -> None:
    """In float32 terms are solved side by side: that of a self term's certificate is told, too."""
    heard: list[tuple[str, int, float]] = []
    divergence = otdd.sinkhorn_divergence(
        cloud(20, 0),
        cloud(20, 1),
        epsilon=0.1,
        compute=otdd.ComputeOptions("cpu", precision=precision),
        progress=lambda *event: heard.append(event),
    )
    for name, term in divergence.terms.items():
        iterations = [iteration for where, iteration, _ in heard if where == name]
        assert iterations == list(range(1, term.iterations + 1)), name
    assert heard[-1][2] <= 1e-3


@pytest.mark.parametrize(
    ("other", "settings", "message"),
    [
        (cloud(3, 1), {"epsilon": math.inf}, "epsilon must be finite and not negative"),
        (torch.ones(4, 3), {"epsilon": 1.0}, "source has 2 features and target has 3"),
        (
            cloud(3, 1),
            {"epsilon": 1.0, "class_table": torch.zeros(3, 3)},
            r"shape \(2, 2\).*got \(3, 3\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    other: Tensor, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        otdd.sinkhorn(cloud(3, 0), other, **settings)


# One meaning of the marginal error: a bound of the larger L1 error, of rows or of columns.


class Ended(NamedTuple):
    """Potentials, of which problem, and the marginal error that was reported of them."""

    reported: float
    cost: Tensor
    a: Tensor
    b: Tensor
    f: Tensor
    g: Tensor


def weighted(n: int, seed: int) -> otdd.LabeledSamples:
    """Points with unequal masses, one of them 0."""
    draw = torch.Generator().manual_seed(seed)
    masses = torch.rand(n, generator=draw, dtype=torch.float64) + 0.05
    masses[n // 2] = 0
    points = torch.randn(n, 4, generator=draw, dtype=torch.float64) + seed / 4
    return otdd.LabeledSamples(points, None, (), masses / masses.sum())


X, Y = weighted(33, 0), weighted(20, 1)
SIDES = {"xy": (X, Y), "xx": (X, X), "yy": (Y, Y)}


def cost_of(x: otdd.LabeledSamples, y: otdd.LabeledSamples) -> Tensor:
    return torch.cdist(x.features.double(), y.features.double()).square() / 2


Options = otdd.Converged | otdd.GeomlossSchedule


def terms(options: Options, epsilon: float, **compute: Any) -> Iterator[Ended]:
    """A divergence's cross term and both self terms, and the cross term by itself."""
    where = otdd.ComputeOptions(device="cpu", backend="torch", **compute)
    found = otdd.sinkhorn_divergence(X, Y, epsilon=epsilon, options=options, compute=where)
    alone = otdd.sinkhorn(X, Y, epsilon=epsilon, options=options, compute=where)
    for term, x, y in ((alone, X, Y), *((found.terms[k], *SIDES[k]) for k in SIDES)):
        yield Ended(term.marginal_error, cost_of(x, y), x.weights, y.weights, term.f, term.g)


def matrix(
    dtype: torch.dtype, options: otdd.Converged, epsilon: float, *, blocks: bool
) -> Iterator[Ended]:
    costs = cost_of(X, Y).to(dtype)
    n, m = costs.shape
    given = otdd.CostBlocks(n, m, lambda rows, columns: costs[rows, columns]) if blocks else costs
    found = otdd.matrix_transport(
        given, X.weights, Y.weights, epsilon=epsilon, options=options, compute="cpu"
    )
    yield Ended(found.marginal_error, costs, X.weights, Y.weights, found.f, found.g)


def plans(dtype: torch.dtype, options: otdd.Converged, epsilon: float) -> Iterator[Ended]:
    """Two problems of a batch."""
    costs = torch.stack([cost_of(X, Y), cost_of(X, Y).flip(0)]).to(dtype)
    a, b = X.weights.to(dtype), Y.weights.to(dtype)
    found = otdd.sinkhorn_plans(
        costs, a, b, epsilon=epsilon, tolerance=1e-4, max_iterations=options.max_iterations
    )
    for place, error in enumerate(found.marginal_error.tolist()):
        yield Ended(error, costs[place], a, b, found.f[place], found.g[place])


ROUTES: dict[str, Callable[[otdd.Converged, float], Iterator[Ended]]] = {
    "float64": lambda o, e: terms(o, e, precision="double"),
    "geomloss in float64": lambda o, e: terms(
        otdd.GeomlossSchedule(scaling=0.2 if o.max_iterations < 9 else 0.9), e, precision="double"
    ),
    "matrix in float64": lambda o, e: matrix(torch.float64, o, e, blocks=False),
    "plans in float64": lambda o, e: plans(torch.float64, o, e),
    "float32": lambda o, e: terms(o, e),
    "streamed": lambda o, e: terms(o, e, memory_budget=2000),
    "matrix": lambda o, e: matrix(torch.float32, o, e, blocks=False),
    "blocks": lambda o, e: matrix(torch.float32, o, e, blocks=True),
    "plans": lambda o, e: plans(torch.float32, o, e),
}


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
@pytest.mark.parametrize(("iterations", "epsilon"), [(2, 0.1), (100_000, 1.0)])
@pytest.mark.parametrize("route", ROUTES)
def test_the_marginal_error_is_the_larger_of_rows_and_columns(
    route: str, iterations: int, epsilon: float
) -> None:
    """No smaller than the larger one and not the sum, up to rounding."""
    unit = 2.0**-53 if "float64" in route else 2.0**-24
    options = otdd.Converged(tolerance=1e-4, max_iterations=iterations)
    for ended in ROUTES[route](options, epsilon):
        a, b, costs = ended.a.double(), ended.b.double(), ended.cost.double()
        plan = reference.plan(costs, a, b, ended.f.double(), ended.g.double(), epsilon)
        larger = max(float((plan.sum(1) - a).abs().sum()), float((plan.sum(0) - b).abs().sum()))
        # Of exponents: of costs, and of potentials, which are at most as large.
        rounding = 4 * unit * float(costs.max()) / epsilon
        assert larger - rounding <= ended.reported <= 1.5 * larger + rounding
        assert math.isfinite(ended.reported)


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
def test_a_solve_ends_at_the_first_evaluation_within_its_tolerance() -> None:
    """What is compared with the tolerance is the same number, so that a looser one ends earlier."""

    def solved(tolerance: float) -> Any:
        options = otdd.Converged(tolerance, max_iterations=4)
        return otdd.sinkhorn(X, Y, epsilon=0.3, options=options, compute=DOUBLE)

    with pytest.warns(NotConvergedWarning):
        reached = solved(1e-9)
    for share, converged in ((1.001, True), (0.999, False)):
        term = solved(share * reached.marginal_error)
        assert term.converged == (term.marginal_error <= term.tolerance) == converged, share
