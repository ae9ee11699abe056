"""Costs in float64, tile by tile, and of points on a lattice by exact products in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from labelled_costs import dense_labelled_cost, labelled_cost
from torch import Tensor

from otdd_flash.cost.points import LabelledCost
from otdd_flash.operators.point_scores import (
    LEAST_ON_LATTICE,
    CentredProducts,
    IntegerProducts,
    Products,
    cost_tiles,
    integer_products,
)


def gathered(cost: LabelledCost, products: Products, rows: slice) -> Tensor:
    """C of some rows; NaN where no tile was."""
    found = torch.full(cost.shape, torch.nan, dtype=torch.float64)
    for part, columns, negative in cost_tiles(cost, products, rows):
        found[part, columns] = -negative
    return found[rows]


def grey(count: int, seed: int, dim: int = 60) -> Tensor:
    """Grey values in [0, 1], three in five of them black."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (count, dim), generator=draw)
    return (values * (torch.rand(count, dim, generator=draw) < 0.4)).float() / 255


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "itself"), [(1.0, False), (255.0, True)])
def test_products_on_a_lattice_are_within_their_errors(scale: float, itself: bool) -> None:
    x, y = grey(1100, 0), grey(1000, 1)
    if scale == 1.0:
        x, y = (x * 255).round(), (y * 255).round()
    cost = labelled_cost(x, None if itself else y)
    products = integer_products(cost)
    assert isinstance(products, IntegerProducts)
    truth = dense_labelled_cost(cost)
    off = (gathered(cost, products, slice(0, 1100)) - truth).abs()
    allowed = products.errors[0][:, None] + products.errors[1]
    assert bool((off <= allowed + 1e-14 * truth).all())
    # Division by 255 is rounded to float32, which no product of integers knows.
    unit = torch.finfo(torch.float32).eps / 2
    assert float(allowed.mean()) <= (1e-12 if scale == 1.0 else 2 * unit) * float(truth.mean())


@pytest.mark.slow
def test_lattice_points_lose_what_their_distance_costs() -> None:
    """Without the part for distances from the lattice the errors would be too small."""
    cost = labelled_cost(grey(1100, 0), grey(1000, 1))
    products = integer_products(cost)
    assert products is not None
    off = (gathered(cost, products, slice(0, 1100)) - dense_labelled_cost(cost)).abs()
    rounding = CentredProducts(cost).errors
    assert float((off - rounding[0][:, None] - rounding[1]).max()) > 0


def mostly_white(x: Tensor) -> Tensor:
    """Whole numbers from 320 below their mean to 10 above."""
    white = torch.full((len(x), 1), 330.0)
    white[0] = 0.0
    return white


@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param(lambda x: x, True, id="grey values"),
        pytest.param(lambda x: x + 1e-4 * torch.rand(x.shape), False, id="beside the lattice"),
        pytest.param(lambda x: (x[:, :1] * 255 + 400) / 255, True, id="grey values far from 0"),
        pytest.param(lambda x: (x * 255).round() * 8, False, id="too large for bfloat16"),
        pytest.param(mostly_white, False, id="too far below the mean for bfloat16"),
        pytest.param(lambda x: x.repeat(1, 60), False, id="products too large"),
        pytest.param(lambda x: x[: LEAST_ON_LATTICE - 1], False, id="few"),
    ],
)
def test_lattices_on_which_products_are_exact(
    change: Callable[[Tensor], Tensor], found: bool
) -> None:
    cost = labelled_cost(change(grey(1100, 0)), change(grey(1100, 1)))
    assert (integer_products(cost) is not None) is found
