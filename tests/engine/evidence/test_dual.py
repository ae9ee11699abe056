"""Dual values are lower bounds, attained at the optimum; gains are what half an update adds."""

from __future__ import annotations

import pytest
import reference
import torch
from attained import assert_nearly_attained
from torch import Tensor

from otdd_flash.engine.evidence.dual import dual_value, gain, self_dual, self_gain, self_shift

EPSILONS = [0.05, 0.5, 5.0]


def drawn(n: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(n)
    cost = 3 * torch.rand(n, m, generator=draw).double()
    a, b = (torch.rand(size, generator=draw).double() + 0.1 for size in (n, m))
    return cost, a / a.sum(), b / b.sum()


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("off", [0.0, 1e-3, 1.0])
def test_a_dual_value_is_a_lower_bound_attained_at_the_optimum(epsilon: float, off: float) -> None:
    cost, a, b = drawn(9, 6)
    truth, f, g = reference.entropic_transport(cost, a, b, epsilon)
    f, g = f + off * torch.sin(torch.arange(9)), g + off * torch.cos(torch.arange(6))
    mass = reference.plan(cost, a, b, f, g, epsilon).sum()
    found = dual_value(a @ f + b @ g, mass, epsilon)
    torch.testing.assert_close(found, reference.dual_value(cost, a, b, f, g, epsilon))
    assert found <= truth + 1e-10
    assert off > 1e-3 or truth - found <= 2 * off * off / epsilon + 1e-9


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_a_gain_is_what_the_update_of_one_potential_adds(epsilon: float) -> None:
    """The other potential's update, which follows, adds the rest."""
    cost, a, b = drawn(7, 8)
    g = torch.sin(torch.arange(8).double())
    f = reference.softmin_rows(cost, b, g, epsilon)
    updated = reference.softmin_rows(cost.T, a, f, epsilon)
    after = reference.softmin_rows(cost, b, updated, epsilon)
    before, half, whole = (
        reference.dual_value(cost, a, b, *potentials, epsilon)
        for potentials in ((f, g), (f, updated), (after, updated))
    )
    # Not only where rows are exact: of any potentials.
    for shift in (0.0, 0.3):
        mass = reference.plan(cost, a, b, f + shift, g, epsilon).sum()
        moved = reference.dual_value(cost, a, b, f + shift, g, epsilon)
        found = gain(b @ (updated - shift - g), mass, epsilon)
        torch.testing.assert_close(found, half - moved)
    columns = reference.plan(cost, a, b, f, g, epsilon).sum(0)
    torch.testing.assert_close(half - before, epsilon * (b * (b / columns).log()).sum())
    assert whole >= half


def test_the_gain_of_a_self_term_is_attained_between_points_far_apart() -> None:
    """Their plan is diagonal, and the averaged update of a potential ends in the optimum."""
    cost = torch.full((5, 5), 100.0).double().fill_diagonal_(0.3)
    _, a, _ = drawn(5, 5)
    f, epsilon = torch.sin(torch.arange(5).double()), 0.5
    mass = reference.plan(cost, a, a, f, f, epsilon).sum()
    shift = self_shift(mass, epsilon)
    dual, softmin = self_dual(a @ f, mass, shift), reference.softmin_rows(cost, a, f, epsilon)
    lowered = f - shift / 2
    torch.testing.assert_close(dual, reference.dual_value(cost, a, a, lowered, lowered, epsilon))
    updated = (lowered + softmin + shift / 2) / 2
    added = reference.dual_value(cost, a, a, updated, updated, epsilon) - dual
    assert_nearly_attained(self_gain(a @ (softmin - f), shift), added, 1 - 1e-9)
    # It is a lower bound, so that here it is what is added that may not be less.
    torch.testing.assert_close(added, self_gain(a @ (softmin - f), shift))


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_an_averaged_update_adds_at_least_its_gain(epsilon: float) -> None:
    cost, a, _ = drawn(8, 8)
    cost = cost + cost.T
    f = torch.sin(torch.arange(8).double())
    mass = reference.plan(cost, a, a, f, f, epsilon).sum()
    shift = self_shift(mass, epsilon)
    softmin = reference.softmin_rows(cost, a, f, epsilon)
    updated = (f + softmin) / 2
    before = self_dual(a @ f, mass, shift)
    added = reference.dual_value(cost, a, a, updated, updated, epsilon) - before
    assert added >= self_gain(a @ (softmin - f), shift) > 0
