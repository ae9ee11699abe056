"""The loss of shuffled regression: its Hessian by the weights, and how descents end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.regression.descent import Descent, Rules
from experiments.regression.problem import Data, Loss, Point, start, synthetic_cells

DOUBLE = otdd.ComputeOptions(device="cpu", precision="double")


def small_loss(cells: int, tolerance: float, *, epsilon: float = 0.5) -> Loss:
    data = Data.of(synthetic_cells(cells), torch.float64)
    options = otdd.Converged(tolerance=tolerance)
    return Loss(data, epsilon, options, otdd.CGOptions(tolerance=tolerance), DOUBLE)


def test_the_hessian_is_the_difference_of_gradients() -> None:
    loss, w, step = small_loss(12, 1e-11, epsilon=4.0), start(0), 1e-4
    here = loss.at(w)
    found, _ = here.hessian()
    directions = torch.randn(1, 5, 5, dtype=w.dtype, generator=torch.Generator().manual_seed(0))

    def difference(along: Tensor) -> Tensor:
        ahead, behind = (loss.at(w + sign * along, near=here).gradient for sign in (1, -1))
        return ahead - behind

    for along in directions:
        # Of fourth order, so that neither rounding nor the step shows.
        near, far = difference(step * along), difference(2 * step * along)
        expected = ((8 * near - far) / (12 * step)).flatten()
        assert (found @ along.flatten() - expected).norm() <= 1e-7 * expected.norm()
    assert (found - found.T).norm() <= 1e-8 * found.norm()


@pytest.mark.slow
def test_a_descent_leaves_the_saddle_and_ends_as_newton_does() -> None:
    descent = Descent(small_loss(40, 1e-7, epsilon=2.0), start(0), Rules(first_step=1.0))
    descent.run()
    trace = descent.trace
    assert trace.ended_by_gradient
    assert trace.eigenvalue[0] < 0 < trace.eigenvalue[-1]
    assert len(trace.escapes) == len(trace.returns) + 1
    assert trace.modes.endswith("nnn.")
    assert trace.lengths[-3:] == [1.0, 1.0, 1.0]
    far, near, end = trace.gradient_norm[-4:-1]
    assert near < 5 * far**2
    assert end < 5 * near**2


@pytest.mark.slow
def test_a_step_whose_gain_rounding_hides_is_no_longer_than_twice_newtons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Loss, "rounding", 1.0)
    descent = Descent(small_loss(40, 1e-7, epsilon=2.0), start(0), Rules(100, first_step=10.0))
    descent.run()
    assert descent.trace.ended_by_gradient
    assert max(descent.trace.lengths) == 1.25


def test_adam_alone_measures_no_eigenvalue() -> None:
    descent = Descent(small_loss(20, 1e-4, epsilon=2.0), start(0), Rules(3, first_step=None))
    descent.run()
    assert descent.trace.modes == 3 * "a" + "."
    assert descent.trace.checks == []


def test_solves_end_early_only_where_no_eigenvalue_is_measured_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float | None] = []
    real = Loss.at

    def at(
        loss: Loss, w: Tensor, near: Point | None = None, tolerance: float | None = None
    ) -> Point:
        asked.append(tolerance)
        return real(loss, w, near, tolerance)

    monkeypatch.setattr(Loss, "at", at)
    rules = Rules(12, adam_tolerance=1e-2)
    descent = Descent(small_loss(20, 1e-4), start(0), rules)
    descent.run()
    assert descent.trace.modes == 12 * "a" + "."
    # The start, and steps 1 to 12, of which the tenth is measured.
    assert asked == [None, *9 * [1e-2], None, 1e-2, 1e-2]
    assert 1e-4 < descent.trace.marginal_error <= 1e-2


def test_a_solve_starts_from_a_potential_that_goes_on_as_it_went() -> None:
    loss, w = small_loss(20, 1e-10, epsilon=2.0), start(0)
    step = 0.001 * start(1)
    before = loss.at(w)
    here = loss.at(w + step, near=before)
    there = loss.at(w + 2 * step, near=here)

    def off(guess: Tensor) -> float:
        """How far it is from the potential, up to a constant."""
        return float((guess - there.potential).std())

    assert off(here.potential_at(there.w)) < 0.05 * off(here.potential)
    # A first solve has nothing to go on from, and a step across the last one has no part of it.
    assert torch.equal(before.potential_at(w + step), before.potential)
    across = torch.zeros_like(step)
    across[0, 0], across[0, 1] = step[0, 1], -step[0, 0]
    assert torch.allclose(here.potential_at(here.w + across), here.potential)


def test_a_point_is_there_where_its_loss_is_low_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, w = small_loss(20, 1e-6, epsilon=2.0), start(0)
    here, asked = loss.at(w), []
    real = otdd.sinkhorn_hessian

    def counted(*given: Tensor, options: otdd.Converged, **named: object) -> otdd.SinkhornHessian:
        asked.append(options.max_iterations)
        found: otdd.SinkhornHessian = real(*given, options=options, **named)
        return found

    monkeypatch.setattr(otdd, "sinkhorn_hessian", counted)
    for length in (0.01, 1.0):
        there = w + length * start(1)
        exact = loss.at(there, near=here)
        asked.clear()
        found = loss.at_most(exact.loss * (1 + 1e-4), there, near=here)
        assert found is not None
        assert found.loss == pytest.approx(exact.loss, rel=1e-6)
        assert asked[-1] == loss.options.max_iterations
        asked.clear()
        # A limit far below is refused by the first lower bound, one just below at the latest.
        assert loss.at_most(exact.loss / 2, there, near=here) is None
        assert asked == [30]
        assert loss.at_most(exact.loss * (1 - 1e-4), there, near=here) is None
