"""Hundreds of random problems: the float64 optimum lies inside every interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import Refusals
from torch import Tensor

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.points import Cloud, LabelledCost
from otdd_flash.formulas.decision import CROSS, SELF
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.point_scores import stored_operator, streamed_operator
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_term
from otdd_flash.solver.solving import sinkhorn, solve
from otdd_flash.solver.term import TransportTerm

# The reference stops at a marginal error of 1e-11, which leaves its value this uncertain.
REFERENCE_ERROR = 1e-10


@dataclass(frozen=True)
class Problem:
    """Labelled clouds of a few points, with some masses zero, and a random solve of them."""

    x: Cloud
    y: Cloud
    table: Tensor
    lambda_x: float
    dtype: torch.dtype
    options: Converged
    relative_epsilon: float
    warm: bool
    stored: bool

    def operator(self, left: Cloud, right: Cloud, block: Tensor) -> TorchOperator[Any]:
        held = stored_operator if self.stored else streamed_operator
        return held(LabelledCost(left, right, block, self.lambda_x), self.dtype)

    def cost(self, left: Cloud, right: Cloud, block: Tensor) -> Tensor:
        return reference.dense_cost(
            left.points, right.points, self.lambda_x, block, left.labels, right.labels
        )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    d, classes = draw(st.sampled_from([1, 2, 5, 64])), draw(st.integers(1, 3))
    x, y = (
        _cloud(
            generator,
            n=draw(st.integers(1, 16) | st.just(40)),
            d=d,
            classes=classes,
            scale=draw(st.sampled_from([0.1, 1.0, 10.0])),
            shift=draw(st.sampled_from([0.0, 3.0, 100.0])) if i else 0.0,
            zeros=draw(st.booleans()),
        )
        for i in range(2)
    )
    table = 10 * torch.rand(2 * classes, 2 * classes, generator=generator).double()
    return Problem(
        x,
        y,
        (table + table.T).fill_diagonal_(0),
        lambda_x=draw(st.sampled_from([0.1, 0.5, 1.0])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        options=Converged(
            draw(st.sampled_from([1e-2, 1e-3, 1e-4, 1e-5])),
            max_iterations=draw(st.sampled_from([1, 2, 5, 20, 2000])),
        ),
        relative_epsilon=10 ** draw(st.floats(-2.5, 1)),
        warm=draw(st.booleans()),
        stored=draw(st.booleans()),
    )


def _cloud(
    generator: torch.Generator,
    *,
    n: int,
    d: int,
    classes: int,
    scale: float,
    shift: float,
    zeros: bool,
) -> Cloud:
    points = scale * torch.randn(n, d, generator=generator) + shift
    masses = torch.rand(n, generator=generator).double() + 0.01
    if zeros and n > 1:
        masses[torch.rand(n, generator=generator) < 0.3] = 0
        masses[0] = 1.0
    labels = torch.randint(0, classes, (n,), generator=generator)
    return Cloud(points, masses / masses.sum(), labels)


def contains(term: TransportTerm, truth: float) -> bool:
    slack = REFERENCE_ERROR * (1 + abs(truth))
    return term.bounds[0] - slack <= truth <= term.bounds[1] + slack


def marginal_error(term: TransportTerm, cost: Tensor, a: Tensor, b: Tensor) -> float:
    """The larger of the two L1 errors of the returned potentials' plan, in float64."""
    plan = reference.plan(cost, a, b, term.f, term.g, term.epsilon)
    return max(float((plan.sum(1) - a).abs().sum()), float((plan.sum(0) - b).abs().sum()))


def check_all(count: int, check: Callable[[Problem, Refusals], None]) -> None:
    """So many random problems, of which hardly any may be refused."""
    refusals = Refusals("too tight")

    @settings(max_examples=count, deadline=None, derandomize=True)
    @given(problems())
    def one(problem: Problem) -> None:
        check(problem, refusals)

    one()
    refusals.check()


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["cross", "self"])
def test_terms(own: bool) -> None:
    check_all(150, partial(check_term, own=own))


