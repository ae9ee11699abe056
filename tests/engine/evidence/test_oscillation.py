"""The bound by oscillation where it is nearly attained: mass missing at the extremes."""

from __future__ import annotations

import pytest
import reference
import torch
from attained import assert_nearly_attained
from torch import Tensor

from otdd_flash.engine.evidence import oscillation
from otdd_flash.operators.base import Marginals
from otdd_flash.operators.matrix import MatrixOperator

SPREAD, EPSILON = 2.0, 1e-3
EVERY = slice(None)


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def distance(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().sum()


@pytest.mark.parametrize("swing", [0.0, 3.0])
@pytest.mark.parametrize("near", [0.2, 0.5])
def test_of_a_cross_term(swing: float, near: float) -> None:
    """One point and two: the potentials send all mass to the near one, which the masses forbid."""
    cost, a, b = real(0, SPREAD)[None], real(1), real(near, 1 - near)
    g = real(0, -swing)
    f = reference.softmin_rows(cost, b, g, EPSILON)
    columns = reference.plan(cost, a, b, f, g, EPSILON).sum(0)
    dual = reference.dual_value(cost, a, b, f, g, EPSILON)
    truth, _, _ = reference.entropic_transport(cost, a, b, EPSILON)
    (osc,) = oscillation.swings(g, b == 0, EVERY)
    none = torch.zeros_like(osc)
    found = oscillation.bound(none, distance(columns, b), osc, none + SPREAD)
    assert_nearly_attained(truth - dual, found, 0.99)
    # It is added to the dual value.
    torch.testing.assert_close(
        oscillation.bound(dual, distance(columns, b), osc, none + SPREAD), dual + found
    )


def test_of_a_self_term() -> None:
    """Two points, each nearer to the other than to itself; the larger mass has to stay in part.

    Potentials that give both points a half are anywhere between the two extremes.
    """
    cost, a = torch.diag(real(SPREAD, SPREAD)), real(0.3, 0.7)
    f = real(SPREAD / 2 - 10 * EPSILON, -SPREAD / 2 + 10 * EPSILON)
    f = f - EPSILON / 2 * reference.plan(cost, a, a, f, f, EPSILON).sum().log()
    rows = reference.plan(cost, a, a, f, f, EPSILON).sum(1)
    dual = reference.dual_value(cost, a, a, f, f, EPSILON)
    truth, _, _ = reference.entropic_transport(cost, a, a, EPSILON)
    (osc,) = oscillation.swings(f, a == 0, EVERY)
    none = torch.zeros_like(osc)
    found = oscillation.self_bound(none, distance(rows, a), osc, none + SPREAD)
    assert_nearly_attained(truth - dual, found, 0.98)


def test_of_sums_that_are_off() -> None:
    """Sums that look like the masses and are not, on both sides at once: a quarter of the slack."""
    share = 1e-2
    cost = SPREAD * (1 - torch.eye(2, dtype=torch.float64))
    true = real(0.5, 0.5)
    f = real(-SPREAD / 2 + 10 * EPSILON, SPREAD / 2 - 10 * EPSILON)
    f, g = f + EPSILON * number(2).log(), -f
    a, b = real(0.5 + share / 2, 0.5 - share / 2), real(0.5 - share / 2, 0.5 + share / 2)
    dual = a @ f + b @ g
    plan = reference.plan(cost, true, true, f, g, EPSILON)
    for sums, masses in ((plan.sum(1), a), (plan.sum(0), b)):
        assert float((masses / sums - 1).abs().max()) <= 1.001 * share
    truth, _, _ = reference.entropic_transport(cost, a, b, EPSILON)
    both, n = torch.cat((f, g)), len(f)
    absent = torch.cat((a, b)) == 0
    swings = oscillation.swings(both, absent, slice(n), slice(n, len(both)))
    found = oscillation.slack(share, swings[0] + swings[1], number(SPREAD))
    assert_nearly_attained(4 * (truth - dual), found)


def test_the_swing_is_that_of_points_with_mass() -> None:
    potential, masses = real(1, -7, 3, 100), real(0.5, 0.2, 0.3, 0)
    (swing,) = oscillation.swings(potential.float(), masses == 0, EVERY)
    assert float(swing) == 10.0


def test_the_spread_of_perturbed_costs() -> None:
    """The dearest entry becomes dearer by all that is allowed, the cheapest cheaper."""
    cost, masses = torch.tensor([[-3.0, 1.0], [0.0, 3.0]]).double(), real(0.5, 0.5)
    operator = MatrixOperator(cost, masses, masses)
    none = torch.zeros(2, dtype=torch.float64)
    sums = Marginals(none, none, none, none, 0.125, 0.0, 0.0)
    perturbed = cost + cost.sign() * (0.25 + 0.125 * cost.abs())
    found = oscillation.perturbed_spread(operator.costs, sums, number(0.25))
    assert_nearly_attained(perturbed.max() - perturbed.min(), found, 1 - 1e-6)
    assert float(found) >= operator.costs.spread + 1.2


@pytest.mark.parametrize(
    ("plan", "factors", "b", "k"),
    [
        # Each column grows with its row, away from a mass that it had too much of before.
        (torch.diag(real(0.3, 0.7)), real(1.5, 1), real(0.24, 0.76), 1.0),
        # All rows double.
        (torch.full((2, 2), 0.125).double(), real(2, 2), real(0.8, 0.2), 2.0),
    ],
    ids=["one_row", "all_rows"],
)
def test_columns_after_a_row_update(plan: Tensor, factors: Tensor, b: Tensor, k: float) -> None:
    sums, updated = torch.cat((plan.sum(1), plan.sum(0))), torch.cat((factors * plan.sum(1), b))
    found = oscillation.updated_gap(sums, updated, number(1 / k))
    gap = distance(plan.T @ factors, b)
    assert_nearly_attained(gap, found, 1 - 1e-9 if k == 2 else 0.7)
    for other in (0.5, 1.0, 1.7):
        loose = oscillation.updated_gap(sums, updated, number(other))
        assert loose >= gap - 1e-12


def test_a_plan_given_mass_one() -> None:
    """All of its mass is where there is too much already."""
    rows, a = real(0.5, 0), real(0.4, 0.6)
    found = oscillation.gap_at_mass_one(distance(rows, a), rows.sum())
    assert_nearly_attained(distance(rows / rows.sum(), a), found, 1 - 1e-9)


def test_no_error_is_more_than_that_of_masses_apart() -> None:
    gaps, floors = real(0.25, 1.75, 0.0), real(0.5, 0.5, torch.inf)
    assert oscillation.total_error(gaps, floors).tolist() == [0.75, 2.0, 2.0]
    assert float(distance(real(1, 0), real(0, 1))) == oscillation.MOST_ERROR
