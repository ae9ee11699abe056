"""Costs in float64, tile by tile, and of points on a lattice by exact products in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from labelled_costs import dense_labelled_cost, labelled_cost
from torch import Tensor

from otdd_flash.operators import cost_tiles as tiles
from otdd_flash.operators import whole_points
from otdd_flash.operators.cost_tiles import CentredProducts, Products, cost_tiles
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.whole_points import WholeProducts, whole_products


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
@pytest.mark.parametrize(
    ("n", "m", "dim", "dtype"),
    [(1, 1, 1, torch.float64), (700, 300, 5, torch.float64), (30, 70, 3000, torch.float32)],
)
def test_tiles_cover_the_cost(n: int, m: int, dim: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(n)
    x, y = (torch.randn(count, dim, generator=draw, dtype=dtype) + 2 for count in (n, m))
    before = x.clone(), y.clone()
    cost, rows = labelled_cost(x, y), slice(n // 3, n)
    products = CentredProducts(cost)
    off = (gathered(cost, products, rows) - dense_labelled_cost(cost)[rows]).abs()
    allowed = products.errors[0][rows, None] + products.errors[1]
    # What the reference's own sums may lose.
    assert bool((off <= 2 * allowed).all())
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


@pytest.mark.parametrize("n", [5, 700])
def test_of_a_cloud_with_itself_no_tile_is_left_of_the_diagonal(n: int) -> None:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    cost = labelled_cost(x)
    found = torch.full((n, n), torch.nan, dtype=torch.float64)
    for rows, columns, negative in cost_tiles(cost, CentredProducts(cost), slice(0, n), upper=True):
        assert columns.start >= rows.start
        found[rows, columns] = -negative
    upper = torch.ones(n, n, dtype=torch.bool).triu()
    torch.testing.assert_close(
        found[upper], dense_labelled_cost(cost)[upper], rtol=1e-12, atol=1e-12
    )


@pytest.mark.slow
def test_tiles_are_small_where_vectors_are_long() -> None:
    def height(dim: int) -> int:
        cost = labelled_cost(torch.ones(300, dim), torch.ones(20, dim))
        rows, *_ = next(iter(cost_tiles(cost, CentredProducts(cost), slice(0, 300))))
        return rows.stop - rows.start

    assert (height(10), height(100_000)) == (tiles.TILE_CPU, tiles.LEAST_POINTS)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "itself"), [(1.0, False), (255.0, True)])
def test_products_on_a_lattice_are_within_their_errors(scale: float, itself: bool) -> None:
    x, y = grey(1100, 0), grey(1000, 1)
    if scale == 1.0:
        x, y = (x * 255).round(), (y * 255).round()
    cost = labelled_cost(x, None if itself else y)
    products = whole_products(cost)
    assert isinstance(products, WholeProducts)
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
    products = whole_products(cost)
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
        pytest.param(lambda x: torch.cat([x[:-1], x[-1:] + 1e-4]), False, id="the last one beside"),
        pytest.param(lambda x: x[:, :1] * 255 + 300, True, id="far from 0"),
        pytest.param(lambda x: (x[:, :1] * 255 + 400) / 255, True, id="grey values far from 0"),
        pytest.param(lambda x: (x * 255).round() * 8, False, id="too large for bfloat16"),
        pytest.param(mostly_white, False, id="too far below the mean for bfloat16"),
        pytest.param(lambda x: x.repeat(1, 60), False, id="products too large"),
        pytest.param(lambda x: x[: whole_points.LEAST_POINTS - 1], False, id="few"),
    ],
)
def test_lattices_on_which_products_are_exact(
    change: Callable[[Tensor], Tensor], found: bool
) -> None:
    cost = labelled_cost(change(grey(1100, 0)), change(grey(1100, 1)))
    assert (whole_products(cost) is not None) is found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_costs_kept_in_float64_are_not_those_of_rounded_points(dtype: torch.dtype) -> None:
    """Grey values over 255 in float32 lie beside their lattice: what float32 costs lose anyway."""
    cost = labelled_cost(grey(1100, 0, dim=4), grey(1000, 1, dim=4))
    truth = dense_labelled_cost(cost)
    stored = torch.cat(
        [block.clone() for _, block in StoredOperator.keep(cost, dtype).negative_costs()]
    )
    unit = torch.finfo(dtype).eps / 2
    assert float((stored.double() + truth).abs().max()) <= 8 * unit * float(truth.max())
