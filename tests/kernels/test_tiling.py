"""Programs share the scores without gaps and without overlap, in the tiles of any card."""

from __future__ import annotations

import pytest
import reference
import torch
from labelled_costs import dense_labelled_cost, labelled_cost
from torch import Tensor

from otdd_flash.kernels import tiling
from otdd_flash.kernels.passes import half_step, plan_blocks, symmetric_step
from otdd_flash.kernels.tiling import Tile, column_ranges
from otdd_flash.operators import triton_operator
from otdd_flash.operators.triton_operator import KernelOperator

TILE = Tile(128, 64, 4, 3, descriptors=False)
EPSILON = 0.3


@pytest.fixture
def running(request, monkeypatch):
    """A device that runs so many programs at once."""
    monkeypatch.setattr(tiling, "_programs_at_once", lambda tile, device: request.param)
    column_ranges.cache_clear()
    yield request.param
    column_ranges.cache_clear()


@pytest.mark.parametrize("running", [1, 3, 132, 264], indirect=True)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 6), (157, 79), (470, 235)])
def test_every_column_block_of_every_row_block_is_taken_once(running, rows, columns):
    ranges = column_ranges(rows, columns, TILE, torch.device("cpu"))
    taken = torch.zeros(rows, columns, dtype=torch.int64)
    slots = [set() for _ in range(rows)]
    for block, first, count, slot in ranges.programs.tolist():
        assert count > 0
        taken[block, first : first + count] += 1
        assert slot not in slots[block]
        slots[block].add(slot)
    assert bool((taken == 1).all())
    assert [sorted(seen) for seen in slots] == [list(range(k)) for k in ranges.slots.tolist()]
    assert ranges.most == int(ranges.slots.max())


@pytest.mark.parametrize("running", [132], indirect=True)
@pytest.mark.parametrize(("rows", "left", "ranges"), [(157, 25, 5), (130, 130, 1), (134, 2, 64)])
def test_blocks_of_rows_that_are_left_are_cut_to_fill_the_device_once(
    running: int, rows: int, left: int, ranges: int
) -> None:
    found = column_ranges(rows, 64, TILE, torch.device("cpu"))
    assert (found.whole, found.most) == (rows - left, ranges)
    assert len(found.programs) - found.whole <= running


@pytest.mark.parametrize("running", [1], indirect=True)
@pytest.mark.parametrize("beside", [None, 0.0, -200.0, 200.0])
def test_a_row_over_several_tiles_is_summed_whatever_the_guess(
    running: int, beside: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later tiles have higher logits; sums beside a guess that is far off leave float32's range."""
    monkeypatch.setattr(triton_operator, "MANY_SCORES", 1)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=draw), torch.randn(400, 3, generator=draw)
    cost = labelled_cost(x, y, 1)
    g = torch.linspace(0, 2, 400)
    dense = dense_labelled_cost(cost)
    expected = reference.softmin_rows(dense, cost.b, g.double(), EPSILON)
    guess = None if beside is None else (expected + beside * EPSILON).float()
    found = KernelOperator(cost, "high").softmin_rows(g, EPSILON, guess)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "m", "dim", "classes"),
    [(4000, 3500, 128, 10), (2500, 2049, 300, 7), (1000, 900, 4096, 2), (700, 600, 16, 300)],
)
def test_cards_without_descriptors_compute_the_same(n, m, dim, classes, monkeypatch):
    """The tile of Ampere and Ada, on whatever card this is."""
    monkeypatch.setattr(triton_operator, "MANY_SCORES", 1)
    draw = torch.Generator().manual_seed(n + m)
    x, y = (torch.randn(k, dim, generator=draw) / dim**0.5 for k in (n, m))
    x, y = x.cuda() + 1, y.cuda()
    cross, own = (labelled_cost(x, z, classes, massless=True) for z in (y, None))
    g, still = torch.randn(m, generator=draw).cuda() * EPSILON, torch.zeros_like(x[:, 0])

    def passes() -> tuple[list[Tensor], list[Tensor]]:
        operator, symmetric = KernelOperator(cross, "high"), KernelOperator(own, "high")
        f = operator.softmin_rows(g, EPSILON)
        near = operator.softmin_rows(g, EPSILON, f)
        applied = operator.plan(f, g, EPSILON).applied(torch.eye(m, 9, device="cuda"))
        return [f, near, symmetric.softmin_self(still, EPSILON)], [*applied]

    expected = passes()
    older = Tile(128, 32, 8, 3, descriptors=False)
    for module in (half_step, plan_blocks, symmetric_step):
        for name in ("tile_for", "narrow_tile"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_: older)
    found = passes()
    # Either side computes its costs with this error, and a plan is their exponential.
    highest = KernelOperator(cross, "high").costs.highest
    error = 2 * (2.0**-24 * (6 + 3 * dim / 16) * highest + 1e-6 * (highest + EPSILON))
    for got, wanted in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=error)
    for got, wanted in zip(found[1], expected[1], strict=True):
        atol = 4e-6 * float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=error / EPSILON, atol=atol)
