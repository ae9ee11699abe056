"""What rounding hides: bounds from float64 passes over original points, and how solves end."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from labelled_costs import cost_between

from otdd_flash.cost.points import LabelledCost
from otdd_flash.cost.rounding import float16_rounding
from otdd_flash.formulas.decision import CROSS, SELF, Form
from otdd_flash.operators.base import CostFacts
from otdd_flash.operators.given_costs import matrix_operator
from otdd_flash.operators.point_scores import stored_operator, streamed_operator
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver import solve
from otdd_flash.solver.certificate import Certificate
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_term


def with_a_far_point(seed: int, far: float, mass: float) -> LabelledCost:
    """Between two clouds of a unit's width, one of which has a point far away, of little mass."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(90, 3, generator=draw), torch.randn(50, 3, generator=draw)
    y[0] = far
    a, b = torch.ones(90, dtype=torch.float64), torch.ones(50, dtype=torch.float64)
    b[0] = mass
    return cost_between(x, y, a / a.sum(), b / b.sum())


@pytest.mark.slow
@pytest.mark.parametrize("relative_epsilon", [1e-2, 1e-5])
def test_a_far_point_of_little_mass(relative_epsilon: float) -> None:
    """Its costs, rounded, are off by more than those of all others."""
    cases = [(1e3, 1.0), (1e5, 1e-2), (1e5, 1e-4), (1e6, 1e-4), (1e4, 1e-5)]
    for seed, (far, mass) in enumerate(cases):
        cost = with_a_far_point(seed, far, mass)
        epsilon = relative_epsilon * cost.mean_cost
        # In float64, one that no rounding spoils.
        truth = solve_term(streamed_operator(cost, torch.float64), epsilon, Converged(1e-6, 500))
        for most in (20, 300):
            options = Converged(max_iterations=most)
            term = solve_term(streamed_operator(cost, torch.float32), epsilon, options)
            assert term.bounds[0] <= truth.bounds[1]
            assert truth.bounds[0] <= term.bounds[1]
            assert term.bounds[1] - truth.bounds[1] <= 0.1 * cost.mean_cost


def test_a_point_whose_mass_rounding_hides_spoils_no_other() -> None:
    """Costs stored in float32 are off by more than epsilon there; all else is solved."""
    cost = with_a_far_point(0, far=1e5, mass=1e-4)
    epsilon = 1e-3 * cost.mean_cost
    assert epsilon < 2.0**-24 * 1e10 / 2
    truth = solve_term(streamed_operator(cost, torch.float64), epsilon, Converged(1e-6, 500))
    stored = stored_operator(cost, torch.float32)
    term = solve_term(stored, epsilon, Converged(max_iterations=300))
    assert term.marginal_error <= 1e-3
    assert term.bounds[0] <= truth.bounds[1]
    assert truth.bounds[0] <= term.bounds[1]
    assert term.bounds[1] - term.bounds[0] <= 1e-4 * cost.mean_cost


# Iterations on rounded points never end a solve whose original points miss the tolerance.


