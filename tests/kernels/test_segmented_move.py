"""Moves of many segments against their formula in float64, segment by segment."""

from __future__ import annotations

import pytest
import torch
from segmented_cases import CASES, DEVICE, LARGE, Case

from otdd_flash.engine.segments import MEMORY, Move

NAMES = ("candidate", "kept", "residual", "remembered")


def random_move(count):
    draw = torch.Generator().manual_seed(count)

    def numbers(*size):
        return torch.randn(count, *size, generator=draw, dtype=torch.float64)

    index = torch.arange(count)
    return Move(
        *(values.to(DEVICE) for values in (index % 4 < 2, index % 3 > 0, index % MEMORY)),
        *(numbers(*size).to(DEVICE) for size in ((), (), (), (), (2 * MEMORY,))),
    )


def moved(case, move, segment):
    """Candidate, kept, residual and remembered after a move."""
    g, fresh, kept, residual, remembered = (
        case.columns(name)[segment].clone()
        for name in ("candidate", "fresh", "kept", "residual", "remembered")
    )
    slot = int(move.slot[segment])
    if move.learnt[segment]:
        remembered[slot] = g - kept - move.mean_step[segment]
        remembered[slot + MEMORY] = residual - fresh - move.mean_fall[segment]
    if move.kept[segment]:
        kept, residual = g, fresh
    g = kept + move.scale[segment] * residual + move.shift[segment]
    return g + move.weights[segment] @ remembered, kept, residual, remembered


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [*CASES, *LARGE[:2]])
def test_a_move_is_its_formula(sizes, dim, pairs):
    case = Case(sizes, dim, pairs)
    case.look()
    case.fill_vectors()
    move = random_move(len(pairs))
    active = torch.arange(len(pairs), device=DEVICE) != 1
    expected = [moved(case, move, segment) for segment in range(len(pairs))]
    before = [case.columns(name) for name in NAMES]
    case.segments.move(move, active)
    for place, name in enumerate(NAMES):
        for segment, vector in enumerate(case.columns(name)):
            if active[segment]:
                torch.testing.assert_close(vector, expected[segment][place], rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(vector, before[place][segment])


def test_segments_do_not_see_each_other():
    """To the last bit: alone, and among others."""
    sizes, pairs = [33, 130, 5, 70], [(1, 0), (1, 2), (3, 0), (1, 3)]
    together = Case(sizes, 3, pairs)
    together.fill_vectors()
    move, active = random_move(4), torch.ones(4, dtype=torch.bool, device=DEVICE)
    alone = [Case(sizes, 3, [pair]) for pair in pairs]
    for segment, case in enumerate(alone):
        for name, vector in case.segments._vectors._asdict().items():
            vector.copy_(together.columns(name)[segment].flatten())
        one = Move(*(values[segment : segment + 1] for values in move))
        case.segments.move(one, active[:1])
    together.segments.move(move, active)
    for name in NAMES:
        for vector, case in zip(together.columns(name), alone, strict=True):
            assert torch.equal(vector, case.columns(name)[0])
