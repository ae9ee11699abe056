"""What two passes may hide, from adversarial errors of points that are all the same.

Duplicated points have the same costs and so the same errors: nothing averages out.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attained import assert_nearly_attained
from torch import Tensor

from otdd_flash.engine.evidence.two_passes import TRIFLE, Rounding, rounding_of
from otdd_flash.engine.segments import PassErrors

EPSILON, COST = 0.5, 3.0


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rounding(errors: dict[str, float], stored: float = 0.0, off: float = 0.0) -> Rounding:
    """What is said of one problem whose costs have these errors, 0 where nothing is said."""
    named = {name: real(errors.get(name, 0.0)) for name in PassErrors._fields}
    named["exponents"] += TRIFLE
    segments = SimpleNamespace(
        errors=PassErrors(**named), cost_spread=real(0.0), offset=real(0.0), mean_cost=real(COST)
    )
    return rounding_of(segments, real(stored), real(stored), real(off), EPSILON)


CASES = [
    {"mean": 1e-3, "largest": 1e-3},
    # A mean that grows with what is off is never more than the largest.
    {"mean": 1e-3, "largest": 1e-3, "peak": 1e6},
    {"sums": 1e-3},
    {"stored": 1e-3},
    {"mean": 1e-3, "largest": 1e-3, "sums": 1e-3, "stored": 1e-3},
]


@pytest.mark.parametrize("errors", CASES, ids=lambda errors: "-".join(errors))
def test_the_floor(errors: dict[str, float]) -> None:
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


def test_the_floor_of_a_self_term() -> None:
    """One pass over two points far apart, then divided by its mass: a small one is badly known."""
    a, error = real(0.01, 0.99), 1e-3
    plan = a * (real(error, 0) / EPSILON).exp()
    found = rounding({"mean": 0.01 * error, "largest": error})
    assert_nearly_attained((plan / plan.sum() - a).abs().sum(), found.floor)


@pytest.mark.parametrize(
    "errors",
    [
        {"mean": 1e-3, "largest": 1e-3},
        {"sums": 1e-3},
        {"offset": 1e-3},
        {"mean": 1e-3, "largest": 1e-3, "sums": 2e-3, "offset": 1e-3},
    ],
    ids=lambda errors: "-".join(errors),
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_value(errors: dict[str, float], sign: int) -> None:
    """Both passes have the same errors, so that the plan looks as if it had mass 1."""
    cost, sums = (sign * errors.get(name, 0.0) for name in ("mean", "sums"))
    f = COST + cost - EPSILON * real(1 - sums).log()
    mass = ((f - COST - cost) / EPSILON).exp() * (1 - sums)
    dual = f + EPSILON * (1 - mass) + sign * errors.get("offset", 0.0)
    assert_nearly_attained(sign * (dual - COST), rounding(errors, stored=COST).value, 0.99)


def test_potentials_as_stored_count_in_the_value_and_sums_with_what_is_off() -> None:
    assert float(rounding({"stored": 1e-3}, stored=COST).value) == pytest.approx(3e-3)
    assert float(rounding({"sums": 1e-6}, off=1.0).value) == pytest.approx(2e-6 * EPSILON, rel=1e-4)


def test_float64_itself_hides_little_but_not_nothing() -> None:
    none = rounding({}, stored=COST)
    assert_nearly_attained(2.0**-48 * COST / EPSILON, none.floor, 1 - 1e-9)
    assert_nearly_attained(2.0**-38 * (COST + EPSILON), none.value, 1 - 1e-9)
