"""What formulas make of the numbers of dense problems, and what follows from it."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.formulas.decision import (
    LEVEL_TOLERANCE,
    Decision,
    Goal,
    Levels,
    decide,
    started,
)
from otdd_flash.formulas.evidence import (
    CostNumbers,
    Evaluation,
    Evidence,
    PassErrors,
    Products,
    evaluate_cross,
    evaluate_self,
    rounding_of,
)

EPSILON, OFFSET, REACH = 0.3, 0.25, 1e-3
UNIT, UNIT_OF_SUMS = 2.0**-24, 2.0**-11
NOTHING = Products([], [])


class Dense(NamedTuple):
    """A problem with potentials, f = T(g), or f = g of a cloud with itself, and T'(f) - g."""

    cost: Tensor
    a: Tensor
    b: Tensor
    f: Tensor
    g: Tensor
    residual: Tensor

    @property
    def columns(self) -> Tensor:
        return reference.plan(self.cost, self.a, self.b, self.f, self.g, EPSILON).sum(0)

    def dual(self, f: Tensor, g: Tensor) -> float:
        return float(reference.dual_value(self.cost, self.a, self.b, f, g, EPSILON))

    @property
    def truth(self) -> float:
        return float(reference.entropic_transport(self.cost, self.a, self.b, EPSILON)[0])

    @property
    def spread(self) -> float:
        return float(self.cost.max() - self.cost.min())

    def evidence(self, symmetric: bool) -> Evidence:
        """Of these numbers, in floats."""
        b, g, change = self.b, self.g, (-self.residual / EPSILON).exp()
        numbers = [self.a @ self.f, self.a @ self.f.abs(), b @ g, b @ g.abs(), g.min(), g.max()]
        numbers += [b @ (change - 1).abs(), b @ change, *[b.sum() * 0] * 2, b @ self.residual]
        parts = *map(float, numbers), *[0.0] * 5, NOTHING, NOTHING
        found = Evaluation(*parts, float(b @ self.residual))
        errors = PassErrors(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, REACH, 0.0)
        mean = float(self.a @ self.cost @ b)
        costs = CostNumbers(mean, self.spread, OFFSET, errors, UNIT, UNIT_OF_SUMS)
        return (evaluate_self if symmetric else evaluate_cross)(costs, found, EPSILON)


def cross() -> Dense:
    draw = torch.Generator().manual_seed(1)
    cost = torch.rand(5, 7, generator=draw).double()
    a, b = (torch.rand(n, generator=draw).double() + 0.1 for n in (5, 7))
    a, b = a / a.sum(), b / b.sum()
    g = 0.2 * torch.randn(7, generator=draw).double()
    f = reference.softmin_rows(cost, b, g, EPSILON)
    return Dense(cost, a, b, f, g, reference.softmin_rows(cost.T, a, f, EPSILON) - g)


