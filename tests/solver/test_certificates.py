"""What is proved of potentials that no solve would give: chosen at random, far from the optimum."""

from __future__ import annotations

import math
from functools import partial

import pytest
import reference
import torch
from refusals import Refusals
from torch import Tensor

from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.alternating import solve_alternating
from otdd_flash.solver.term.certificate import Certificate, certify, certify_self
from otdd_flash.solver.term.symmetric import solve_symmetric

TRIALS = 150


def cost_between(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> LabelledCost:
    labels = [torch.zeros(len(side), dtype=torch.int64) for side in (x, y)]
    none = torch.zeros(1, 1, dtype=torch.float64)
    return LabelledCost(
        x, y, a, b, labels_x=labels[0], labels_y=labels[1], class_costs=none, lambda_x=1.0
    )


def few_points(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two or three points on a line, (n, 1), and masses over seven orders of magnitude."""
    n = int(torch.randint(2, 4, (1,), generator=draw))
    masses = torch.rand(n, generator=draw).double() ** 4 + 1e-6
    return torch.randn(n, 1, generator=draw).double(), masses / masses.sum()


def log_uniform(draw: torch.Generator, low: float, high: float) -> float:
    return float(10 ** (low + (high - low) * torch.rand(1, generator=draw).double()))


def assert_proved(found: Certificate, cost: Tensor, a: Tensor, b: Tensor, epsilon: float) -> None:
    truth, _, _ = reference.entropic_transport(cost, a, b, epsilon)
    slack = 1e-10 * (1 + abs(truth))
    assert found.bounds[0] - slack <= truth <= found.bounds[1] + slack
    plan = reference.plan(cost, a, b, found.f, found.g, epsilon)
    error = max(float((plan.sum(1) - a).abs().sum()), float((plan.sum(0) - b).abs().sum()))
    assert error <= found.marginal_error + 1e-9


def one_potential(seed: int) -> tuple[StreamedOperator, Tensor, Tensor, float]:
    """A few points' cost with itself, their masses, a potential and epsilon."""
    draw = torch.Generator().manual_seed(seed)
    x, a = few_points(draw)
    operator = StreamedOperator(cost_between(x, x, a, a), torch.float64)
    epsilon = log_uniform(draw, -2, 2) * operator.costs.mean
    f = torch.randn(len(x), generator=draw).double() * log_uniform(draw, -2, 1)
    return operator, a, (f * operator.costs.spread).clamp_max(300 * epsilon), epsilon


def test_of_one_potential() -> None:
    """In a third of these the bound by oscillation is less than three times what it has to be."""
    for seed in range(TRIALS):
        operator, a, f, epsilon = one_potential(seed)
        cost = -next(operator.negative_costs())[1]
        assert_proved(certify_self(operator, f, epsilon), cost, a, a, epsilon)


@pytest.mark.parametrize("seed", [308, 397, 443])
def test_above_the_costs_the_bound_by_oscillation_is_the_lesser(seed: int) -> None:
    operator, a, f, epsilon = one_potential(seed)
    cost = -next(operator.negative_costs())[1]
    rows = reference.plan(cost, a, a, f, f, epsilon).sum(1)
    total = float(rows.sum())
    # Of the plan of mass 1.
    dual = 2 * float(a @ f) - epsilon * math.log(total)
    swing = float(f.max() - f.min()) + operator.costs.spread
    upper = dual + float((rows / total - a).abs().sum()) * swing
    found = certify_self(operator, f, epsilon).bounds[1]
    assert found == pytest.approx(upper, rel=1e-9, abs=1e-9)


@pytest.mark.slow
def test_of_two_potentials() -> None:
    refusals = Refusals("overflow")
    for seed in range(TRIALS):
        draw = torch.Generator().manual_seed(seed)
        (x, a), (y, b) = few_points(draw), few_points(draw)
        operator = StreamedOperator(cost_between(x, y, a, b), torch.float64)
        epsilon = log_uniform(draw, -2, 2) * operator.costs.mean
        f, g = (
            (torch.randn(n, generator=draw).double() * log_uniform(draw, -2, 1)).clamp_max(
                300 * epsilon
            )
            for n in operator.shape
        )
        cost = reference.dense_cost(x, y, 1.0)
        assert_proved(certify(operator, f, g, epsilon), cost, a, b, epsilon)
        # As they are, without the updates that a solve ends with.
        found = refusals.outcome(partial(certify, operator, f, g, epsilon, updated=g))
        if found is not None:
            assert_proved(found, cost, a, b, epsilon)
    refusals.check()


@pytest.mark.parametrize("own", [False, True])
def test_converged_is_a_marginal_error_within_the_tolerance(own: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 2, generator=draw), torch.randn(30, 2, generator=draw) + 1
    y = x if own else y
    a, b = (torch.full((len(side),), 1 / len(side)).double() for side in (x, y))
    operator = StreamedOperator(cost_between(x, y, a, b), torch.float64)
    solve = solve_symmetric if own else solve_alternating
    epsilon, near = 0.05 * operator.costs.mean, 0
    for iterations in range(1, 7):
        error = solve(operator, epsilon, Converged(1e-9, iterations)).marginal_error
        for tolerance in (0.4 * error, 0.9 * error, 1.1 * error):
            term = solve(operator, epsilon, Converged(tolerance, iterations))
            assert term.converged == (term.marginal_error <= tolerance)
            near += tolerance < term.marginal_error <= 3 * tolerance
    assert near >= 3
