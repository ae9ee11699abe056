"""Closed-form derivatives of solved terms against finite differences of dense float64 formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.operators.build import ComputeOptions, GroundCost
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.gradient import (
    DivergenceGradient,
    Gradient,
    Input,
    Needs,
    cross_gradient,
    self_gradient,
)
from otdd_flash.solver.options import SolverOptions
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.term import TransportTerm

ALL: Needs = frozenset({"x", "y", "a", "b", "classes", "lambda_x", "lambda_y"})
SELF_INPUTS: Needs = ALL - {"y", "b"}
EPSILON = 2.0
EXACT = SolverOptions(tolerance=1e-10)


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
        return Problem(*sides, EPSILON, self.table, weights, compute)


def draw(
    n: int = 13, m: int = 9, d: int = 3, *, classes: tuple[int, int] = (3, 2), seed: int = 0
) -> Point:
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def masses(count: int) -> Tensor:
        return (weights := uniform(count) + 0.2) / weights.sum()

    table = 2 * uniform(sum(classes), sum(classes))
    return Point(
        torch.randn(n, d, generator=generator, dtype=torch.float64),
        torch.randn(m, d, generator=generator, dtype=torch.float64) + 0.5,
        masses(n),
        masses(m),
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


POINTS = {
    "odd sizes": draw(),
    "one class": draw(classes=(1, 1), seed=1),
    "one point": draw(1, 7, 2, classes=(1, 2), seed=2),
    "zero weights": replace(
        draw(seed=3), a=without_mass(draw(seed=3).a, 4), b=without_mass(draw(seed=3).b, 0)
    ),
    "no class term": replace(draw(seed=4), lambda_y=torch.tensor(0.0).double()),
}


@pytest.fixture(params=list(POINTS), ids=list(POINTS))
def point(request: pytest.FixtureRequest) -> Point:
    return POINTS[request.param]


def term_at(f: Tensor, g: Tensor) -> TransportTerm:
    """A term whose potentials are given; its proof does not matter here."""
    return TransportTerm(f, g, EPSILON, 0.0, (0.0, 0.0), 1.0, 1, 1, converged=False)


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


def assert_same(key: Input, found: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    """Equal, mass gradients up to a constant."""
    if key in ("a", "b"):
        found, expected = found - found.mean(), expected - expected.mean()
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


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

    @property
    def refined(self) -> CountingOperator:
        return self

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
    rounded = StoredOperator.from_cost(point.cost("xy") + 1, point.a, point.b)
    rough = Refinable(rounded, operator)
    found, expected = (
        cross_gradient(one, term_at(f, g), problem.inputs("xy"), ALL) for one in (rough, operator)
    )
    for key in ALL:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)


class Refinable:
    """An operator and what it is refined to."""

    def __init__(self, operator: Operator, refined: Operator) -> None:
        self.inner, self.refined = operator, refined

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def gradient_of(problem: Problem, options: SolverOptions = EXACT, needs: Needs = ALL) -> Gradient:
    gradient = DivergenceGradient(problem, needs)
    assert problem.solve(options, solved=gradient).converged
    return gradient.total


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


@pytest.mark.parametrize("debias", [True, False])
def test_mass_gradients_tell_what_arriving_mass_would_change(debias: bool) -> None:
    """The derivative of the converged value along e_i - a, for a point i that has no mass."""
    point, step = POINTS["zero weights"], 1e-5
    costs = point.cost("xy"), point.cost("xx")

    def value(a: Tensor) -> float:
        cross = reference.entropic_transport(costs[0], a, point.b, EPSILON)[0]
        own = reference.entropic_transport(costs[1], a, a, EPSILON)[0] if debias else 0.0
        return cross - own / 2

    problem, gradient = point.problem(), DivergenceGradient(point.problem(), frozenset({"a"}))
    problem.solve(EXACT, debias=debias, solved=gradient)
    direction = -point.a
    direction[4] += 1
    expected = (
        -3 * value(point.a)
        + 4 * value(point.a + step * direction)
        - value(point.a + 2 * step * direction)
    ) / (2 * step)
    assert float(gradient.total["a"] @ direction) == pytest.approx(expected, abs=1e-5)


def test_a_far_point_without_mass_has_its_softmin_as_gradient() -> None:
    """Its potential in the self term is still far from settled when the solve stops."""
    x = POINTS["zero weights"].x.clone()
    x[4] = 300.0
    point = replace(POINTS["zero weights"], x=x)
    found = gradient_of(point.problem(), SolverOptions(1e-6))
    xy, xx = (
        reference.entropic_transport(point.cost(term), point.a, masses, EPSILON)[1]
        for term, masses in (("xy", point.b), ("xx", point.a))
    )
    difference = float((found["a"] - found["a"][0])[4])
    assert difference == pytest.approx(float((xy - xx - (xy - xx)[0])[4]), rel=1e-6)
    assert not found["x"][4].any()


def test_class_gradients_are_couplings_in_the_blocks_that_are_read() -> None:
    """Gradients through W were once twice too large: the cross block holds lambda_y K, not 2 K."""
    point = POINTS["odd sizes"]
    table, half = gradient_of(point.problem())["classes"], float(point.lambda_y) / 2
    assert table.shape == (5, 5)
    assert float(table[:3, 3:].sum()) == pytest.approx(2 * half, abs=1e-9)
    assert float(table[:3, :3].sum()) == pytest.approx(-half, abs=1e-9)
    assert float(table[3:, 3:].sum()) == pytest.approx(-half, abs=1e-9)
    assert not table[3:, :3].any()
    mass = torch.zeros(3).double().index_add_(0, point.labels_x, point.a)
    torch.testing.assert_close(table[:3, 3:].sum(1), 2 * half * mass, rtol=0, atol=1e-9)
    torch.testing.assert_close(table[:3, :3].sum(1), -half * mass, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shuffled", [True, False])
def test_the_gradient_vanishes_at_a_copy(shuffled: bool) -> None:
    point = POINTS["odd sizes"]
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    order = order if shuffled else torch.arange(13)
    w = point.table[:3, :3].clone().fill_diagonal_(0)
    copy = replace(
        point,
        y=point.x[order],
        b=point.a[order],
        labels_y=point.labels_x[order],
        table=torch.cat((torch.cat((w, w)), torch.cat((w, w))), 1),
    )
    problem = copy.problem()
    assert problem.identical is not shuffled
    found = gradient_of(problem)
    for key in ALL - {"classes"}:
        assert_same(key, found[key], torch.zeros_like(found[key]))
    blocks = found["classes"]
    torch.testing.assert_close(blocks[:3, :3], -blocks[:3, 3:] / 2, rtol=0, atol=1e-9)


def test_translation_and_order_of_the_points_do_not_matter() -> None:
    point, order = POINTS["odd sizes"], torch.arange(12, -1, -1)
    shift = torch.tensor([3.0, -40.0, 5.0]).double()
    moved = replace(
        point,
        x=point.x[order] + shift,
        y=point.y + shift,
        a=point.a[order],
        labels_x=point.labels_x[order],
    )
    expected, found = gradient_of(point.problem()), gradient_of(moved.problem())
    for key in ALL:
        before = expected[key][order] if key in ("x", "a") else expected[key]
        assert_same(key, found[key], before)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_float32_stays_accurate_far_from_the_origin(offset: float) -> None:
    """Without a common centre, r x - P y cancels: errors of 1e-4 at an offset of 1e3."""
    drawn = draw(60, 50, seed=5)
    # The same rounded points on both sides of the comparison.
    x, y = ((points + offset).float() for points in (drawn.x, drawn.y))
    point = replace(drawn, x=x.double(), y=y.double())
    problem, rounding = point.problem(), point.problem("high", torch.float32)
    exact, rounded = DivergenceGradient(problem, ALL), DivergenceGradient(rounding, ALL)

    def at_the_same_potentials(name: str, operator: Operator, term: TransportTerm) -> None:
        exact(name, operator, term)
        rounded(name, rounding.operator(name), term)

    problem.solve(EXACT, solved=at_the_same_potentials)
    for key in ALL:
        expected, found = exact.total[key], rounded.total[key]
        size = float((expected - expected.mean()).abs().max()) if expected.ndim else 1.0
        assert found.dtype == (torch.float32 if key in ("x", "y") else torch.float64)
        assert_same(key, found, expected, 1e-5 * size)
