"""Gradients of solved terms: finite differences of dense float64 formulas, masses, rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.operators.base import Execution, Operator
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.matrix import MatrixOperator
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.gradient import DivergenceGradient
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.result import TransportTerm
from otdd_flash.solver.term_gradient import (
    Gradient,
    Input,
    Needs,
    cross_gradient,
    self_gradient,
)

ALL: Needs = frozenset({"x", "y", "a", "b", "classes", "lambda_x", "lambda_y"})
EPSILON = 2.0
EXACT = Converged(tolerance=1e-10)


@dataclass(frozen=True)
class Point:
    """All inputs of a divergence, float64."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    table: Tensor
    labels_x: Tensor
    labels_y: Tensor
    lambda_x: Tensor
    lambda_y: Tensor

    def cost(self, term: str) -> Tensor:
        first = int(self.labels_x.max()) + 1
        sides = {"x": (self.x, self.labels_x), "y": (self.y, self.labels_y)}
        (left, labels), (right, others) = sides[term[0]], sides[term[1]]
        spans = {"x": slice(0, first), "y": slice(first, None)}
        block = self.lambda_y * self.table[spans[term[0]], spans[term[1]]]
        squares = (left[:, None, :] - right[None, :, :]).square().sum(2)
        return self.lambda_x * squares + block[labels][:, others]

    def problem(self, precision: str = "double", points: torch.dtype = torch.float64) -> Problem:
        sides = (
            LabeledSamples(
                features.to(points), labels, tuple(map(str, range(int(labels.max()) + 1))), masses
            )
            for features, labels, masses in (
                (self.x, self.labels_x, self.a),
                (self.y, self.labels_y, self.b),
            )
        )
        weights = GroundCost(float(self.lambda_x), float(self.lambda_y))
        compute = ComputeOptions(device="cpu", precision=precision)
        return Problem.between(*sides, EPSILON, self.table, weights, compute)


def draw(
    n: int = 13, m: int = 9, d: int = 3, *, classes: tuple[int, int] = (3, 2), seed: int = 0
) -> Point:
    generator = torch.Generator().manual_seed(seed)

    def drawn(make: Callable[..., Tensor], *shape: int) -> Tensor:
        return make(*shape, generator=generator, dtype=torch.float64)

    a, b = (drawn(torch.rand, count) + 0.2 for count in (n, m))
    table = 2 * drawn(torch.rand, sum(classes), sum(classes))
    return Point(
        drawn(torch.randn, n, d),
        drawn(torch.randn, m, d) + 0.5,
        a / a.sum(),
        b / b.sum(),
        table + table.T,
        torch.arange(n) % classes[0],
        torch.arange(m) % classes[1],
        torch.tensor(0.6, dtype=torch.float64),
        torch.tensor(0.4, dtype=torch.float64),
    )


def without_mass(masses: Tensor, index: int) -> Tensor:
    masses = masses.clone()
    masses[index] = 0
    return masses / masses.sum()


ODD, OTHER = draw(), draw(seed=3)
ZERO_MASSES = replace(OTHER, a=without_mass(OTHER.a, 4), b=without_mass(OTHER.b, 0))
POINTS = {
    "odd sizes": ODD,
    "one point": draw(1, 7, 2, classes=(1, 2), seed=2),
    "zero weights": ZERO_MASSES,
    "no class term": replace(draw(seed=4), lambda_y=torch.tensor(0.0).double()),
}


