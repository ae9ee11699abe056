"""Errors of the sums of a plan in fixed point: all parts are needed, and found at once."""

from __future__ import annotations

import pytest
import reference
import torch
from labelled_costs import dense_labelled_cost, labelled_cost
from operation_counts import OperationCounts

from otdd_flash.cost.points import LabelledCost
from otdd_flash.operators import fixed_point
from otdd_flash.operators.kernel import KernelOperator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cost_of(kind: str, *, own: bool = False) -> LabelledCost:
    """Between random points, or grey values."""
    draw = torch.Generator().manual_seed(0)
    x, y = (
        torch.randint(0, 256, (n, 20), generator=draw) / 255
        if kind == "grey"
        else torch.randn(n, 20, generator=draw)
        for n in (70, 33)
    )
    return labelled_cost(x.to(DEVICE), None if own else y.to(DEVICE), 1)


def test_a_small_epsilon_takes_more_digits_and_grey_values_take_one() -> None:
    random = KernelOperator(cost_of("random"), "fast")._fixed_point
    assert (random._digits(100.0, False), random._digits(1e-3, False)) == (3, 4)
    assert random._digits(100.0, True) == 4
    grey = KernelOperator(cost_of("grey"), "fast")._fixed_point
    assert grey._digits(1e-3, False) == 1
    assert grey.cost_error < 1e-6 * grey.cost.mean_cost


def test_one_point_far_away_spoils_the_costs_of_others_little() -> None:
    """64 deviations away, as a cell may be: with levels rounded the error is a hundred times it."""
    x, y = torch.randn(2, 200, 5, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 64
    cost = labelled_cost(x.to(DEVICE), y.to(DEVICE), 1, 1.0)
    assert KernelOperator(cost, "high").costs.error <= 3e-6 * cost.mean_cost


@pytest.mark.slow
@pytest.mark.parametrize("part", ["entries", "points", "products"])
def test_every_part_of_the_error_is_needed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are within their errors, and no longer where one part of these is left out."""
    cost = cost_of("random")
    matrix, epsilon = dense_labelled_cost(cost), {"entries": 1e3}.get(part, 0.1) * cost.mean_cost
    g = torch.zeros_like(cost.b)
    for _ in range(5):
        f = reference.softmin_rows(matrix, cost.b, g, epsilon)
        g = reference.softmin_rows(matrix.T, cost.a, f, epsilon)
    f, g = f.float(), g.float()
    plan = reference.plan(matrix, cost.a, cost.b, f, g, epsilon)
    # One digit leaves out no products, two digits fewer than the bound is for do.
    digits = 1 if part == "points" else 4
    monkeypatch.setattr(fixed_point.FixedPoint, "_digits", lambda *_: digits)
    monkeypatch.setattr(fixed_point.FixedPoint, "_kinds", (digits,))

    def within() -> bool:
        found = KernelOperator(cost_of("random"), "fast").marginals(f, g, epsilon)
        errors = found.row_errors[:, None] + found.column_errors
        allowed = plan * torch.expm1(errors / epsilon)
        off = (found.rows - plan.sum(1)).abs()
        relative = (found.relative_error + 1e-12) * (plan + allowed).sum(1)
        return bool((off <= allowed.sum(1) + relative + 1e-30).all())

    assert within()
    real = fixed_point.plan_marginals
    with monkeypatch.context() as without:
        if part == "entries":
            without.setattr(fixed_point, "ENTRY_ERROR", 0.0)
            without.setattr(fixed_point, "ADDITION_ERROR", 0.0)
        elif part == "points":
            missing = fixed_point.FixedPoint._missing
            without.setattr(
                fixed_point.FixedPoint, "_missing", lambda self, side: 0 * missing(self, side)
            )
        else:
            without.setattr(
                fixed_point, "plan_marginals", lambda *given, **of: real(*given[:4], 1, **of)
            )
        assert not within()


@pytest.mark.parametrize("own", [False, True])
def test_what_all_digits_lose_is_read_once(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = KernelOperator(cost_of("random", own=own), "fast")._fixed_point
    with OperationCounts(monkeypatch) as counts:
        means = fixed.cost_error, fixed._mean(3)
    assert counts.reads == 1
    # Both sides of a cloud with itself are one, and its points are read once.
    assert counts.launches["digit_losses_kernel"] == (2 if own else 4)
    assert means[0] < means[1]
