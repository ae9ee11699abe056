"""Numbers of costs and limits of memory that a solve takes on trust."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from otdd_flash.labels.classes import pool
from otdd_flash.labels.pair_chunks import MAX_PAIRS, chunk_size
from otdd_flash.operators.base import CostRange, Marginals
from otdd_flash.operators.ground import Offset
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.memory import free_memory
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import solve_divergence
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.plans import SCALABLE, Lost, Plan, row_update

UNIFORM = torch.full((4,), 0.25, dtype=torch.float64)


def stored(cost: torch.Tensor, rounding: float = 0.0) -> StoredOperator:
    """A cost (4, 4), stored with an error."""
    none = torch.zeros_like(UNIFORM)
    low, high = float(cost.min()), float(cost.max())
    return StoredOperator(
        -cost,
        UNIFORM,
        UNIFORM,
        cost_range=CostRange(low, high),
        mean_cost=float(cost.mean()),
        magnitudes=(none, none),
        cost_errors=(none, none),
        cost_rounding=rounding,
    )


def squares() -> torch.Tensor:
    points = torch.tensor([0.0, 1.0, 3.0, 4.0], dtype=torch.float64)
    return (points[:, None] - points).square()


@pytest.mark.parametrize("value", [-1.0, 1.0])
def test_stored_costs_of_any_sign_are_off_by_their_share(value: float) -> None:
    """Of a constant cost every plan pays the same, so that the bound is attained."""
    cost = torch.full((4, 4), value, dtype=torch.float64)
    assert stored(cost, rounding=0.125).costs.error == pytest.approx(0.125)


def test_products_of_d_coordinates_are_off_by_so_many_roundings() -> None:
    x, labels = torch.rand(4, 5), torch.zeros(4, dtype=torch.int64)
    none = torch.zeros((1, 1), dtype=torch.float64)
    sides = {"labels_x": labels, "labels_y": labels, "class_costs": none, "lambda_x": 1.0}
    assert LabelledCost(x, x, UNIFORM, UNIFORM, **sides).cost_error_share == 26 * 2.0**-53


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_numbers_of_a_cost_are_those_of_all_its_entries(sizes: tuple[int, int]) -> None:
    """Of one class on each side and of more; the far point without mass counts where it has to."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 3, generator=draw).double() + 5 for n in (6, 4))
    a, b = torch.tensor([0, 1, 2, 3, 1, 3]).double() / 10, UNIFORM
    x[0] -= 30
    labels_x, labels_y = (torch.arange(len(z)) % k for z, k in zip((x, y), sizes, strict=True))
    table = torch.tensor([[0.75], [0.25]]).double()[: sizes[0]]
    given = {"labels_x": labels_x, "labels_y": labels_y, "class_costs": table, "lambda_x": 0.5}
    cost, of_classes = LabelledCost(x, y, a, b, **given), table[labels_x][:, labels_y]
    entries = torch.cdist(x, y).square() / 2 + of_classes
    assert cost.mean_cost == pytest.approx(float(a @ entries @ b), rel=1e-12)
    x, y = (side - cost.centre for side in (x, y))
    # The lowest squared distance is taken as 0, the highest as that of points that are opposite.
    low, high = cost.cost_range
    assert low == float(of_classes[1:].min())
    longest = x[1:].norm(dim=1).max() + y.norm(dim=1).max()
    assert high == pytest.approx(float(longest.square() / 2 + of_classes.max()), rel=1e-12)
    assert cost.largest == pytest.approx(float(x.abs().max()), rel=1e-12)
    assert cost.farthest == pytest.approx(float(x.norm(dim=1).max().square()), rel=1e-12)


def test_what_one_side_adds_moves_both_ends_outwards() -> None:
    offset = Offset(10.0, 0.5)
    operators = {"debias": False, "offset": offset}
    divergence = solve_divergence(lambda _: stored(squares()), 2.0, Converged(), **operators)
    low, high = divergence.xy.bounds
    assert divergence.bounds == (low + 9.5, high + 10.5)


@pytest.mark.parametrize(("sums", "scaled"), [(2.0, True), (0.25, False)])
def test_sums_are_scaled_up_where_what_is_lost_of_them_is_nothing(
    sums: float, scaled: bool
) -> None:
    lost = 2.0**-100
    rows = UNIFORM * sums * 2.0**64 * lost
    none = torch.zeros_like(UNIFORM)
    marginals = Marginals(rows, rows, none, none, 0.0, 0.0, lost)
    both, errors = torch.cat((UNIFORM, UNIFORM)), torch.cat((none, none))
    plan = Plan(none, none, marginals, both, both == 0, errors, errors)
    update = row_update(stored(squares()), plan, Lost(errors > 0, none.sum()))
    expected = UNIFORM / rows if scaled else torch.ones_like(rows)
    torch.testing.assert_close(update.factors, expected)
    torch.testing.assert_close(update.rows, expected * rows)
    assert SCALABLE == 2.0**64


def test_pairs_that_fill_a_chunk_come_one_at_a_time() -> None:
    here = torch.device("cpu")
    assert chunk_size(1 << 40, here) == 1
    assert chunk_size(1, here) == MAX_PAIRS


def test_classes_of_several_datasets_begin_where_they_are_said_to() -> None:
    sides = [
        LabeledSamples(torch.rand(4, 2), torch.arange(4) % count, tuple("abc"[:count]))
        for count in (2, 3)
    ]
    clouds, offsets = pool(sides)
    assert [len(clouds), *offsets] == [5, 0, 2, 5]


def test_half_of_the_memory_is_taken_for_free_where_nobody_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: False)
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert free_memory(torch.device("cpu")) == 500 * 4096
