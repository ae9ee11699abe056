"""What an evaluation of many segments tells against dense float64, segment by segment."""

from __future__ import annotations

import pytest
import torch
from segmented_cases import CASES, DEVICE, EPSILON, LARGE, Case

from otdd_flash.engine.segments import Evaluation
from otdd_flash.kernels.segments.evaluation import segmented_evaluation
from otdd_flash.kernels.segments.totals import segmented_totals
from otdd_flash.operators.kernel_vectors import whole_layout


def seen(case, segment):
    """From the vectors as they are, in the order of `Evaluation` without rows."""
    g, fresh, kept, residual, remembered = (
        case.columns(name)[segment]
        for name in ("candidate", "fresh", "kept", "residual", "remembered")
    )
    b, step, difference = case.masses(segment, 1), g - kept, residual - fresh
    change, support = (-fresh / EPSILON).exp(), b > 0
    return (
        b @ g,
        b @ g.abs(),
        g[support].min(),
        g[support].max(),
        b @ (change - 1).abs(),
        b @ change,
        b @ step,
        b @ difference,
        b @ fresh,
        b @ (step * step),
        b @ (step * difference),
        b @ (difference * difference),
        b @ (step * fresh),
        b @ (difference * fresh),
        remembered @ (b * difference),
        remembered @ (b * fresh),
    )


def case_near_a_solution(*what, **how):
    case = Case(*what, **how)
    # Near the marginals, where exponentials do not drown each other.
    case.evaluate()
    case.vectors.columns.candidate.add_(case.vectors.columns.fresh)
    case.fill_vectors()
    return case


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [*CASES, *LARGE[:2]])
def test_numbers_of_an_evaluation(sizes, dim, pairs):
    # A class of one point keeps its mass.
    case = case_near_a_solution(sizes, dim, pairs, zeros=1 not in sizes)
    evaluation = case.evaluate()
    for segment in range(len(pairs)):
        for found, expected in zip(evaluation[2:], seen(case, segment), strict=True):
            torch.testing.assert_close(found[segment], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_softmin_that_is_there_is_seen_as_well():
    sizes, dim, pairs = CASES[3].values
    case = case_near_a_solution(sizes, dim, pairs, zeros=True)
    expected, vectors = case.evaluate(), case.vectors.columns
    softmin, own = vectors.candidate + vectors.fresh, whole_layout(sizes[pairs[0][1]], 1, DEVICE)
    active = torch.ones(1, dtype=torch.bool, device=DEVICE)
    epsilon = torch.full((1,), EPSILON, dtype=torch.float64, device=DEVICE)
    masses = case.masses(0, 1)
    partial = segmented_evaluation(softmin, masses, own.blocks, own.table, active, epsilon, vectors)
    numbers = segmented_totals(None, partial, own.first_blocks, own.first_blocks, active)
    for found, number in zip(Evaluation.of(*numbers)[2:], expected[2:], strict=True):
        torch.testing.assert_close(found, number, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_segments_do_not_see_each_other():
    """To the last bit: alone, and among others that come and go."""
    sizes, pairs = [33, 300, 5, 70], [(1, 0), (0, 1), (3, 0), (1, 3)]
    together = Case(sizes, 3, pairs)
    together.fill_vectors()
    order, expected = [3, 1], []
    for segment in order:
        alone = Case(sizes, 3, [pairs[segment]])
        alone.copy_vectors(together, segment)
        expected.append([number[0] for number in alone.evaluate()])
    together.segments.keep(torch.tensor(order, device=DEVICE))
    together.pairs = [pairs[segment] for segment in order]
    whole = together.evaluate()
    for place, numbers in enumerate(expected):
        for found, alone in zip(whole, numbers, strict=True):
            assert torch.equal(found[place], alone)
