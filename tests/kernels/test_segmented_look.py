"""What a look at many segments has seen against dense float64, segment by segment."""

from __future__ import annotations

import pytest
import torch
from segmented_cases import CASES, DEVICE, EPSILON, LARGE, Case


def seen(case, segment):
    """From the vectors as they are, in the order of `Look` without rows."""
    g, fresh, kept, residual, remembered = (
        case.columns(name)[segment]
        for name in ("candidate", "fresh", "kept", "residual", "remembered")
    )
    b, step, fall = case.masses(segment, 1), g - kept, residual - fresh
    change = (-fresh / EPSILON).exp()
    return (
        b @ g,
        b @ g.abs(),
        g.min(),
        g.max(),
        b @ (change - 1).abs(),
        b @ change,
        b @ step,
        b @ fall,
        b @ fresh,
        b @ (step * step),
        b @ (step * fall),
        b @ (fall * fall),
        b @ (step * fresh),
        b @ (fall * fresh),
        remembered @ (b * fall),
        remembered @ (b * fresh),
    )


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [*CASES, *LARGE[:2]])
def test_what_a_look_has_seen(sizes, dim, pairs):
    case = Case(sizes, dim, pairs)
    case.look()
    # Near the marginals, where exponentials do not drown each other.
    case.segments._vectors.candidate.add_(case.segments._vectors.fresh)
    case.fill_vectors()
    look = case.look()
    for segment in range(len(pairs)):
        for found, expected in zip(look[2:], seen(case, segment), strict=True):
            torch.testing.assert_close(found[segment], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_segments_do_not_see_each_other():
    """To the last bit: alone, and among others that come and go."""
    sizes, pairs = [33, 130, 5, 70], [(1, 0), (1, 2), (3, 0), (1, 3)]
    together = Case(sizes, 3, pairs)
    together.fill_vectors()
    order, expected = [3, 1], []
    for segment in order:
        alone = Case(sizes, 3, [pairs[segment]])
        for name, vector in alone.segments._vectors._asdict().items():
            vector.copy_(together.columns(name)[segment].flatten())
        expected.append([number[0] for number in alone.look()])
    together.segments.keep(torch.tensor(order, device=DEVICE))
    together.pairs = [pairs[segment] for segment in order]
    look = together.look()
    for place, numbers in enumerate(expected):
        for found, alone in zip(look, numbers, strict=True):
            assert torch.equal(found[place], alone)
