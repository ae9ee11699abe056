"""Iterations: their levels of epsilon, what is learnt and kept, and when they end."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from otdd_flash.formulas.decision import (
    FALLEN,
    GROWTH,
    ITERATIONS_PER_LEVEL,
    PATIENCE,
    STALLED,
    TOP,
    Levels,
    Trust,
    first_level,
    is_hopeless,
    judge,
    levels_after,
    progress_after,
    started,
)

EPSILON = 0.3
FLOOR, SLACK = 1e-4, 1e-8


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("gaps", "duals", "stalls"),
    [
        ([2 * FLOOR] * 40, [1.0] * 40, True),
        ([FLOOR * (2 + k % 3) for k in range(40)], [1.0] * 40, True),
        ([2 * FLOOR * (0.99 * FALLEN) ** (k / STALLED) for k in range(40)], [1.0] * 40, False),
        ([2 * FLOOR] * 40, [1.0 + 1.01 * SLACK * k / (STALLED - 1) for k in range(40)], False),
    ],
    ids=["a plateau", "noise about it", "an error that falls", "a dual that rises"],
)
def test_what_makes_no_progress_ages(gaps: list[float], duals: list[float], stalls: bool) -> None:
    progress, ages = started(numbers(0), Levels.descending(numbers(1))).progress, []
    for gap, dual in zip(gaps, duals, strict=True):
        progress = progress_after(progress, numbers(gap), numbers(dual), numbers(SLACK))
        ages.append(float(progress.age))
    assert (ages[STALLED] == STALLED) == stalls
    assert stalls or max(ages) < STALLED


# Levels of epsilon on the way down, and when a try at the last one is given up.


@pytest.mark.parametrize(
    ("errors", "hopeless"),
    [
        ([0.5], False),
        ([0.51], True),
        # A tenth each time: three more to 1e-3.
        ([0.5, 0.05], False),
        # Halved each time: eight more.
        ([0.5, 0.25], True),
        # Halved as well, but one more is enough.
        ([0.003, 0.0015], False),
        ([0.1, 0.1], True),
        ([0.1, 0.2], True),
    ],
)
def test_a_try_goes_on_while_the_error_promises_enough(errors: list[float], hopeless: bool) -> None:
    epsilon, no, iteration = 0.1, torch.tensor([False]), 0
    levels = Levels.trying(epsilon, numbers(4.8))
    assert float(levels.allowed) == 2 * ITERATIONS_PER_LEVEL
    levels = levels._replace(allowed=numbers(6.0))
    for iteration, error in enumerate(errors, 1):
        found = is_hopeless(levels, numbers(iteration), numbers(error), numbers(1e-3))
        levels = levels_after(levels, numbers(error), no, found, epsilon)
    assert bool(found) is hopeless
    assert float(levels.level) == (0.4 if hopeless else epsilon)
    # There is but one, and none without levels above.
    assert float(levels.allowed) == (0.0 if hopeless else 6.0)
    above = Levels.trying(0.1, numbers(1.2))._replace(error=numbers(0.1))
    assert not bool(is_hopeless(above, numbers(9.0), numbers(0.5), numbers(1e-3)))


# Which steps are kept, and how long plain updates follow those that are not.


def after(*seen: tuple[float, float, float]) -> Trust:
    """After evaluations of a dual, its gain and a marginal error."""
    trust = started(numbers(0), Levels.descending(numbers(1))).trust
    for one in seen:
        trust = judge(trust, *map(numbers, one), numbers(1e-6)).trust
    return trust


def test_a_step_is_kept_only_if_the_dual_gains_what_the_plain_update_would() -> None:
    first = (1.0, 0.5, 0.1)
    assert float(after(first, (1.6, 0.0, 0.1)).dual) == 1.6
    assert float(after(first, (1.4, 0.0, 0.1)).dual) == 1.0
    # The plain update that follows is kept whatever it brings.
    assert float(after(first, (1.4, 0.0, 0.1), (0.9, 0.0, 0.1)).dual) == 0.9
    assert float(after(first, (math.nan, 0.0, 0.1)).dual) == 1.0


def test_rejections_in_a_row_are_followed_by_ever_more_plain_updates() -> None:
    good, bad = (1.0, 1.0, 0.1), (-1.0, 0.0, 0.1)
    seen, waits = [good], []
    for _ in range(11):
        waits.append(float(after(*seen).plain))
        seen.append(good if waits[-1] else bad)
    assert waits == [0, 1, 0, 2, 1, 0, 4, 3, 2, 1, 0]
    # A step that gains restores trust by half.
    seen = [good, bad, good, bad, good, good]
    assert float(after(*seen).penalty) == 4
    assert float(after(*seen, (9.0, 0.0, 0.1)).penalty) == 2
    # A lower error does not, of a step that is taken back or of a plain update.
    assert float(after(*seen, (-1.0, 0.0, 0.01)).penalty) == 8
    assert float(after(good, bad, (1.0, 1.0, 0.01)).penalty) == 2


@pytest.mark.parametrize(
    ("growth", "stale", "kept"),
    [(GROWTH - 0.1, PATIENCE - 1, True), (GROWTH - 0.1, PATIENCE, False), (GROWTH + 0.1, 0, False)],
)
def test_where_the_dual_cannot_tell_the_marginal_error_decides(growth, stale, kept) -> None:
    trust = after((1.0, 0.0, 0.1))._replace(stale=numbers(stale))
    judged = judge(trust, numbers(1.0), numbers(0.0), numbers(0.1 * growth), numbers(1e-6))
    assert bool(judged.kept) is kept


def test_the_first_level_is_a_power_of_two_times_epsilon_below_a_share_of_the_mean_cost() -> None:
    mean_costs = torch.tensor([0.01, 0.09, 1.0, 37.0, 1e9], dtype=torch.float64)
    found = first_level(0.01, mean_costs)
    powers = found / 0.01
    assert torch.equal(powers, 2 ** powers.log2().round())
    assert powers[:2].tolist() == [1, 1]
    assert bool((found[2:] <= TOP * mean_costs[2:]).all())
    assert bool((found[2:] > TOP * mean_costs[2:] / 2).all())


def test_the_first_step_that_is_not_kept_is_followed_by_one_plain_update() -> None:
    trust = started(numbers(0), Levels.descending(numbers(1))).trust
    assert [float(part) for part in trust] == [-math.inf, 0, math.inf, 0, 0, 1]
