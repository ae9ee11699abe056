"""The search over weights, on functions whose least value is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog, minimize

from otdd_flash.mixing.weights import Allowed, minimise, next_weights, secant, without_small


class Answer:
    def __init__(self, upper, cut, slope):
        self.upper, self.cut, self.slope = upper, cut, slope


class Function:
    """A convex function (value and gradient) as an oracle."""

    convex, scale = True, 1.0

    def __init__(self, function, hessian=None):
        self.function, self.hessian = function, hessian

    def at(self, w, width):
        found, slope = self.function(w)
        return Answer(found, found + slope - w @ slope, slope)

    def curvature(self, answer):
        return np.eye(len(answer.slope)) * 1e-3 if self.hessian is None else self.hessian


def allowed(most, penalty=0.0, towards=None):
    count = len(most)
    return Allowed(
        np.array(most, float), penalty, np.full(count, 1 / count) if towards is None else towards
    )


def feasible(limits, draw):
    """Random allowed weights."""
    w = np.zeros(len(limits.most))
    for k in draw.permutation(len(w)):
        w[k] = min(limits.most[k], 1 - w.sum()) * (draw.random() if draw.random() < 0.5 else 1)
    for k in range(len(w)):
        w[k] += min(limits.most[k] - w[k], 1 - w.sum())
    return w


def test_the_lowest_value_of_a_cut_is_a_linear_program():
    draw = np.random.default_rng(0)
    for _ in range(50):
        count = int(draw.integers(1, 8))
        most = np.minimum(1, draw.random(count) * 2 + 1 / count)
        cut = draw.normal(size=count) * 10.0 ** draw.integers(-3, 4)
        found = allowed(most).lowest(cut)
        truth = linprog(cut, A_eq=np.ones((1, count)), b_eq=[1], bounds=[(0, u) for u in most]).fun
        assert found <= truth + 1e-12 * abs(truth)
        assert found == pytest.approx(truth, rel=1e-9, abs=1e-12)


def test_with_a_penalty_the_lowest_value_is_below_all_and_is_attained():
    draw = np.random.default_rng(1)
    for _ in range(50):
        count = int(draw.integers(2, 7))
        towards = draw.random(count) + 0.01
        towards /= towards.sum()
        most = np.minimum(1, draw.random(count) * 2 + 1 / count)
        limits = allowed(most, 10.0 ** draw.integers(-2, 2), towards)
        cut = draw.normal(size=count)
        found = limits.lowest(cut)
        for _ in range(20):
            w = feasible(limits, draw)
            assert found <= cut @ w + limits.charge(w) + 1e-12
        best = limits.nearest(cut, np.inf, np.full(count, 1 / count))
        assert cut @ best + limits.charge(best) == pytest.approx(found, abs=1e-9)
        assert best.sum() == pytest.approx(1)
        assert (best <= most + 1e-12).all()


def test_weights_are_within_limits_where_others_are_far_less_likely():
    limits = allowed([0.4, 0.3, 0.3, 0.3])
    found = limits.nearest(np.array([0.0, 5.0, 5.001, 6.0]), 1e3, limits.centre)
    assert found == pytest.approx([0.4, 0.3, 0.3, 0.0])
    assert found.sum() == pytest.approx(1, abs=1e-12)


def test_the_next_weights_minimise_the_model():
    draw = np.random.default_rng(2)
    for _ in range(20):
        count, lines = int(draw.integers(2, 6)), int(draw.integers(1, 6))
        cuts, best = draw.normal(size=(lines, count)), np.full(count, 1 / count)
        root = draw.normal(size=(count, count))
        metric, limits = root @ root.T, allowed(np.minimum(1, draw.random(count) + 1 / count))

        def model(w, cuts=cuts, metric=metric, best=best):
            return float((cuts @ w).max() + (w - best) @ metric @ (w - best) / 2)

        w, shares, value = next_weights(cuts, best, metric, limits)
        assert value == pytest.approx(float((cuts @ w).max()))
        assert shares.sum() == pytest.approx(1)
        assert (shares >= 0).all()
        for _ in range(200):
            other = feasible(limits, draw)
            for t in (1.0, 0.1, 0.01):
                assert model(w) <= model((1 - t) * w + t * other) + 1e-7


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("penalty", [0.3, 0.0])
def test_smooth_and_kinked_functions_reach_their_least_value(seed, penalty):
    draw = np.random.default_rng(seed)
    count = int(draw.integers(2, 30))
    root, goal = draw.normal(size=(count, count)), draw.dirichlet(np.ones(count))
    hessian, lines = root @ root.T, draw.normal(size=(4, count))
    limits = allowed(np.minimum(1, draw.random(count) + 2 / count), penalty)

    def function(w):
        values = lines @ w
        top = int(np.argmax(values))
        return (
            float((w - goal) @ hessian @ (w - goal) / 2 + values[top]) + 3,
            hessian @ (w - goal) + lines[top],
        )

    found = minimise(Function(function), limits, limits.centre, 1e-5)
    assert found.stopped_by == "bound_width"
    assert found.lower <= found.upper <= found.lower + 1e-5
    assert found.w.sum() == pytest.approx(1)
    assert (found.w <= limits.most + 1e-12).all()
    truth = minimize(
        lambda w: function(w)[0] + limits.charge(np.maximum(w, 1e-300)),
        found.w,
        method="SLSQP",
        bounds=[(0, u) for u in limits.most],
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
    )
    assert found.lower <= truth.fun + 1e-9


def test_no_time_ends_with_bounds_that_hold():
    hessian = np.diag([1.0, 2.0, 3.0])
    function = Function(lambda w: (float(w @ hessian @ w / 2), hessian @ w))
    found = minimise(function, allowed([1, 1, 1]), np.eye(3)[0], 1e-9, lambda: 0.0)
    assert found.stopped_by == "max_seconds"
    assert found.solves == 1
    assert found.lower <= 3 / 11 <= found.upper


def test_a_secant_update_has_the_curvature_that_was_seen():
    draw = np.random.default_rng(0)
    moved, changed = draw.normal(size=4), draw.normal(size=4)
    moved -= moved.mean()
    changed -= changed.mean()
    changed *= np.sign(moved @ changed)
    found = secant(np.eye(4), moved, changed + 7)
    assert found @ moved == pytest.approx(changed)
    assert np.linalg.eigvalsh(found).min() > -1e-12


def test_small_weights_go_to_the_largest_with_room():
    w = without_small(np.array([0.5, 0.4999, 0.0001]), 1e-3, np.array([0.5, 1.0, 1.0]))
    assert w == pytest.approx([0.5, 0.5, 0.0])
    # Never to a source that has no room.
    w = without_small(np.array([0.0, 0.6, 0.3999, 9e-5]), 1e-3, np.array([0.0, 0.6, 0.39995, 1.0]))
    assert w == pytest.approx([0, 0.6, 0.39995, 5e-5])
    w = without_small(np.array([0.4, 0.0, 0.0]), 1e-3, np.array([0.4, 0.3, 0.5]))
    assert w == pytest.approx([0.4, 0.3, 0.3])


def test_the_width_is_that_of_the_value_at_the_best_weights():
    """Steps that fail, to larger values, do not widen it."""

    class Growing(Function):
        def at(self, w, width):
            found = super().at(w, width)
            self.scale = found.upper
            return found

    hessian = np.diag([1.0, 30.0, 300.0])
    oracle = Growing(lambda w: (float(w @ hessian @ w / 2), hessian @ w))
    for width in (0.5, 0.2, 0.1, 0.03):
        for k in range(3):
            start = 0.98 * np.eye(3)[k] + 0.02 / 3
            found = minimise(oracle, allowed([1, 1, 1]), start, width)
            assert found.stopped_by == "bound_width"
            assert found.upper - found.lower <= width * found.upper * (1 + 1e-12)
