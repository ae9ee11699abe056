"""What the solvers return, when they stop, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference
import torch

import otdd_flash as otdd
from otdd_flash.engine.evidence.scale import magnitude, rounding_floor
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning
from otdd_flash.operators.matrix import MatrixOperator
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.alternating import solve_alternating
from otdd_flash.solver.term.result import TransportTerm
from otdd_flash.solver.term.symmetric import solve_symmetric

DOUBLE = otdd.ComputeOptions(device="cpu", precision="double")
EXACT = Converged(tolerance=1e-9)


def cloud(n: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)).double() + shift


def uniform_operator(cost: torch.Tensor) -> StoredOperator:
    n, m = cost.shape
    return MatrixOperator(cost, torch.ones(n).double() / n, torch.ones(m).double() / m)


def test_between_two_points_the_divergence_is_the_cost() -> None:
    x, y = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    divergence = otdd.sinkhorn_divergence(x, y, epsilon=0.1, compute=DOUBLE)
    assert divergence.value == pytest.approx(12.5, abs=1e-12)
    assert divergence.bounds[0] <= 12.5 <= divergence.bounds[1]


def test_a_translated_cloud_is_at_the_cost_of_the_translation() -> None:
    """S_epsilon(x, x + v) = lambda_x |v|^2 for every epsilon."""
    x = cloud(30, 0)
    moved = x + torch.tensor([1.0, 2.0]).double()
    divergence = otdd.sinkhorn_divergence(x, moved, epsilon=0.5, options=EXACT, compute=DOUBLE)
    assert divergence.value == pytest.approx(2.5, abs=1e-7)


def test_large_epsilon_gives_the_mean_discrepancy() -> None:
    """S_epsilon tends to lambda_x |mean x - mean y|^2 as epsilon grows (an MMD)."""
    x, y = cloud(20, 0), cloud(25, 1, shift=1.0)
    divergence = otdd.sinkhorn_divergence(x, y, epsilon=1e4, options=EXACT, compute=DOUBLE)
    expected = 0.5 * float((x.mean(0) - y.mean(0)).square().sum())
    assert divergence.value == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 5.0])
def test_terms_agree_with_the_dense_reference(epsilon: float) -> None:
    cost = reference.dense_cost(cloud(20, 0), cloud(30, 1, 1.0))
    operator = uniform_operator(cost)
    term = solve_alternating(operator, epsilon, EXACT)
    value, f, g = reference.entropic_transport(cost, operator.a, operator.b, epsilon)
    assert term.value == pytest.approx(value, abs=1e-9)
    torch.testing.assert_close(term.f - term.f.mean(), f - f.mean(), rtol=0, atol=1e-7)
    torch.testing.assert_close(term.g - term.g.mean(), g - g.mean(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 5.0])
def test_one_potential_solves_the_self_term(epsilon: float) -> None:
    cost = reference.dense_cost(cloud(30, 0), cloud(30, 0))
    operator = uniform_operator(cost)
    term = solve_symmetric(operator, epsilon, EXACT)
    value, f, _ = reference.entropic_transport(cost, operator.a, operator.b, epsilon)
    assert term.value == pytest.approx(value, abs=1e-8)
    torch.testing.assert_close(term.f - term.f.mean(), f - f.mean(), rtol=0, atol=1e-6)
    assert term.iterations < 40


def test_the_value_is_a_lower_bound_of_the_dual() -> None:
    """Any potentials are valid in the dual, so stopping early can only lower the value."""
    operator = uniform_operator(reference.dense_cost(cloud(20, 0), cloud(30, 1, 1.0)))
    values = [
        solve_alternating(operator, 0.1, Converged(1e-12, max_iterations=k)).value
        for k in (1, 3, 10, 30, 100, 300)
    ]
    assert values[-1] == max(values)
    assert values[0] < values[-1] - 1e-3


def test_scaling_needs_fewer_iterations_than_a_cold_start() -> None:
    operator = uniform_operator(reference.dense_cost(cloud(60, 0), cloud(60, 1, 2.0)))
    epsilon = operator.costs.mean * 3e-3
    scaled = solve_alternating(operator, epsilon, Converged())
    cold = solve_alternating(operator, epsilon, Converged(), start=torch.zeros(60).double())
    assert scaled.converged
    assert cold.converged
    assert scaled.iterations < 0.7 * cold.iterations


def test_a_warm_start_from_the_solution_stops_at_once() -> None:
    operator = uniform_operator(reference.dense_cost(cloud(20, 0), cloud(30, 1)))
    solved = solve_alternating(operator, 0.1, Converged())
    again = solve_alternating(operator, 0.1, Converged(), start=solved.g)
    # The one that sees it is the one that certifies.
    assert again.iterations == 1


def test_marginals_of_the_reported_plan_reach_the_tolerance() -> None:
    cost = reference.dense_cost(cloud(40, 0), cloud(50, 1, 1.0))
    operator = uniform_operator(cost.float())
    term = solve_alternating(operator, 0.02, Converged(tolerance=1e-3))
    plan = reference.plan(cost, operator.a, operator.b, term.f, term.g, 0.02)
    assert term.converged
    assert float((plan.sum(0) - operator.b).abs().sum()) <= 1e-3
    assert float((plan.sum(1) - operator.a).abs().sum()) <= 1e-3


@pytest.mark.parametrize("solve", [otdd.sinkhorn, otdd.sinkhorn_divergence])
def test_stopping_early_warns_and_says_so(
    solve: Callable[..., TransportTerm | Divergence],
) -> None:
    options = Converged(max_iterations=2)
    clouds = cloud(40, 0), cloud(30, 1, 2.0)
    with pytest.warns(
        NotConvergedWarning, match=r"after 2 iterations in .*xy.*solver\.tolerance=0.001"
    ) as told:
        found = solve(*clouds, epsilon=0.01, options=options, compute=DOUBLE)
    assert [entry.filename for entry in told] == [__file__]
    assert not found.converged
    assert found.stopped_by == "max_iterations"
    assert found.marginal_error > 1e-3


@pytest.mark.parametrize("solve", [otdd.sinkhorn, otdd.sinkhorn_divergence])
def test_required_convergence_raises(solve: Callable[..., object]) -> None:
    options = Converged(max_iterations=2, require_convergence=True)
    with pytest.raises(ConvergenceError, match="not converged after 2 iterations"):
        solve(cloud(40, 0), cloud(30, 1, 2.0), epsilon=0.01, options=options)


@pytest.mark.parametrize("solve", [solve_alternating, solve_symmetric])
def test_a_tolerance_below_rounding_is_refused(solve: object) -> None:
    points = cloud(30, 0) * 10
    operator = uniform_operator(reference.dense_cost(points, points).float())
    with pytest.raises(InputError, match=r"too tight for float32.*precision=double"):
        solve(operator, 1e-3, Converged(tolerance=1e-7))  # type: ignore[operator]


@pytest.mark.parametrize("divisor", [2, 20, 200])
def test_every_tolerance_that_is_not_refused_is_reached(divisor: float) -> None:
    """Just above the refusal, the measured error must not stall above what is left to it."""
    operator = uniform_operator(reference.dense_cost(cloud(50, 0), cloud(50, 1)).float())
    epsilon = operator.costs.mean / divisor
    solved = solve_alternating(operator, epsilon, Converged(1e-2))
    floor = rounding_floor(operator.costs, float(magnitude(operator, solved.f, solved.g)), epsilon)
    with pytest.raises(InputError, match="too tight"):
        solve_alternating(operator, epsilon, Converged(1.9 * floor))
    assert solve_alternating(operator, epsilon, Converged(4 * floor)).converged


def test_progress_hears_of_every_iteration() -> None:
    heard: list[tuple[str, int, float]] = []
    divergence = otdd.sinkhorn_divergence(
        cloud(20, 0),
        cloud(20, 1),
        epsilon=0.1,
        compute=DOUBLE,
        progress=lambda *event: heard.append(event),
    )
    for name, term in divergence.terms.items():
        iterations = [iteration for where, iteration, _ in heard if where == name]
        assert iterations == list(range(1, term.iterations + 1))
    assert heard[-1][2] <= 1e-3


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_epsilon_must_be_positive(epsilon: float) -> None:
    with pytest.raises(InputError, match="epsilon must be positive and finite"):
        otdd.sinkhorn(cloud(3, 0), cloud(3, 1), epsilon=epsilon)


def test_clouds_of_different_dimension_are_refused() -> None:
    with pytest.raises(InputError, match="source has 2 features and target has 3"):
        otdd.sinkhorn(cloud(3, 0), torch.ones(4, 3), epsilon=1.0)


def test_a_class_table_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"shape \(2, 2\).*got \(3, 3\)"):
        otdd.sinkhorn(cloud(3, 0), cloud(3, 1), epsilon=1.0, class_table=torch.zeros(3, 3))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": 2.5}, "tolerance"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"bound_width": 0.0}, r"solver\.bound_width must be positive and finite, got 0"),
        (
            {"max_seconds": float("nan")},
            r"solver\.max_seconds must be positive and finite, got nan",
        ),
    ],
)
def test_bad_solver_options(bad: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Converged(**bad)  # type: ignore[arg-type]
