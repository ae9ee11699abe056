"""Moves of many segments against their formula in float64, segment by segment."""

from __future__ import annotations

import pytest
import torch
from segmented_cases import CASES, DEVICE, LARGE, MEMORY, Case

from otdd_flash.engine.segments import Move

NAMES = ("candidate", "kept", "residual", "level", "remembered")


def random_move(count):
    draw = torch.Generator().manual_seed(count)

    def numbers(*size):
        return torch.randn(count, *size, generator=draw, dtype=torch.float64).to(DEVICE)

    index = torch.arange(count, device=DEVICE)
    ends = index % 2 == 0
    return Move(
        *(index % 4 < 2, index % 3 > 0, index % MEMORY),
        *(numbers(), numbers(), numbers(), numbers()),
        *(ends, torch.where(ends, numbers().abs(), 0), numbers(2 * MEMORY)),
    )


def moved(case, move, segment):
    """Candidate, kept, residual, level and remembered after a move."""
    g, fresh, kept, residual, level, remembered = (
        case.columns(name)[segment].clone()
        for name in ("candidate", "fresh", "kept", "residual", "level", "remembered")
    )
    slot, support = int(move.slot[segment]), case.masses(segment, 1) > 0
    if move.learnt[segment]:
        step = g - kept - move.mean_step[segment]
        change = residual - fresh - move.mean_difference[segment]
        remembered[slot] = torch.where(support, step, 0)
        remembered[slot + MEMORY] = torch.where(support, change, 0)
    if move.kept[segment]:
        kept, residual = g, fresh
    g = kept + move.scale[segment] * residual + move.shift[segment]
    g = torch.where(support, g + move.weights[segment] @ remembered, kept + residual)
    ahead = g + move.extrapolation[segment] * (g - level)
    return ahead, kept, residual, g if move.ends[segment] else level, remembered


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [*CASES, *LARGE[:2]])
def test_a_move_is_its_formula(sizes, dim, pairs, zeros):
    case = Case(sizes, dim, pairs, zeros=zeros)
    case.fill_vectors()
    move = random_move(len(pairs))
    active = torch.arange(len(pairs), device=DEVICE) != 1
    expected = [moved(case, move, segment) for segment in range(len(pairs))]
    before = [case.columns(name) for name in NAMES]
    case.segments.move_by(move.numbers, active)
    for place, name in enumerate(NAMES):
        for segment, vector in enumerate(case.columns(name)):
            if active[segment]:
                torch.testing.assert_close(vector, expected[segment][place], rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(vector, before[place][segment])


def test_segments_do_not_see_each_other():
    """To the last bit: alone, and among others."""
    sizes, pairs = [33, 300, 5, 70], [(1, 0), (0, 1), (3, 0), (1, 3)]
    together = Case(sizes, 3, pairs)
    together.fill_vectors()
    move, active = random_move(4), torch.ones(4, dtype=torch.bool, device=DEVICE)
    alone = [Case(sizes, 3, [pair]) for pair in pairs]
    for segment, case in enumerate(alone):
        case.copy_vectors(together, segment)
        case.segments.move_by(move.numbers[segment : segment + 1].contiguous(), active[:1])
    together.segments.move_by(move.numbers, active)
    for name in NAMES:
        for vector, case in zip(together.columns(name), alone, strict=True):
            assert torch.equal(vector, case.columns(name)[0])