def assert_same(key: Input, found: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    """Equal, mass gradients up to a constant."""
    if key in ("a", "b"):
        found, expected = found - found.mean(), expected - expected.mean()
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def gradient_of(problem: Problem, options: Converged = EXACT) -> Gradient:
    gradient = DivergenceGradient(problem, ALL)
    assert problem.solve(options, solved=gradient).converged
    return gradient.total


def term_at(f: Tensor, g: Tensor) -> TransportTerm:
    """A term whose potentials are given; its proof does not matter here."""
    proof = {"converged": False, "stopped_by": "max_iterations"}
    return TransportTerm(f, g, EPSILON, 0.0, (0.0, 0.0), 1.0, 1e-3, 1, 1, **proof)


def rough_potentials(cost: Tensor, a: Tensor, b: Tensor, *, own: bool) -> tuple[Tensor, Tensor]:
    """Of a plan that has neither the marginals nor the mass 1.

    A point without mass has its best potential, as gradients assume.
    """

    def off(potential: Tensor, seed: int) -> Tensor:
        noise = torch.randn(len(potential), generator=torch.Generator().manual_seed(seed))
        return potential + 0.2 * EPSILON * noise.double() + 0.1 * EPSILON

    _, f, g = reference.entropic_transport(cost, a, b, EPSILON)
    f = off(f, 1)
    g = f if own else off(g, 2)
    best_f = reference.softmin_rows(cost, b, torch.where(b > 0, g, 0), EPSILON)
    best_g = reference.softmin_rows(cost.T, a, torch.where(a > 0, f, 0), EPSILON)
    return torch.where(a > 0, f, best_f), torch.where(b > 0, g, best_g)


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


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize("term", ["xy", "xx"])
def test_gradients_hold_at_any_potentials(term: str, name: str) -> None:
    point, own = POINTS[name], term == "xx"
    cost, b = point.cost(term), point.a if own else point.b
    f, g = rough_potentials(cost, point.a, b, own=own)
    assert abs(float(reference.plan(cost, point.a, b, f, g, EPSILON).sum()) - 1) > 0.05
    problem, needs = point.problem(), ALL - {"y", "b"} if own else ALL
    gradient = self_gradient if own else cross_gradient
    found = gradient(problem.operator(term), term_at(f, g), problem.inputs(term), needs)
    assert found.keys() == needs
    for key in needs:
        assert_same(key, found[key], differences(point, key, f, g, term))


def test_divergence_gradients_are_those_of_the_unrolled_iterations() -> None:
    leaves = {
        key: getattr(ODD, key).clone().requires_grad_()
        for key in ("x", "y", "a", "b", "table", "lambda_x", "lambda_y")
    }
    here = replace(ODD, **leaves)
    value = torch.zeros(())
    for factor, term, masses, others in (
        (1, "xy", here.a, here.b),
        (-0.5, "xx", here.a, here.a),
        (-0.5, "yy", here.b, here.b),
    ):
        sides = here.cost(term), masses, others
        value = value + factor * reference.unrolled_transport(*sides, EPSILON, iterations=100)
    value.backward()
    found = gradient_of(ODD.problem())
    for key in ALL:
        leaf = leaves["table" if key == "classes" else key]
        assert_same(key, found[key], leaf.grad, 1e-7)


NEEDS = {
    frozenset(): {"xy": 0, "xx": 0, "yy": 0},
    frozenset({"x"}): {"xy": 1, "xx": 1, "yy": 0},
    frozenset({"y"}): {"xy": 1, "xx": 0, "yy": 1},
    frozenset({"a"}): {"xy": 1, "xx": 1, "yy": 0},
    frozenset({"b"}): {"xy": 1, "xx": 0, "yy": 1},
    frozenset({"lambda_y"}): {"xy": 1, "xx": 1, "yy": 1},
    frozenset({"x", "classes", "lambda_x", "lambda_y"}): {"xy": 1, "xx": 1, "yy": 1},
    ALL: {"xy": 4, "xx": 2, "yy": 2},
}


def test_only_what_is_needed_is_computed() -> None:
    problem = ODD.problem()
    found = {needs: DivergenceGradient(problem, needs) for needs in NEEDS}
    made: dict[Needs, dict[str, int]] = {needs: {} for needs in NEEDS}

    def count(name: str, operator: Operator, term: TransportTerm) -> None:
        for needs, gradient in found.items():
            counting = CountingOperator(operator)
            gradient(name, counting, term)
            made[needs][name] = counting.passes

    problem.solve(Converged(1e-4), solved=count)
    assert made == NEEDS
    for needs, gradient in found.items():
        assert gradient.total.keys() == needs
        for key in needs:
            expected = found[ALL].total[key]
            torch.testing.assert_close(gradient.total[key], expected, rtol=0, atol=1e-12)


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
    cost = ODD.cost("xy")
    f, g = rough_potentials(cost, ODD.a, ODD.b, own=False)
    problem = ODD.problem()
    operator = problem.operator("xy")
    rough = Refinable(MatrixOperator(cost + 1, ODD.a, ODD.b), operator)
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


def test_mass_gradients_say_what_arriving_mass_would_change() -> None:
    """The derivative of the converged value along e_i - a, for a point i that has no mass."""
    point, step = ZERO_MASSES, 1e-5
    costs = point.cost("xy"), point.cost("xx")

    def value(a: Tensor) -> float:
        cross = reference.entropic_transport(costs[0], a, point.b, EPSILON)[0]
        return cross - reference.entropic_transport(costs[1], a, a, EPSILON)[0] / 2

    direction = -point.a
    direction[4] += 1
    values = [value(point.a + k * step * direction) for k in range(3)]
    expected = (-3 * values[0] + 4 * values[1] - values[2]) / (2 * step)
    found = gradient_of(point.problem())["a"]
    assert float(found @ direction) == pytest.approx(expected, abs=1e-5)


def test_a_far_point_without_mass_has_its_softmin_as_gradient() -> None:
    """Its potential in the self term is still far from settled when the solve stops."""
    x = ZERO_MASSES.x.clone()
    x[4] = 300.0
    point = replace(ZERO_MASSES, x=x)
    found = gradient_of(point.problem(), Converged(1e-6))
    xy, xx = (
        reference.entropic_transport(point.cost(term), point.a, masses, EPSILON)[1]
        for term, masses in (("xy", point.b), ("xx", point.a))
    )
    difference = float((found["a"] - found["a"][0])[4])
    assert difference == pytest.approx(float((xy - xx - (xy - xx)[0])[4]), rel=1e-6)
    assert not found["x"][4].any()


def test_float32_stays_accurate_far_from_the_origin() -> None:
    """Without a common centre, r x - P y cancels: errors of 1e-4 at an offset of 1e3."""
    drawn = draw(60, 50, seed=5)
    # The same rounded points on both sides of the comparison.
    x, y = ((points + 1e3).float() for points in (drawn.x, drawn.y))
    point = replace(drawn, x=x.double(), y=y.double())
    problem, rounding = point.problem(), point.problem("high", torch.float32)
    exact, rounded = DivergenceGradient(problem, ALL), DivergenceGradient(rounding, ALL)

    def at_the_same_potentials(name: str, operator: Operator, term: TransportTerm) -> None:
        exact(name, operator, term)
        rounded(name, rounding.operator(name), term)

    problem.solve(Converged(1e-6), solved=at_the_same_potentials)
    for key in ALL:
        expected, found = exact.total[key], rounded.total[key]
        size = float((expected - expected.mean()).abs().max()) if expected.ndim else 1.0
        assert found.dtype == (torch.float32 if key in ("x", "y") else torch.float64)
        assert_same(key, found, expected, 1e-5 * size)