def check_term(problem: Problem, refusals: Refusals, own: bool) -> None:
    x, y, half = problem.x, problem.x if own else problem.y, len(problem.table) // 2
    block = problem.table[:half, :half] if own else problem.table[:half, half:]
    operator, cost = problem.operator(x, y, block), problem.cost(x, y, block)
    epsilon = problem.relative_epsilon * max(operator.costs.mean, 1e-3)
    truth, _, optimal = reference.entropic_transport(cost, x.masses, y.masses, epsilon)
    start = None
    if problem.warm:
        # Potentials of a problem nearby, as the previous step of a flow leaves them.
        start = (optimal + epsilon * torch.sin(torch.arange(len(optimal)))).to(problem.dtype)
    term = refusals.outcome(
        partial(
            solve_term,
            operator,
            epsilon,
            problem.options,
            SELF if own else CROSS,
            start=start,
        )
    )
    if term is None:
        return
    assert (term.f is term.g) == own
    assert contains(term, truth)
    assert marginal_error(term, cost, x.masses, y.masses) <= term.marginal_error + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fast", "high", "double"])
def test_divergences(precision: str) -> None:
    """The three terms' intervals together, at whatever iteration they stop."""
    check_all(50, partial(check_divergence, precision=precision))


def check_divergence(problem: Problem, refusals: Refusals, precision: str) -> None:
    x, y, half = problem.x, problem.y, len(problem.table) // 2
    names = tuple(map(str, range(half)))
    source, target = (
        LabeledSamples(cloud.points, cloud.labels, names, cloud.masses) for cloud in (x, y)
    )
    weights = GroundCost(problem.lambda_x, 1.0)
    compute = ComputeOptions(device="cpu", precision=precision)
    blocks = problem.table[:half, half:], problem.table[:half, :half], problem.table[half:, half:]
    costs = tuple(
        problem.cost(left, right, block)
        for (left, right), block in zip(((x, y), (x, x), (y, y)), blocks, strict=True)
    )
    epsilon = problem.relative_epsilon * float(x.masses @ costs[0] @ y.masses)
    truth = reference.sinkhorn_divergence(costs, x.masses, y.masses, epsilon)
    whole = Comparison.between(source, target, epsilon, problem.table, weights, compute)
    found = refusals.outcome(lambda: solve(whole, problem.options))
    if found is None:
        return
    slack = REFERENCE_ERROR * (1 + abs(found.xy.value))
    assert found.bounds[0] - slack <= truth <= found.bounds[1] + slack
    assert found.bounds[0] < found.value < found.bounds[1]


@pytest.mark.parametrize("count", [1, 3])
def test_costs_below_the_normal_numbers(count: int) -> None:
    """In float32 they are multiples of 2^-149, or 0: what they lose is no share of them."""
    for distance in (1e-25, 3e-23, 1e-22):
        x = torch.full((count, 1), distance, dtype=torch.float64)
        found = sinkhorn(x, torch.zeros_like(x[:1]), epsilon=1e-37)
        # All of the cloud is moved to one point.
        assert found.bounds[0] <= distance**2 / 2 <= found.bounds[1]
        assert found.bounds[1] - found.bounds[0] < 2e-45


def test_a_term_of_a_cost_that_is_off_moves_outwards() -> None:
    """By the error; each sum of the plan, of which there is 1 + its error, by exp(error / eps)."""
    f = torch.zeros(1)
    term = TransportTerm(
        f, f, 2.0, 3.0, (2.5, 3.5), 0.25, 0.5, 1, 2.0, converged=True, stopped_by="tolerance"
    )
    found = term.widened(2.0 * math.log(1.5))
    assert found.bounds == pytest.approx((2.5 - 2 * math.log(1.5), 3.5 + 2 * math.log(1.5)))
    assert found.marginal_error == pytest.approx(0.25 + 0.5 * 1.25)
    assert found.value == 3.0
