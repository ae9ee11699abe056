"""Errors of the sums of a plan in fixed point are those that are derived."""

from __future__ import annotations

import pytest
import torch
from labelled_costs import labelled_cost
from operation_counts import OperationCounts

from otdd_flash.kernels.points.digit_losses import digit_losses
from otdd_flash.kernels.points.digits import carry_error
from otdd_flash.operators import fixed_point
from otdd_flash.operators.base import CostRange
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.product_errors import magnitudes_about, product_errors
from otdd_flash.operators.stored import StoredOperator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cost_of(kind: str, *, own: bool, classes: int = 1) -> LabelledCost:
    """Between random points, or grey values."""
    draw = torch.Generator().manual_seed(0)
    x, y = (
        torch.randint(0, 256, (n, 20), generator=draw) / 255
        if kind == "grey"
        else torch.randn(n, 20, generator=draw)
        for n in (70, 33)
    )
    return labelled_cost(x.to(DEVICE), None if own else y.to(DEVICE), classes)


def test_a_small_epsilon_takes_more_digits_and_grey_values_take_one() -> None:
    random = KernelOperator(cost_of("random", own=False), "fast")._fixed_point
    assert (random._digits(100.0, False), random._digits(1e-3, False)) == (3, 4)
    assert random._digits(100.0, True) == 4
    grey = KernelOperator(cost_of("grey", own=False), "fast")._fixed_point
    assert grey._digits(1e-3, False) == 1
    assert grey.cost_error < 1e-6 * grey.cost.mean_cost


def test_one_point_far_away_spoils_the_costs_of_others_little() -> None:
    """64 deviations away, as a cell may be: with levels rounded the error is a hundred times it."""
    x, y = torch.randn(2, 200, 5, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 64
    cost = labelled_cost(x.to(DEVICE), y.to(DEVICE), 1, 1.0)
    assert KernelOperator(cost, "high").costs.error <= 3e-6 * cost.mean_cost


def test_digits_are_as_few_as_epsilon_allows() -> None:
    """Three where their mean error is below a share of epsilon, and just not beyond."""
    fixed = KernelOperator(cost_of("random", own=False), "fast")._fixed_point
    of_rows, of_columns = fixed._costs_errors(3)
    least = float(fixed.cost.a @ of_rows + fixed.cost.b @ of_columns) / fixed_point.SMALL
    assert (fixed._digits(1.001 * least, False), fixed._digits(0.999 * least, False)) == (3, 4)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("kind", ["random", "grey"])
@pytest.mark.parametrize("own", [False, True])
def test_errors_of_costs_are_what_digits_lack(
    kind: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of points as `product_errors` has it, of products left out, of carries, and in float64."""
    cost = cost_of(kind, own=own, classes=3)
    fixed = KernelOperator(cost, "fast")._fixed_point
    dim, scale = cost.points[0].shape[1], fixed._scale
    monkeypatch.setattr(fixed, "_kinds", (1, 3, 4))
    for digits in fixed._kinds:
        losses = [
            digit_losses(points, fixed._centre, scale, digits) / scale**2 for points in cost.points
        ]
        carries = carry_error(digits, dim)
        lost, left_out = zip(*losses, strict=True)
        of_points = product_errors(cost, fixed.squares, (lost[0], lost[1]))
        sizes = magnitudes_about(cost, fixed.squares)
        if own:
            # Rows are columns, and have the larger of both.
            sizes = torch.maximum(*sizes), torch.maximum(*sizes)
        for side, found in enumerate(fixed._costs_errors(digits)):
            products = cost.lambda_x * (2 * left_out[side] + carries / scale**2)
            expected = of_points[side] + products + cost.cost_error_share * sizes[side]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_errors_of_rows_and_of_columns_count_alike() -> None:
    """The mean error of costs is that of the transposed ones."""
    masses = torch.tensor([0.25, 0.75]).double(), torch.tensor([0.5, 0.3, 0.2]).double()
    errors = torch.tensor([1e-3, 2e-3]).double(), torch.tensor([4e-3, 1e-3, 5e-3]).double()
    costs = torch.ones(2, 3).double()
    found = [
        StoredOperator(
            -matrix,
            a,
            b,
            cost_range=CostRange(1.0, 1.0),
            mean_cost=1.0,
            magnitudes=(torch.zeros_like(a), torch.zeros_like(b)),
            cost_errors=(of_rows, of_columns),
            cost_rounding=0.125,
        ).costs.error
        for matrix, (a, b), (of_rows, of_columns) in (
            (costs, masses, errors),
            (costs.T, masses[::-1], errors[::-1]),
        )
    ]
    assert found == pytest.approx([0.125 + 1.75e-3 + 3.3e-3] * 2)


@pytest.mark.parametrize("own", [False, True])
def test_what_all_digits_lose_is_read_once(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = KernelOperator(cost_of("random", own=own), "fast")._fixed_point
    with OperationCounts(monkeypatch) as counts:
        means = fixed.cost_error, fixed._mean(3)
    assert counts.reads == 1
    # Both sides of a cloud with itself are one, and its points are read once.
    assert counts.launches["digit_losses_kernel"] == (2 if own else 4)
    for digits, mean in zip((4, 3), means, strict=True):
        x, y = fixed._costs_errors(digits)
        assert mean == pytest.approx(float(fixed.cost.a @ x + fixed.cost.b @ y), rel=1e-12)
    assert means[0] < means[1]
