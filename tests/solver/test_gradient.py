"""What gradients of solved terms ask of operators, and what rounding leaves of them."""

from __future__ import annotations

import pytest
import reference
import torch
from derivative_cases import CLASSES, EPSILON, clouds, labelled, masses
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
from otdd_flash.solver.term_gradient import Needs, cross_gradient

ALL: Needs = frozenset({"x", "y", "a", "b", "classes", "lambda_x", "lambda_y"})
WEIGHTS = GroundCost(0.6, 0.4)


def problem(x: Tensor, y: Tensor, precision: str = "double", *, zeros: bool = False) -> Problem:
    options = labelled(len(x), len(y))
    sides = (
        LabeledSamples(
            points, options[f"labels_{side}"], tuple("abc"), masses(len(points), 0, zeros=zeros)
        )
        for side, points in (("x", x), ("y", y))
    )
    compute = ComputeOptions(device="cpu", precision=precision)
    return Problem.between(*sides, EPSILON, options["class_table"], WEIGHTS, compute)


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
    asked = problem(*clouds(13, 9))
    found = {needs: DivergenceGradient(asked, needs) for needs in NEEDS}
    made: dict[Needs, dict[str, int]] = {needs: {} for needs in NEEDS}

    def count(name: str, operator: Operator, term: TransportTerm) -> None:
        for needs, gradient in found.items():
            counting = CountingOperator(operator)
            gradient(name, counting, term)
            made[needs][name] = counting.passes

    asked.solve(Converged(1e-4), solved=count)
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


class Refinable:
    """An operator and what it is refined to."""

    def __init__(self, operator: Operator, refined: Operator) -> None:
        self.inner, self.exact = operator, refined

    @property
    def execution(self) -> Execution:
        return self.inner.execution._replace(refined=lambda: self.exact)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def test_the_plan_is_that_of_the_refined_cost() -> None:
    """Potentials of a rounded cost end on the original one, and so do their gradients."""
    asked = problem(*clouds(13, 9))
    term = asked.solve(Converged(1e-2)).xy
    operator, inputs = asked.operator("xy"), asked.inputs("xy")
    costs = torch.ones(13, 9, dtype=torch.float64)
    rough = Refinable(MatrixOperator(costs, inputs.source.masses, inputs.target.masses), operator)
    found, expected = (cross_gradient(one, term, inputs, ALL) for one in (rough, operator))
    for key in ALL:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)


def test_a_far_point_without_mass_has_its_softmin_as_gradient() -> None:
    """Its potential in the self term is still far from settled when the solve stops."""
    x, y = clouds(13, 9)
    x[6] = 300.0
    asked = problem(x, y, zeros=True)
    gradient = DivergenceGradient(asked, ALL)
    asked.solve(Converged(1e-6), solved=gradient)
    options, a, b = labelled(13, 9), masses(13, 0, zeros=True), masses(9, 0, zeros=True)
    best = []
    for points, side, weights in ((y, "y", b), (x, "x", a)):
        columns = slice(CLASSES, None) if side == "y" else slice(CLASSES)
        block = WEIGHTS.lambda_y * options["class_table"][:CLASSES, columns]
        labels = options["labels_x"], options[f"labels_{side}"]
        cost = reference.dense_cost(x, points, WEIGHTS.lambda_x, block, *labels)
        best.append(reference.entropic_transport(cost, a, weights, EPSILON)[1])
    expected, found = best[0] - best[1], gradient.total["a"]
    difference = float(found[6] - found[1])
    assert difference == pytest.approx(float(expected[6] - expected[1]), rel=1e-6)
    assert not gradient.total["x"][6].any()


def test_float32_stays_accurate_far_from_the_origin() -> None:
    """Without a common centre, r x - P y cancels: errors of 1e-4 at an offset of 1e3."""
    # The same rounded points on both sides of the comparison.
    x, y = ((points + 1e3).float() for points in clouds(60, 50))
    asked, rounding = problem(x.double(), y.double()), problem(x, y, "high")
    exact, rounded = DivergenceGradient(asked, ALL), DivergenceGradient(rounding, ALL)

    def at_the_same_potentials(name: str, operator: Operator, term: TransportTerm) -> None:
        exact(name, operator, term)
        rounded(name, rounding.operator(name), term)

    asked.solve(Converged(1e-6), solved=at_the_same_potentials)
    for key in ALL:
        expected, found = exact.total[key], rounded.total[key]
        assert found.dtype == (torch.float32 if key in ("x", "y") else torch.float64)
        off = found.double() - expected
        # By masses up to a constant.
        off = off - off.mean() if key in ("a", "b") else off
        size = float((expected - expected.mean()).abs().max()) if expected.ndim else 1.0
        assert float(off.abs().max()) <= 1e-5 * size * (1 + float(expected.abs().max())), key
