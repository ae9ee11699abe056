"""What float32 hides: the same upper bounds from float64 passes over the original points."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from refusals import Refusals

from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.alternating import solve_alternating
from otdd_flash.solver.term.certificate import certify_self
from otdd_flash.solver.term.symmetric import solve_symmetric

DIMS = (1, 3, 30, 300)


def operators(seed: int, *, own: bool) -> tuple[StreamedOperator, StreamedOperator]:
    """The cost of random labelled clouds, or of one with itself, in float32 and in float64."""
    draw = torch.Generator().manual_seed(seed)
    n, m = torch.randint(2, 40, (2,), generator=draw).tolist()
    d = DIMS[seed % len(DIMS)]
    x, y = torch.randn(n, d, generator=draw), torch.randn(m, d, generator=draw)
    a, b = (torch.rand(size, generator=draw).double() + 0.01 for size in (n, m))
    a, b = a / a.sum(), b / b.sum()
    labels = [torch.randint(0, 3, (size,), generator=draw) for size in (n, m)]
    table = 5 * torch.rand(3, 3, generator=draw).double()
    table = (table + table.T).fill_diagonal_(0)
    cost = LabelledCost(
        x,
        x if own else y,
        a,
        a if own else b,
        labels_x=labels[0],
        labels_y=labels[0] if own else labels[1],
        class_costs=table,
        lambda_x=0.5,
    )
    return StreamedOperator(cost, torch.float32), StreamedOperator(cost, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("relative_epsilon", [2e-3, 0.3])
def test_cross_terms(relative_epsilon: float) -> None:
    refusals = Refusals("too tight")
    for seed in range(8):
        single, double = operators(seed, own=False)
        epsilon = relative_epsilon * single.costs.mean
        term = refusals.outcome(
            partial(solve_alternating, single, epsilon, Converged(3e-4, max_iterations=300))
        )
        if term is None:
            continue
        options = Converged(1e-6, max_iterations=200)
        truth = solve_alternating(double, epsilon, options, start=term.g.double())
        assert term.bounds[0] <= truth.bounds[1]
        assert truth.bounds[0] <= term.bounds[1]
    refusals.check()


def with_a_far_point(seed: int, far: float, mass: float) -> LabelledCost:
    """Between two clouds of a unit's width, one of which has a point far away, of little mass."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(90, 3, generator=draw), torch.randn(50, 3, generator=draw)
    y[0] = far
    a, b = torch.ones(90, dtype=torch.float64), torch.ones(50, dtype=torch.float64)
    b[0] = mass
    labels = [torch.zeros(len(side), dtype=torch.int64) for side in (x, y)]
    return LabelledCost(
        x,
        y,
        a / a.sum(),
        b / b.sum(),
        labels_x=labels[0],
        labels_y=labels[1],
        class_costs=torch.zeros(1, 1, dtype=torch.float64),
        lambda_x=0.5,
    )


@pytest.mark.slow
@pytest.mark.parametrize("relative_epsilon", [1e-2, 1e-5])
def test_a_far_point_of_little_mass(relative_epsilon: float) -> None:
    """Its costs, rounded, are off by more than those of all others."""
    cases = [(1e3, 1.0), (1e5, 1e-2), (1e5, 1e-4), (1e6, 1e-4), (1e4, 1e-5)]
    for seed, (far, mass) in enumerate(cases):
        cost = with_a_far_point(seed, far, mass)
        epsilon = relative_epsilon * cost.mean_cost
        # In float64, one that no rounding spoils.
        truth = solve_alternating(
            StreamedOperator(cost, torch.float64), epsilon, Converged(1e-6, 500)
        )
        for most in (20, 300):
            options = Converged(max_iterations=most)
            term = solve_alternating(StreamedOperator(cost, torch.float32), epsilon, options)
            assert term.bounds[0] <= truth.bounds[1]
            assert truth.bounds[0] <= term.bounds[1]
            assert term.bounds[1] - truth.bounds[1] <= 0.1 * cost.mean_cost


def test_a_point_whose_mass_rounding_hides_spoils_no_other() -> None:
    """Costs stored in float32 are off by more than epsilon there; all else is solved."""
    cost = with_a_far_point(0, far=1e5, mass=1e-4)
    epsilon = 1e-3 * cost.mean_cost
    assert epsilon < 2.0**-24 * 1e10 / 2
    truth = solve_alternating(StreamedOperator(cost, torch.float64), epsilon, Converged(1e-6, 500))
    stored = StoredOperator.keep(cost, torch.float32)
    term = solve_alternating(stored, epsilon, Converged(max_iterations=300))
    assert term.marginal_error <= 1e-3
    assert term.bounds[0] <= truth.bounds[1]
    assert truth.bounds[0] <= term.bounds[1]
    assert term.bounds[1] - term.bounds[0] <= 1e-4 * cost.mean_cost


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("epsilon", "count"), [(0.5, 8), (1.0, 20), (20.0, 10)])
def test_self_terms(epsilon: float, count: int) -> None:
    for seed in range(count):
        single, double = operators(seed, own=True)
        term = solve_symmetric(single, epsilon, Converged(1e-3, max_iterations=20))
        again = certify_self(double, term.f, epsilon)
        assert term.bounds[0] <= again.bounds[1]
        assert again.bounds[0] <= term.bounds[1]
        assert again.marginal_error <= term.marginal_error + 1e-12
