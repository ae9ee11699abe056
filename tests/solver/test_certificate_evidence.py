"""Bounds of what is proved from potentials, where they hold with nothing to spare.

A tenth less of most of them would be wrong: at problems where no error cancels another.
"""

from __future__ import annotations

import math

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.formulas.evidence import (
    TRIFLE,
    CostNumbers,
    PassErrors,
    Rounding,
    dual_value,
    gap_at_mass_one,
    oscillation_bound,
    rounding_of,
    total_error,
)
from otdd_flash.operators.base import Marginals
from otdd_flash.operators.given_costs import matrix_operator
from otdd_flash.solver.evidence import (
    growth_of,
    oscillation_slack,
    oscillations,
    perturbed_spread,
    share_of_costs,
    undetectable_after_update,
    updated_gap,
    widen_bounds,
)

EPSILON = 0.5


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def drawn(n: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """A cost (n, m) without structure, and masses."""
    draw = torch.Generator().manual_seed(n)
    cost = torch.rand(n, m, generator=draw).double()
    a, b = (torch.rand(size, generator=draw).double() + 0.1 for size in (n, m))
    return cost, a / a.sum(), b / b.sum()


def assert_nearly_attained(
    true: float | Tensor, bound: float | Tensor, share: float = 0.95
) -> None:
    """Whether a bound holds, of which at least that share is needed; both are positive."""
    assert share * float(bound) < float(true) <= float(bound) * (1 + 1e-9)


# The bound by oscillation: mass missing at the extremes.

SPREAD, SMALL = 2.0, 1e-3
EVERY = slice(None)


def distance(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().sum()


@pytest.mark.parametrize(("swing", "near"), [(0.0, 0.2), (3.0, 0.5)])
def test_oscillation_bounds_a_cross_term(swing: float, near: float) -> None:
    """One point and two: the potentials send all mass to the near one, which the masses forbid."""
    cost, a, b = real(0, SPREAD)[None], real(1), real(near, 1 - near)
    g = real(0, -swing)
    f = reference.softmin_rows(cost, b, g, SMALL)
    columns = reference.plan(cost, a, b, f, g, SMALL).sum(0)
    dual = reference.dual_value(cost, a, b, f, g, SMALL)
    truth, _, _ = reference.entropic_transport(cost, a, b, SMALL)
    (osc,) = oscillations(g, b == 0, EVERY)
    found = oscillation_bound(dual, distance(columns, b), osc, number(SPREAD))
    assert_nearly_attained(truth - dual, found - dual, 0.99)


def test_oscillation_bounds_a_self_term() -> None:
    """Two points, each nearer to the other than to itself; the larger mass has to stay in part.

    Potentials that give both points a half are anywhere between the two extremes.
    """
    cost, a = torch.diag(real(SPREAD, SPREAD)), real(0.3, 0.7)
    f = real(SPREAD / 2 - 10 * SMALL, -SPREAD / 2 + 10 * SMALL)
    f = f - SMALL / 2 * reference.plan(cost, a, a, f, f, SMALL).sum().log()
    rows = reference.plan(cost, a, a, f, f, SMALL).sum(1)
    dual = reference.dual_value(cost, a, a, f, f, SMALL)
    truth, _, _ = reference.entropic_transport(cost, a, a, SMALL)
    (osc,) = oscillations(f, a == 0, EVERY)
    found = oscillation_bound(number(0), 2 * distance(rows, a), osc, number(SPREAD))
    assert_nearly_attained(truth - dual, found, 0.98)


def test_oscillation_bounds_what_sums_that_are_off_hide() -> None:
    """Sums that look like the masses and are not, on both sides at once: a quarter of the slack."""
    share = 1e-2
    cost = SPREAD * (1 - torch.eye(2, dtype=torch.float64))
    true = real(0.5, 0.5)
    f = real(-SPREAD / 2 + 10 * SMALL, SPREAD / 2 - 10 * SMALL)
    f, g = f + SMALL * number(2).log(), -f
    a, b = real(0.5 + share / 2, 0.5 - share / 2), real(0.5 - share / 2, 0.5 + share / 2)
    plan = reference.plan(cost, true, true, f, g, SMALL)
    for sums, masses in ((plan.sum(1), a), (plan.sum(0), b)):
        assert float((masses / sums - 1).abs().max()) <= 1.001 * share
    truth, _, _ = reference.entropic_transport(cost, a, b, SMALL)
    each = oscillations(torch.cat((f, g)), torch.cat((a, b)) == 0, slice(0, 2), slice(2, 4))
    found = oscillation_slack(share, each[0] + each[1], number(SPREAD))
    assert_nearly_attained(4 * (truth - (a @ f + b @ g)), found)


def test_the_spread_of_perturbed_costs() -> None:
    """The dearest entry becomes dearer by all that is allowed, the cheapest cheaper."""
    cost, masses = torch.tensor([[-3.0, 1.0], [0.0, 3.0]]).double(), real(0.5, 0.5)
    operator, none = matrix_operator(cost, masses, masses), torch.zeros(2, dtype=torch.float64)
    sums = Marginals(none, none, none, none, 0.125, 0.0, 0.0)
    perturbed = cost + cost.sign() * (0.25 + 0.125 * cost.abs())
    found = perturbed_spread(operator.costs, sums, number(0.25))
    assert_nearly_attained(perturbed.max() - perturbed.min(), found, 1 - 1e-6)


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
    found = updated_gap(sums, updated, number(1 / k))
    gap = distance(plan.T @ factors, b)
    assert_nearly_attained(gap, found, 1 - 1e-9 if k == 2 else 0.7)
    for other in (0.5, 1.7):
        assert updated_gap(sums, updated, number(other)) >= gap - 1e-12, other


def test_a_plan_given_mass_one_and_the_most_that_an_error_can_be() -> None:
    """All of its mass is where there is too much already."""
    rows, a = real(0.5, 0), real(0.4, 0.6)
    found = gap_at_mass_one(distance(rows, a), rows.sum())
    assert_nearly_attained(distance(rows / rows.sum(), a), found, 1 - 1e-9)
    gaps, floors = real(0.25, 1.75, 0.0), real(0.5, 0.5, torch.inf)
    assert total_error(gaps, floors).tolist() == [0.75, 2.0, 2.0]


# Errors of costs, where all are equal.


def sums_of(
    plan: Tensor, *, rows: float = 0.0, columns: float = 0.0, share: float = 0.0, off: float = 0.0
) -> Marginals:
    """Marginals of a plan (n, m) with errors of costs by rows and columns, of them, and of sums."""
    errors = torch.full_like(plan.sum(1), rows), torch.full_like(plan.sum(0), columns)
    return Marginals(plan.sum(1), plan.sum(0), *errors, share, off, 0.0)


def hidden_mass(sums: Tensor, errors: Tensor) -> float:
    """One side of the bound (2)."""
    return float(sums @ growth_of(sums, errors, EPSILON)) / 2


@pytest.mark.parametrize("error", [1e-6, 1.0])
def test_errors_hide_mass(error: float) -> None:
    """Every cost is too high by as much as its row and its column allow."""
    cost, a, b = drawn(7, 5)
    _, f, g = reference.entropic_transport(cost, a, b, EPSILON)
    true = reference.plan(cost, a, b, f, g, EPSILON)
    computed = reference.plan(cost + 2 * error, a, b, f, g, EPSILON)
    sides = computed.sum(1), computed.sum(0)
    found = sum(hidden_mass(sums, torch.full_like(sums, error)) for sums in sides)
    for side in (0, 1):
        gap = (true.sum(side) - computed.sum(side)).abs().sum()
        assert_nearly_attained(gap, found, 1 - 1e-9)
    # Points without mass hide none.
    assert hidden_mass(real(0, 1), real(1e9, 0)) == 0


@pytest.mark.parametrize("errors", [real(0.1, 0), real(0.1, 0.1)])
def test_errors_hide_mass_of_columns_that_grew(errors: Tensor) -> None:
    """Either the one that grew most has all errors, or what grew has the largest.

    One row grows much, and its column alone has errors.
    """
    sums, factors = sums_of(torch.diag(real(0.2, 0.8))), real(3, 1)
    true, before = hidden_mass(sums.columns * factors, errors), hidden_mass(sums.columns, errors)
    largest = float(growth_of(sums.columns, errors, EPSILON).max()) / 2
    moved = float(sums.rows @ (factors - 1).abs())
    found = undetectable_after_update(before, largest, float(factors.max()), moved)
    assert_nearly_attained(true, found, 1 - 1e-9)


def test_a_share_of_every_cost() -> None:
    """Costs whose mean is near 0: nearly all of them are just below, the dearest weigh up most."""
    far, share = 0.005, 1e-3
    b, one = real(1 - far, far), real(1)
    cost = real(-1, (1 - far) / far)[None]
    # There is one plan between one point and two.
    truth, moved = ((one @ each @ b) for each in (cost, cost - share * cost.abs()))
    found = share_of_costs(share, truth, float(cost.min()))
    assert_nearly_attained(truth - moved, found, 0.98)
    # Of costs above 0 it is one of the value.
    assert float(share_of_costs(0.25, number(3), 1.0)) == 1.5


def moved_outwards(
    sums: Marginals, ends: tuple[float, float], mean: float, size: float
) -> tuple[float, float]:
    cost, a, b = drawn(7, 5)
    one, other = map(number, ends)
    facts = matrix_operator(cost, a, b).costs
    return widen_bounds(facts, sums, (one, other), number(mean), number(size), EPSILON)


@pytest.mark.parametrize("sign", [1, -1])
def test_ends_move_by_the_errors_of_costs(sign: int) -> None:
    """Of costs that are all off by as much as their rows and columns allow, one way."""
    cost, a, b = drawn(7, 5)
    truth, f, g = reference.entropic_transport(cost, a, b, EPSILON)
    perturbed, _, _ = reference.entropic_transport(cost + sign * 3e-3, a, b, EPSILON)
    sums = sums_of(reference.plan(cost, a, b, f, g, EPSILON), rows=1e-3, columns=2e-3)
    mean, size = a @ sums.row_errors + b @ sums.column_errors, a @ f.abs() + b @ g.abs()
    low, high = moved_outwards(sums, (perturbed, perturbed), float(mean), float(size))
    moved = (perturbed - low, high - perturbed)[sign < 0]
    assert_nearly_attained(sign * (perturbed - truth), moved, 1 - 1e-6)


def test_ends_move_by_the_errors_of_sums() -> None:
    """Rows that look smaller than they are get potentials that are too high."""
    cost, a, b = drawn(7, 5)
    truth, f, g = reference.entropic_transport(cost, a, b, EPSILON)
    off = 1e-3
    sums = sums_of(reference.plan(cost, a, b, f, g, EPSILON), off=off)
    dual = float(dual_value(a @ (f + EPSILON * math.log1p(off)) + b @ g, number(1), EPSILON))
    low, _ = moved_outwards(sums, (dual, dual), 0.0, float(a @ f.abs() + b @ g.abs()))
    assert_nearly_attained(dual - truth, dual - low, 0.99)
    # By what is not a number nothing is proved.
    assert math.isnan(moved_outwards(sums, (dual, math.nan), 0.0, 1.0)[1])


# What two passes may hide, from adversarial errors of points that are all the same: duplicated
# points have the same costs and so the same errors, and nothing averages out.

COST = 3.0


def rounding(errors: dict[str, float], stored: float = 0.0, off: float = 0.0) -> Rounding:
    """What is said of one problem whose costs have these errors, 0 where nothing is said."""
    named = {name: real(errors.get(name, 0.0)) for name in PassErrors._fields}
    named["exponents"] += TRIFLE
    costs = CostNumbers(real(COST), real(0.0), real(0.0), PassErrors(**named), 0.0, 0.0)
    return rounding_of(costs, real(stored), real(stored), real(off), EPSILON)


@pytest.mark.parametrize(
    "errors",
    [
        # A mean that grows with what is off is never more than the largest.
        {"mean": 1e-3, "largest": 1e-3, "peak": 1e6},
        {"sums": 1e-3},
        {"stored": 1e-3},
        {"mean": 1e-3, "largest": 1e-3, "sums": 1e-3, "stored": 1e-3},
    ],
    ids=lambda errors: "-".join(errors),
)
def test_the_floor_of_two_passes(errors: dict[str, float]) -> None:
    """The rows' pass makes f too high in every way, the columns' pass its sums too large."""
    cost, sums = errors.get("mean", 0.0), errors.get("sums", 0.0)
    a, b = torch.full((6,), 1 / 6).double(), torch.full((4,), 1 / 4).double()
    # T(0) is the cost itself; computed, and stored.
    f = COST + cost - EPSILON * real(1 - sums).log()
    f = f * (1 + errors.get("stored", 0.0))
    plan = a[:, None] * b * ((f - (COST - cost)) / EPSILON).exp() * (1 + sums)
    found = rounding(errors, stored=COST)
    assert_nearly_attained((plan - a[:, None] * b).abs().sum(), found.floor)


def test_the_floor_where_costs_are_badly_known() -> None:
    """Errors of one column alone, which has more of the plan than of the masses."""
    mass, more, error = 0.1, 0.4, 1e-4
    b, c = real(mass, 1 - mass), real(mass + more / 2, 1 - mass - more / 2)
    costs = real(error, 0)
    # One row at cost 0, whose plan is c: its potential is raised by the mean error over that.
    raised = -EPSILON * (c * (-costs / EPSILON).exp()).sum().log()
    plan = c * ((raised + costs) / EPSILON).exp()
    errors = {"mean": mass * error, "largest": error, "peak": 1 / (2 * mass)}
    found = rounding(errors, off=float((c - b).abs().sum()))
    assert_nearly_attained((plan - c).abs().sum(), found.floor)


def test_the_floor_of_one_pass_over_a_self_term() -> None:
    """Over two points far apart, then divided by its mass: a small one is badly known."""
    a, error = real(0.01, 0.99), 1e-3
    plan = a * (real(error, 0) / EPSILON).exp()
    found = rounding({"mean": 0.01 * error, "largest": error})
    assert_nearly_attained((plan / plan.sum() - a).abs().sum(), found.floor)


@pytest.mark.parametrize(
    "errors",
    [
        {"mean": 1e-3, "largest": 1e-3},
        {"mean": 1e-3, "largest": 1e-3, "sums": 2e-3, "offset": 1e-3},
    ],
    ids=lambda errors: "-".join(errors),
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_value_of_two_passes(errors: dict[str, float], sign: int) -> None:
    """Both passes have the same errors, so that the plan looks as if it had mass 1."""
    cost, sums = (sign * errors.get(name, 0.0) for name in ("mean", "sums"))
    f = COST + cost - EPSILON * real(1 - sums).log()
    mass = ((f - COST - cost) / EPSILON).exp() * (1 - sums)
    dual = f + EPSILON * (1 - mass) + sign * errors.get("offset", 0.0)
    assert_nearly_attained(sign * (dual - COST), rounding(errors, stored=COST).value, 0.99)


def test_potentials_as_stored_count_in_the_value_and_sums_with_what_is_off() -> None:
    assert float(rounding({"stored": 1e-3}, stored=COST).value) == pytest.approx(3e-3)
    assert float(rounding({"sums": 1e-6}, off=1.0).value) == pytest.approx(2e-6 * EPSILON, rel=1e-4)
    # Float64 itself hides little, but not nothing.
    none = rounding({}, stored=COST)
    assert_nearly_attained(2.0**-48 * COST / EPSILON, none.floor, 1 - 1e-9)
    assert_nearly_attained(2.0**-38 * (COST + EPSILON), none.value, 1 - 1e-9)
