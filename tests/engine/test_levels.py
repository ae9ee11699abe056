"""Levels of epsilon on the way down, and when a try at the last one is given up."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.engine.levels import ITERATIONS_PER_LEVEL, MOST_LEVELS, TOP, Levels, first_level


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("epsilon", [1e-300, 0.3, 7.0, 1e290])
def test_the_first_level_is_a_power_of_2_below_a_share_of_the_mean_cost(epsilon: float) -> None:
    costs = epsilon * numbers(0.0, 1.0, 9.0, 10.1, 25.0, 1000.0, 1e6)
    ratios = first_level(epsilon, costs) / epsilon
    assert ratios.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 64.0, 65536.0]
    shares = TOP * costs / epsilon
    assert bool(((ratios <= shares) | (ratios == 1)).all())
    assert bool((2 * ratios > shares).all())


def test_there_are_no_more_levels_than_a_float_has() -> None:
    assert float(first_level(1e-30, numbers(1.0))) == 1e-30 * 2.0**MOST_LEVELS


def test_levels_halve_where_they_end_and_stop_at_epsilon() -> None:
    epsilon, yes, no = 0.3, torch.tensor([True]), torch.tensor([False])
    levels, seen = Levels.descending(numbers(2.4)), []
    for ends in (yes, no, yes, yes, yes):
        seen.append((float(levels.level), float(levels.descended)))
        levels = levels.after(numbers(0.01), ends, no, epsilon)
    assert seen == [(2.4, 0.0), (1.2, 1.0), (1.2, 1.0), (0.6, 1.0), (0.3, 1.0)]
    assert float(levels.level) == epsilon


@pytest.mark.parametrize(
    ("errors", "hopeless"),
    [
        ([0.5], False),
        ([0.51], True),
        # A tenth each time: three more to 1e-3.
        ([0.5, 0.05], False),
        # Halved each time: eight more.
        ([0.5, 0.25], True),
        ([0.1, 0.1], True),
        ([0.1, 0.2], True),
    ],
)
def test_a_try_goes_on_while_the_error_promises_enough(errors: list[float], hopeless: bool) -> None:
    epsilon, no, iteration = 0.1, torch.tensor([False]), 0
    levels = Levels.trying(epsilon, numbers(0.4))
    assert float(levels.allowed) == 2 * ITERATIONS_PER_LEVEL
    levels = levels._replace(allowed=numbers(6.0))
    for iteration, error in enumerate(errors, 1):
        found = levels.hopeless(numbers(iteration), numbers(error), numbers(1e-3))
        levels = levels.after(numbers(error), no, found, epsilon)
    assert bool(found) is hopeless
    assert float(levels.level) == (0.4 if hopeless else epsilon)
    # There is but one.
    assert float(levels.allowed) == (0.0 if hopeless else 6.0)


def test_without_levels_above_there_is_no_try_to_give_up() -> None:
    levels = Levels.trying(0.1, numbers(0.1))._replace(error=numbers(0.1))
    assert not bool(levels.hopeless(numbers(9.0), numbers(0.5), numbers(1e-3)))
