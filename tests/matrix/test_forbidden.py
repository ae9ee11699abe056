"""Pairs of cost +inf."""

from __future__ import annotations

import math

import matrix_cases as cases
import pytest
import reference
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.operators.given_costs import matrix_facts


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float16, 0.5), (torch.float32, 0.8), (torch.float64, 0.05)]
)
def test_is_the_same_as_with_a_prohibitive_cost(dtype: torch.dtype, share: float) -> None:
    draw = cases.generator(int(100 * share))
    costs = cases.random(13, 17, draw).to(dtype)
    closed = torch.rand(13, 17, generator=draw) < share
    costs[closed] = math.inf
    a, b = cases.uniform(13), cases.uniform(17)
    found = otdd.matrix_transport(costs, epsilon=0.05)
    truth = reference.entropic_transport(costs.double().clamp_max(1e6), a, b, 0.05, 1e-9)[0]
    assert found.converged
    assert found.bounds[0] - 1e-8 <= truth <= found.bounds[1] + 1e-8
    assert found.bounds[1] - found.bounds[0] < 1e-3
    plan = found.plan()
    assert float(plan[closed].max()) == 0
    assert found.transport_cost == pytest.approx(float((plan * costs)[~closed].sum()), rel=1e-5)
    assert len(found.short_rows) == 0


def test_without_plan_the_short_rows_are_named() -> None:
    costs = cases.random(12, 15, cases.generator(2))
    costs[3:9, 4:] = math.inf
    with pytest.warns(
        otdd.NotConvergedWarning, match=r"6 rows \(3, 4, 5, 6, 7, \.\.\.\) have more"
    ):
        found = otdd.matrix_transport(costs, epsilon=0.05)
    assert (found.converged, found.stopped_by) == (False, "infeasible")
    assert found.short_rows.tolist() == [3, 4, 5, 6, 7, 8]
    assert found.bounds[1] == math.inf
    # There is no plan whose groups could be balanced, nor a warning about them.
    assert torch.equal(found.f, found.term.f)
    assert torch.equal(found.g, found.term.g)
    strict = otdd.Converged(require_convergence=True)
    with pytest.raises(otdd.ConvergenceError, match="no plan has these masses"):
        otdd.matrix_transport(costs, epsilon=0.05, options=strict)


@pytest.mark.parametrize("side", [0, 1])
def test_a_point_without_mass_and_partners_takes_no_part_in_products(side: int) -> None:
    """Its potential is inf."""
    costs, masses = cases.random(6, 6, cases.generator(5)), [cases.uniform(6), cases.uniform(6)]
    costs.movedim(side, 0)[2] = math.inf
    masses[side] = torch.tensor([0.2, 0.2, 0.0, 0.2, 0.2, 0.2], dtype=torch.float64)
    found = otdd.matrix_transport(costs, *masses, epsilon=0.2)
    assert (found.f, found.g)[side][2] == math.inf
    values = torch.arange(1.0, 7, dtype=torch.float64)
    for product, plan in (
        (found.apply(values), found.plan()),
        (found.apply_transposed(values), found.plan().T),
    ):
        torch.testing.assert_close(product, plan @ values, rtol=1e-5, atol=1e-8)


def test_rows_that_barely_fit_are_not_short() -> None:
    """Two blocks with the same masses on both sides: nothing may be left over."""
    costs = torch.full((10, 10), math.inf, dtype=torch.float64)
    costs[:4, :4] = costs[4:, 4:] = 1.0
    costs += torch.rand(10, 10, generator=cases.generator(3))
    found = otdd.matrix_transport(costs, epsilon=0.1)
    assert found.converged
    assert found.bounds[1] - found.bounds[0] < 1e-6


@pytest.mark.parametrize(
    ("closed", "b", "side"),
    [
        ((2, slice(None)), None, "row 2"),
        ((slice(None), 2), None, "column 2"),
        # A partner without mass is none.
        ((1, slice(0, 4)), torch.tensor([0.25, 0.25, 0.25, 0.25, 0]), "row 1"),
    ],
)
def test_a_point_without_partners_is_refused(closed: tuple, b: Tensor | None, side: str) -> None:
    costs = cases.random(5, 5, cases.generator(4))
    costs[closed] = math.inf
    with pytest.raises(otdd.InputError, match=f"costs forbids all pairs of {side}"):
        otdd.matrix_transport(costs, b=b, epsilon=0.1)


def test_the_range_of_costs_is_that_of_allowed_pairs_of_points_with_mass() -> None:
    costs = torch.tensor([[2.0, math.inf, 9.0], [3.0, 5.0, 9.0], [0.5, 8.0, 9.0]]).double()
    a, b = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.25, 0.75, 0.0]).double()
    facts = matrix_facts([(slice(0, 2), costs[:2]), (slice(2, 3), costs[2:])], a, b)
    assert facts.range == (2.0, 5.0)
    assert facts.extreme == 9.0