def own(shift: float) -> Dense:
    """A cloud with itself, so much away from a plan of about mass 1."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(6, 2, generator=draw)
    cost, a = reference.dense_cost(x, x), torch.rand(6, generator=draw).double() + 0.1
    a = a / a.sum()
    f = reference.softmin_rows(cost, a, torch.zeros(6).double(), EPSILON) / 2 + shift
    return Dense(cost, a, a, f, f, reference.softmin_rows(cost, a, f, EPSILON) - f)


def assert_close(found: float, expected: float) -> None:
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_a_cross_term_has_the_numbers_of_its_plan() -> None:
    problem = cross()
    found = problem.evidence(symmetric=False)
    dual = problem.dual(problem.f, problem.g)
    assert_close(found.dual, dual)
    assert_close(found.gain, problem.dual(problem.f, problem.g + problem.residual) - dual)
    missed = float((problem.columns - problem.b).abs().sum())
    assert_close(found.error, missed)
    assert_close(found.value, dual + OFFSET)
    # Rows are exact: the plan's mass is 1, and what float64 loses is below 1e-10.
    osc = float(problem.g.max() - problem.g.min())
    assert found.upper == pytest.approx(dual + missed * (osc + problem.spread) / 2 + OFFSET)
    assert found.lower < found.value == pytest.approx(found.lower)
    assert found.lower <= problem.truth + OFFSET <= found.upper
    size = float(problem.a @ problem.f.abs() + problem.b @ problem.g.abs())
    mean = float(problem.a @ problem.cost @ problem.b)
    assert_close(found.noise, 2.0**-24 * (size + 2 * mean) / 0.3 + 2.0**-9)
    assert_close(found.reach, found.floor + 1e-3 / 0.3)


def test_dual_and_gain_hold_where_rounding_leaves_another_mass() -> None:
    problem = cross()
    f = problem.f + 0.1
    residual = reference.softmin_rows(problem.cost.T, problem.a, f, EPSILON) - problem.g
    found = problem._replace(f=f, residual=residual).evidence(symmetric=False)
    dual = problem.dual(f, problem.g)
    assert_close(found.dual, dual)
    assert_close(found.gain, problem.dual(f, problem.g + residual) - dual)


@pytest.mark.parametrize("shift", [0.0, 0.4, -0.4])
def test_a_self_term_has_the_numbers_of_its_plan_at_mass_one(shift: float) -> None:
    problem = own(shift)
    found = problem.evidence(symmetric=True)
    mass = float(problem.columns.sum())
    f = problem.f - EPSILON / 2 * math.log(mass)
    dual = problem.dual(f, f)
    assert_close(found.dual, dual)
    # Of one of its two roles alone; both halfway gain no less.
    residual = reference.softmin_rows(problem.cost, problem.a, f, EPSILON) - f
    assert_close(found.gain, problem.dual(f, f + residual) - dual)
    assert problem.dual(f + residual / 2, f + residual / 2) - dual >= found.gain
    missed = float((problem.columns / mass - problem.a).abs().sum())
    measured = float((problem.columns - problem.a).abs().sum()) + abs(mass - 1)
    assert missed <= found.error
    assert_close(found.error, min(measured, 2.0))
    osc = float(f.max() - f.min())
    assert found.upper == pytest.approx(dual + found.error * (osc + problem.spread) + OFFSET)
    assert found.lower <= problem.truth + OFFSET <= found.upper
    size, mean = 2 * float(problem.a @ problem.f.abs()), float(problem.a @ problem.cost @ problem.a)
    assert_close(found.noise, 2.0**-24 * (size + 2 * mean) / 0.3 + 2.0**-9)
    assert_close(found.reach, found.floor + 1e-3 / 0.3)


def test_what_exponents_lose_makes_itself_grow() -> None:
    """All of it is in theta, of which the floor is growth times theta."""
    errors = PassErrors(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02)
    found = rounding_of(CostNumbers(1.0, 0.5, 0.0, errors, 0.0, 0.0), 0.0, 1.0, 0.0, EPSILON)
    theta = 0.02 * (1.0 + 0.5) / EPSILON
    assert_close(found.floor, theta * math.exp(theta + theta * math.exp(theta)))


# What an evaluation decides.

GOAL = Goal(0.1, 1e-3, 1e-3, max_iterations=50)


def decided(
    error: float,
    *,
    level: float = 0.1,
    dual: float = 1.0,
    iterations: float = 3.0,
    allowed: float = 0.0,
    before: float = math.inf,
    age: float = 0.0,
    rounding: float = 0.0,
    symmetric: bool = False,
) -> Decision:
    """Decide of a plan of mass 1, after one with the dual 1 whose plain update gains nothing."""
    state = started(iterations, Levels(level, 1.6, allowed, before, 1.0))
    if age:
        state = state._replace(progress=state.progress._replace(gap=error, dual=dual, age=age))
    state = state._replace(trust=state.trust._replace(dual=1.0, lowest=0.1))
    found = Evaluation(*[0.0] * 16, NOTHING, NOTHING, 0.0)
    found = found._replace(row_value=dual - 0.5, value=0.5, row_size=0.75, size=0.5)
    found = found._replace(gap=error, mass=1.0)
    errors = PassErrors(rounding, rounding, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    costs = CostNumbers(1.0, 1.0, 0.0, errors, 1e-12, 1e-12)
    return decide(GOAL, costs, state, found, symmetric)


# Whether potentials are kept, a plain update follows, the level changes, the problem is done.
DECISIONS = {
    "a step that gains": ((0.05, {"dual": 1.1}), (True, False, False, False)),
    "a step that loses": ((0.05, {"dual": 0.9}), (False, True, False, False)),
    "within tolerance": ((5e-4, {}), (True, True, False, True)),
    "within tolerance after a loss": ((5e-4, {"dual": 0.9}), (True, True, False, True)),
    "the last iteration": ((0.05, {"iterations": 50.0}), (True, True, False, True)),
    "a loss in the last": ((0.05, {"dual": 0.9, "iterations": 50.0}), (False, True, False, True)),
    "the end of a level": ((0.018, {"level": 0.4, "dual": 0.9}), (True, True, True, False)),
    "no end of a level": ((0.022, {"level": 0.4}), (True, False, False, False)),
    "a try": ((0.45, {"allowed": 8.0}), (False, True, False, False)),
    "a try far away": ((0.55, {"allowed": 8.0}), (True, True, True, False)),
    "a try that falls": ((0.05, {"allowed": 8.0, "before": 0.5}), (True, False, False, False)),
    "a slow try": ((0.05, {"allowed": 8.0, "before": 0.06}), (True, True, True, False)),
    # Of 1e-4 in two passes, over 0.1, are 2e-3.
    "hopeless rounding": ((3e-3, {"rounding": 1e-4}), (True, True, False, True)),
    "hopeless far away": ((0.05, {"rounding": 1e-4}), (True, False, False, False)),
    "no progress": ((4e-3, {"age": 19.0, "rounding": 2.4e-5}), (True, True, False, True)),
    "no progress yet": ((4e-3, {"age": 18.0, "rounding": 2.4e-5}), (True, False, False, False)),
}


def of_case(name: str) -> Decision:
    (error, more), _ = DECISIONS[name]
    return decided(error, **more)


@pytest.mark.parametrize("case", DECISIONS)
def test_an_evaluation_decides(case: str) -> None:
    found, expected = of_case(case), DECISIONS[case][1]
    assert (found.kept, found.plain, found.changes, found.done) == expected
    trust, progress = found.state.trust, found.state.progress
    if found.changes:
        assert (*trust, *progress) == (-math.inf, 0, math.inf, 0, 0, 1, math.inf, -math.inf, 0)
    elif found.kept and not found.done:
        assert trust.lowest == pytest.approx(min(0.1, found.reported[3] - found.reported[4]))
        assert progress.dual == found.reported[0]


def test_levels_halve_where_they_end_and_a_try_that_is_given_up_starts_at_the_top() -> None:
    ended, given_up = of_case("the end of a level"), of_case("a try far away")
    assert (ended.state.levels.level, ended.extrapolation) == (0.2, 0.5)
    assert (given_up.state.levels.level, given_up.extrapolation) == (1.6, 0.0)
    assert given_up.state.levels.descended == given_up.state.levels.allowed == 0.0
    last = decided(LEVEL_TOLERANCE / 2, level=0.15)
    assert last.state.levels.level == GOAL.epsilon


def test_an_evaluation_tells_what_was_proved() -> None:
    found = decided(0.05, dual=1.1, rounding=1e-6)
    value, lower, upper, error, hidden, iterations, size = found.reported
    assert (value, iterations, size) == (1.1, 3.0, 1.25)
    assert lower < value < upper
    assert error == 0.05 + hidden == pytest.approx(0.05 + 2e-5, rel=1e-3)
    assert decided(0.05, symmetric=True).reported[6] == 1.0
    # All of an error that does not fall is rounding.
    stalled = of_case("no progress").reported
    assert stalled[4] == stalled[3]
