"""A copy of a cost matrix in float16."""

from __future__ import annotations

import math

import pytest
import torch

from otdd_flash.kernels.matrix.place import Place, is_aligned
from otdd_flash.kernels.matrix.rough import rough_copy, rough_unit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("largest", [1e-6, 1.0, 3e4, 1e30])
@pytest.mark.parametrize("size", [(1, 1), (33, 70), (3, 2100)])
def test_costs_are_known_to_eleven_bits(size: tuple[int, int], largest: float) -> None:
    n, m = size
    draw = torch.Generator().manual_seed(m)
    costs = (largest * (torch.rand(n, m, generator=draw) - 0.4)).to(DEVICE)
    closed = (torch.rand(n, m, generator=draw) < 0.2).to(DEVICE)
    if m > 1:
        costs[closed] = math.inf
    lowest = costs.amin(1)
    spread = float((costs - lowest[:, None])[costs < math.inf].max())
    unit = torch.tensor(rough_unit(spread or largest), device=DEVICE)
    shifts = torch.full((n + 5,), -7.0, device=DEVICE)
    copy = rough_copy(Place.of(costs), size, unit, shifts)
    assert is_aligned(copy)
    assert torch.equal(shifts, torch.cat((lowest, torch.full((5,), -7.0, device=DEVICE))))
    assert float(copy[:, m:].abs().sum()) == 0
    inner = copy[:, :m].double()
    assert torch.equal(inner == math.inf, costs == math.inf)
    above = (costs - lowest[:, None]).double()
    errors = (float(unit) * inner - above).abs()[costs < math.inf]
    there = above[costs < math.inf]
    assert bool((errors <= 2.0**-11 * 1.001 * there + 2.0**-39 * spread).all())
    if spread > 0:
        assert 2.0**14 <= float(inner[inner < math.inf].max()) <= 2.0**15


def test_what_is_no_pair_is_none() -> None:
    """Rows without one, and costs of points without mass that exceed the range."""
    costs = torch.tensor([[math.inf, math.inf], [0.0, 1e6]], device=DEVICE)
    shifts = torch.empty(2, device=DEVICE)
    copy = rough_copy(Place.of(costs), (2, 2), torch.tensor(1.0, device=DEVICE), shifts)
    assert copy[:, :2].tolist() == [[math.inf, math.inf], [0.0, math.inf]]
    assert shifts.tolist() == [0.0, 0.0]
