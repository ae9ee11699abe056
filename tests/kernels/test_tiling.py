"""Programs share the scores without gaps and without overlap."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from kernel_cases import DEVICE, EPSILON, LARGE, cost_of, largest_error, potentials, self_cost_of

from otdd_flash.kernels import tiling
from otdd_flash.kernels.passes import half_step, plan_blocks, symmetric_step
from otdd_flash.kernels.tiling import Tile, column_ranges, tile_for
from otdd_flash.operators import kernel as kernel_operator
from otdd_flash.operators.kernel import KernelOperator

TILE = Tile(128, 64, 4, 3, descriptors=False)


class Passes(NamedTuple):
    rows: torch.Tensor
    rows_near_a_guess: torch.Tensor
    own: torch.Tensor
    values: torch.Tensor
    masses: torch.Tensor


@pytest.fixture
def running(request, monkeypatch):
    """A device that runs so many programs at once."""
    monkeypatch.setattr(tiling, "_programs_at_once", lambda tile, device: request.param)
    column_ranges.cache_clear()
    yield request.param
    column_ranges.cache_clear()


@pytest.mark.parametrize("running", [1, 3, 132, 264], indirect=True)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 6), (5, 7), (157, 79), (470, 235)])
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


@pytest.mark.parametrize("running", [132, 264], indirect=True)
def test_the_last_wave_of_a_large_problem_is_nearly_full(running):
    ranges = column_ranges(470, 235, TILE, torch.device("cpu"))
    # Programs start in order, each where one has ended.
    ends = [0.0] * running
    for _, _, count, _ in ranges.programs.tolist():
        first = min(range(running), key=ends.__getitem__)
        ends[first] += count
    assert max(ends) <= 1.02 * 470 * 235 / running


def test_the_interpreter_takes_tiles_without_descriptors():
    assert not tile_for(512, torch.device("cpu")).descriptors


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_cards_without_descriptors_compute_the_same(case, monkeypatch):
    """The tile of Ampere and Ada, on whatever card this is."""
    older = Tile(128, 32, 8, 3, descriptors=False)

    def passes():
        operator = KernelOperator(cost_of(case), "high")
        f, g = potentials(operator, EPSILON)
        f = operator.softmin_rows(g, EPSILON)
        near = operator.softmin_rows(g, EPSILON, f)
        applied = operator.apply_plan(f, g, EPSILON, torch.eye(case[1], 9, device=DEVICE))
        own = KernelOperator(self_cost_of(case), "high")
        h = torch.zeros(case[0], device=DEVICE)
        return Passes(f, near, own.softmin_rows(h, EPSILON, h), *applied)

    monkeypatch.setattr(kernel_operator, "MANY_SCORES", 1)
    expected = passes()
    for module in (half_step, plan_blocks, symmetric_step):
        for name in ("tile_for", "narrow_tile"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_: older)
    operator = KernelOperator(cost_of(case), "high")
    # Either side computes its costs with this error, and a plan is their exponential.
    error = 2 * (largest_error(operator) + 1e-6 * (operator.costs.highest + EPSILON))
    for name, got, wanted in zip(expected._fields, passes(), expected, strict=True):
        if name in ("values", "masses"):
            atol = 4e-6 * float(wanted.abs().max())
            torch.testing.assert_close(got, wanted, rtol=error / EPSILON, atol=atol)
        else:
            torch.testing.assert_close(got, wanted, rtol=0, atol=error)
