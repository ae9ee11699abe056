"""Closed-form derivatives of solved terms against finite differences of dense float64 formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference
import torch
from gradient_cases import ALL, EPSILON, EXACT, POINTS, Point, assert_same, gradient_of
from torch import Tensor

from otdd_flash.operators.base import Execution, Operator
from otdd_flash.operators.matrix import MatrixOperator
from otdd_flash.solver.gradient import DivergenceGradient
from otdd_flash.solver.term.result import TransportTerm
from otdd_flash.solver.term_gradient import Input, Needs, cross_gradient, self_gradient

SELF_INPUTS: Needs = ALL - {"y", "b"}


@pytest.fixture(params=list(POINTS), ids=list(POINTS))
def point(request: pytest.FixtureRequest) -> Point:
    return POINTS[request.param]


def term_at(f: Tensor, g: Tensor) -> TransportTerm:
    """A term whose potentials are given; its proof does not matter here."""
    proof = {"converged": False, "stopped_by": "max_iterations"}
    return TransportTerm(f, g, EPSILON, 0.0, (0.0, 0.0), 1.0, 1e-3, 1, 1, **proof)


def off_centre(potential: Tensor, seed: int) -> Tensor:
    """Potentials whose plan has neither the right marginals nor the mass 1."""
    noise = torch.randn(len(potential), generator=torch.Generator().manual_seed(seed))
    return potential + 0.2 * EPSILON * noise.double() + 0.1 * EPSILON


def rough_potentials(point: Point) -> tuple[Tensor, Tensor]:
    """Unconverged; a point without mass has its best potential, as gradients assume."""
    cost = point.cost("xy")
    _, f, g = reference.entropic_transport(cost, point.a, point.b, EPSILON)
    f, g = off_centre(f, 1), off_centre(g, 2)
    best_f = reference.softmin_rows(cost, point.b, torch.where(point.b > 0, g, 0), EPSILON)
    best_g = reference.softmin_rows(cost.T, point.a, torch.where(point.a > 0, f, 0), EPSILON)
    return torch.where(point.a > 0, f, best_f), torch.where(point.b > 0, g, best_g)


def differences(point: Point, key: Input, f: Tensor, g: Tensor, term: str) -> Tensor:
    """dD at fixed potentials, of the cross term or of the self term of x."""
    name = "table" if key == "classes" else key

    def dual(value: Tensor) -> Tensor:
        here = replace(point, **{name: value})
        return reference.dual_value(
            here.cost(term), here.a, here.b if term == "xy" else here.a, f, g, EPSILON
        )

    gradient = reference.finite_differences(dual, getattr(point, name))
    if key == "classes":
        span = point.problem().classes
        return gradient[span[term[0]], span[term[1]]]
    return gradient


def test_cross_gradients_hold_at_any_potentials(point: Point) -> None:
    f, g = rough_potentials(point)
    plan = reference.plan(point.cost("xy"), point.a, point.b, f, g, EPSILON)
    assert abs(float(plan.sum()) - 1) > 0.05
    problem = point.problem()
    found = cross_gradient(problem.operator("xy"), term_at(f, g), problem.inputs("xy"), ALL)
    assert found.keys() == ALL
    for key in ALL:
        assert_same(key, found[key], differences(point, key, f, g, "xy"))


def test_self_gradients_hold_at_any_potential(point: Point) -> None:
    cost = point.cost("xx")
    _, f, _ = reference.entropic_transport(cost, point.a, point.a, EPSILON)
    f = off_centre(f, 3)
    best = reference.softmin_rows(cost, point.a, torch.where(point.a > 0, f, 0), EPSILON)
    f = torch.where(point.a > 0, f, best)
    problem = point.problem()
    found = self_gradient(problem.operator("xx"), term_at(f, f), problem.inputs("xx"), SELF_INPUTS)
    assert found.keys() == SELF_INPUTS
    for key in SELF_INPUTS:
        assert_same(key, found[key], differences(point, key, f, f, "xx"))


@pytest.mark.parametrize(
    ("needs", "passes"),
    [
        (frozenset(), {"xy": 0, "xx": 0, "yy": 0}),
        (frozenset({"x"}), {"xy": 1, "xx": 1, "yy": 0}),
        (frozenset({"y"}), {"xy": 1, "xx": 0, "yy": 1}),
        (frozenset({"a"}), {"xy": 1, "xx": 1, "yy": 0}),
        (frozenset({"b"}), {"xy": 1, "xx": 0, "yy": 1}),
        (frozenset({"lambda_y"}), {"xy": 1, "xx": 1, "yy": 1}),
        (frozenset({"x", "classes", "lambda_x", "lambda_y"}), {"xy": 1, "xx": 1, "yy": 1}),
        (ALL, {"xy": 4, "xx": 2, "yy": 2}),
    ],
)
def test_only_what_is_needed_is_computed(needs: Needs, passes: dict[str, int]) -> None:
    problem = POINTS["odd sizes"].problem()
    found, everything = DivergenceGradient(problem, needs), DivergenceGradient(problem, ALL)
    made = {}

    def count(name: str, operator: Operator, term: TransportTerm) -> None:
        counting = CountingOperator(operator)
        found(name, counting, term)
        made[name] = counting.passes
        everything(name, operator, term)

    problem.solve(EXACT, solved=count)
    assert made == passes
    assert found.total.keys() == needs
    for key in needs:
        torch.testing.assert_close(found.total[key], everything.total[key], rtol=0, atol=1e-12)


class CountingOperator:
    """Counts the passes of the operator that it stands for."""

    def __init__(self, operator: object) -> None:
        self.inner, self.passes = operator, 0

    def __getattr__(self, name: str) -> object:
        if name.startswith(("softmin", "apply")):
            self.passes += 1
        return getattr(self.inner, name)


def test_the_plan_is_that_of_the_refined_cost() -> None:
    """Potentials of a rounded cost end on the original one, and so do their gradients."""
    point = POINTS["odd sizes"]
    f, g = rough_potentials(point)
    problem = point.problem()
    operator = problem.operator("xy")
    rounded = MatrixOperator(point.cost("xy") + 1, point.a, point.b)
    rough = Refinable(rounded, operator)
    found, expected = (
        cross_gradient(one, term_at(f, g), problem.inputs("xy"), ALL) for one in (rough, operator)
    )
    for key in ALL:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)


class Refinable:
    """An operator and what it is refined to."""

    def __init__(self, operator: Operator, refined: Operator) -> None:
        self.inner, self.exact = operator, refined

    @property
    def execution(self) -> Execution:
        return self.inner.execution._replace(refined=lambda: self.exact)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", [name for name in POINTS if name != "zero weights"])
def test_divergence_gradients_are_those_of_the_unrolled_iterations(name: str) -> None:
    point = POINTS[name]
    leaves = {
        key: getattr(point, key).clone().requires_grad_()
        for key in ("x", "y", "a", "b", "table", "lambda_x", "lambda_y")
    }
    here = replace(point, **leaves)
    value = sum(
        factor * reference.unrolled_transport(here.cost(term), masses, others, EPSILON)
        for factor, term, masses, others in (
            (1, "xy", here.a, here.b),
            (-0.5, "xx", here.a, here.a),
            (-0.5, "yy", here.b, here.b),
        )
    )
    value.backward()
    found = gradient_of(point.problem())
    for key in ALL:
        leaf = leaves["table" if key == "classes" else key]
        assert_same(key, found[key], leaf.grad, 1e-7)