class Rounded:
    """An operator that is refined to another, and says how far it is from that."""

    def __init__(self, inner: TorchOperator[Any], exact: TorchOperator[Any], off: float) -> None:
        self.inner, self.exact, self.off = inner, exact, off

    @property
    def refined(self) -> TorchOperator[Any]:
        return self.exact

    @property
    def costs(self) -> CostFacts:
        return self.inner.costs._replace(rounding=self.off)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("digits", "said", "relative", "little"),
    [(13, 1.0, 0.1, True), (5, 0.0, 0.01, False), (13, 1e6, 10.0, False)],
)
def test_the_original_points_go_on_where_rounding_is_not_little(
    digits: int, said: float, relative: float, little: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the estimate is wrong, either way; else they certify alone."""
    draw, unit = torch.Generator().manual_seed(0), 2.0**-digits
    x, y = torch.randn(100, 24, generator=draw), torch.randn(80, 24, generator=draw) + 0.7
    a, b = (torch.full((size,), 1 / size, dtype=torch.float64) for size in (100, 80))
    exact = reference.dense_cost(x, y)
    rounded = reference.dense_cost(*((side / unit).round() * unit for side in (x, y)))
    error = float((exact - rounded).square().mean().sqrt())
    original = matrix_operator(exact, a, b)
    passes: list[str] = []
    for name in ("softmin_rows", "softmin_columns"):
        run = getattr(original, name)
        monkeypatch.setattr(
            original, name, lambda *given, run=run, **more: passes.append("") or run(*given, **more)
        )
    operator = Rounded(matrix_operator(rounded, a, b), original, said * error)
    epsilon = relative * original.costs.mean
    term = solve_term(operator, epsilon, Converged())
    truth, *_ = reference.entropic_transport(exact, a, b, epsilon)
    assert term.converged
    assert term.bounds[0] <= truth <= term.bounds[1]
    plan = reference.plan(exact, a, b, term.f, term.g, epsilon)
    errors = (plan.sum(0) - b).abs().sum(), (plan.sum(1) - a).abs().sum()
    assert float(max(errors)) <= term.marginal_error * (1 + 1e-6) <= 1e-3
    assert (not passes) == little


@pytest.mark.parametrize(
    ("form", "hidden", "stalled", "certificates"),
    [
        # After more iterations, which leave room for what rounding hides; if it misses again then
        # at the same potentials, more accurately.
        (CROSS, 0.05, False, ["first", "later"]),
        (SELF, 0.3, False, ["first", "later"]),
        (CROSS, 0.05, False, ["first", "later", "polished", "polished later"]),
        (SELF, 0.3, False, ["first", "later", "polished"]),
        # Where much is hidden, a cross term's updates come first; a self term has none to repeat.
        (CROSS, 0.3, False, ["first", "polished"]),
        (CROSS, 0.3, False, ["first", "polished", "polished later", "polished later"]),
        (SELF, 0.6, False, ["first", "polished later"]),
        # Iterations that have nothing left to do leave no other way.
        (CROSS, 0.05, True, ["first", "polished"]),
        (SELF, 0.3, True, ["first", "polished"]),
    ],
)
def test_after_a_certificate_that_misses(
    form: Form,
    hidden: float,
    stalled: bool,
    certificates: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, tolerance = torch.Generator().manual_seed(0), 1e-3
    x, y = torch.randn(60, 4, generator=draw), torch.randn(50, 4, generator=draw) + 0.5
    sides = (x, x) if form.symmetric else (x, y)
    a, b = (torch.full((len(side),), 1 / len(side), dtype=torch.float64) for side in sides)
    operator = matrix_operator(reference.dense_cost(*sides), a, b)
    made: list[str] = []
    potentials: list[torch.Tensor] = []
    certify = solve.certify_last

    def misses(budget: Any, problem: Any, last: Any, **settings: Any) -> Certificate:
        """As if rounding hid so much, except from the last one that is expected."""
        found = certify(budget, problem, last, **settings)
        later = bool(potentials) and not torch.equal(potentials[-1], last.g)
        potentials.append(last.g.clone())
        words = ["polished"] * settings["polished"] + ["later"] * later
        made.append(" ".join(words) or "first")
        if stalled:
            budget.converged, budget.stopped_by = False, "rounding"
        if len(made) == len(certificates):
            return found
        return found._replace(marginal_error=1.05 * tolerance, undetectable=hidden * tolerance)

    aims: list[float] = []
    go_on = solve.continue_from

    def recorded(*given: Any) -> None:
        aims.append(given[-1])
        go_on(*given)

    monkeypatch.setattr(solve, "certify_last", misses)
    monkeypatch.setattr(solve, "continue_from", recorded)
    term = solve_term(operator, 0.05 * operator.costs.mean, Converged(tolerance), form)
    assert made == certificates
    # Room is left for what the next certificate will not resolve either.
    expected = 2.0 if form.symmetric else 1.0
    for word, aim in zip([word for word in made if "later" in word], aims, strict=True):
        room = 0.0 if "polished" in word else hidden
        expected *= (0.9 - room) / (1.05 - room)
        assert aim == pytest.approx(expected)
    assert term.marginal_error <= tolerance


@pytest.mark.parametrize("spread", [0.1, 10.0])
def test_the_change_of_costs_by_rounding_points_to_float16(spread: float) -> None:
    """Root mean square of all pairs, of points rounded where kernels do, about the centre."""
    draw = torch.Generator().manual_seed(int(spread))
    x, y = torch.randn(200, 5, generator=draw), spread * torch.randn(120, 5, generator=draw) + 1
    cost = cost_between(x, y)
    # A power of two of which numbers near the largest keep the precision of float16 whole.
    sides = [(side - cost.centre).double() * 256 for side in (x, y)]
    exact, rounded = (
        torch.cdist(*points).square() / 2 / 256**2
        for points in (sides, [side.half().double() for side in sides])
    )
    expected = float((rounded - exact).square().mean().sqrt())
    assert float16_rounding(cost) == pytest.approx(expected, rel=0.1)
