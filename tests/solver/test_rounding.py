"""What float32 hides: the same upper bounds from float64 passes over the original points."""

from __future__ import annotations

import pytest
import torch
from labelled_costs import cost_between

from otdd_flash.cost.points import LabelledCost
from otdd_flash.cost.rounding import float16_rounding
from otdd_flash.operators.point_scores import stored_operator, streamed_operator
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_term


def with_a_far_point(seed: int, far: float, mass: float) -> LabelledCost:
    """Between two clouds of a unit's width, one of which has a point far away, of little mass."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(90, 3, generator=draw), torch.randn(50, 3, generator=draw)
    y[0] = far
    a, b = torch.ones(90, dtype=torch.float64), torch.ones(50, dtype=torch.float64)
    b[0] = mass
    return cost_between(x, y, a / a.sum(), b / b.sum())


@pytest.mark.slow
@pytest.mark.parametrize("relative_epsilon", [1e-2, 1e-5])
def test_a_far_point_of_little_mass(relative_epsilon: float) -> None:
    """Its costs, rounded, are off by more than those of all others."""
    cases = [(1e3, 1.0), (1e5, 1e-2), (1e5, 1e-4), (1e6, 1e-4), (1e4, 1e-5)]
    for seed, (far, mass) in enumerate(cases):
        cost = with_a_far_point(seed, far, mass)
        epsilon = relative_epsilon * cost.mean_cost
        # In float64, one that no rounding spoils.
        truth = solve_term(streamed_operator(cost, torch.float64), epsilon, Converged(1e-6, 500))
        for most in (20, 300):
            options = Converged(max_iterations=most)
            term = solve_term(streamed_operator(cost, torch.float32), epsilon, options)
            assert term.bounds[0] <= truth.bounds[1]
            assert truth.bounds[0] <= term.bounds[1]
            assert term.bounds[1] - truth.bounds[1] <= 0.1 * cost.mean_cost


def test_a_point_whose_mass_rounding_hides_spoils_no_other() -> None:
    """Costs stored in float32 are off by more than epsilon there; all else is solved."""
    cost = with_a_far_point(0, far=1e5, mass=1e-4)
    epsilon = 1e-3 * cost.mean_cost
    assert epsilon < 2.0**-24 * 1e10 / 2
    truth = solve_term(streamed_operator(cost, torch.float64), epsilon, Converged(1e-6, 500))
    stored = stored_operator(cost, torch.float32)
    term = solve_term(stored, epsilon, Converged(max_iterations=300))
    assert term.marginal_error <= 1e-3
    assert term.bounds[0] <= truth.bounds[1]
    assert truth.bounds[0] <= term.bounds[1]
    assert term.bounds[1] - term.bounds[0] <= 1e-4 * cost.mean_cost


@pytest.mark.parametrize("spread", [0.1, 10.0])
def test_the_change_of_costs_by_rounding_points_to_float16(spread: float) -> None:
    """Root mean square of all pairs, of points rounded where kernels do, about the centre."""
    draw = torch.Generator().manual_seed(int(spread))
    x, y = torch.randn(200, 5, generator=draw), spread * torch.randn(120, 5, generator=draw) + 1
    cost = cost_between(x, y)
    # A power of two of which numbers near the largest keep the precision of float16 whole.
    sides = [(side - cost.centre).double() * 256 for side in (x, y)]
    exact, rounded = (
        torch.cdist(*points).square() / 2 / 256**2
        for points in (sides, [side.half().double() for side in sides])
    )
    expected = float((rounded - exact).square().mean().sqrt())
    assert float16_rounding(cost) == pytest.approx(expected, rel=0.1)
