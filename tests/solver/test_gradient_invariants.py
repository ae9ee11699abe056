"""What gradients of the divergence must obey: masses, classes, symmetries, rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference
import torch
from gradient_cases import ALL, EPSILON, EXACT, POINTS, assert_same, draw, gradient_of
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.solver.gradient import DivergenceGradient
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.result import TransportTerm


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
    found = gradient_of(point.problem(), Converged(1e-6))
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
