"""Levels of epsilon, potentials between them, and when they are skipped."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from otdd_flash.engine.levels import SCALING, Extrapolation, Outlook, levels_above


@pytest.mark.parametrize("relative", [0.49, 0.25, 0.1, 1e-2, 3e-4])
def test_levels_are_even_and_lead_to_epsilon(relative: float) -> None:
    top = 140.0
    path = [*levels_above(relative * top, top), relative * top]
    assert path[0] == pytest.approx(top)
    ratios = [after / before for before, after in pairwise(path)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert SCALING <= ratios[0] < 1


@pytest.mark.parametrize(("epsilon", "top"), [(0.5, 1.0), (0.999, 1.0), (2.0, 1.0), (0.1, 0.0)])
def test_an_epsilon_near_the_top_needs_none(epsilon: float, top: float) -> None:
    assert levels_above(epsilon, top) == []


def test_extrapolation_is_exact_for_linear_potentials() -> None:
    slope, offset = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5])
    path = Extrapolation()
    path.add(8.0, torch.zeros(2))
    assert torch.equal(path.at(4.0), torch.zeros(2))
    for level in (4.0, 2.0):
        path.add(level, offset + level * slope)
    torch.testing.assert_close(path.at(0.5), offset + 0.5 * slope)


@pytest.mark.parametrize(
    ("errors", "poor"),
    [
        ([0.5], False),
        # A tenth each time: three more to 1e-3.
        ([1.0, 0.1], False),
        # Halved each time: eight more.
        ([0.5, 0.25], True),
        ([0.1, 0.1], True),
        ([0.1, 0.2], True),
    ],
)
def test_the_error_says_whether_to_stay(errors: list[float], poor: bool) -> None:
    outlook = Outlook(tolerance=1e-3, most=6)
    assert [outlook.poor(k + 1, error) for k, error in enumerate(errors)][-1] is poor
