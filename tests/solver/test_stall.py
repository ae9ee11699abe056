"""Iterations end where rounding has the last word, and not before."""

from __future__ import annotations

from otdd_flash.solver.stall import FALLEN, FLOORS, PATIENCE, Stall

FLOOR, UNIT = 1e-4, 1e-8


def ends(gaps: list[float], duals: list[float]) -> int | None:
    """The first evaluation at which it is over."""
    stall = Stall()
    for iteration, (gap, dual) in enumerate(zip(gaps, duals, strict=True)):
        if stall.over(iteration, gap, dual, floor=FLOOR, unit=UNIT):
            return iteration
    return None


def test_a_plateau_near_the_floor_ends_after_so_many_evaluations() -> None:
    assert ends([2 * FLOOR] * 40, [1.0] * 40) == PATIENCE


def test_a_plateau_far_above_the_floor_goes_on() -> None:
    assert ends([1.01 * FLOORS * FLOOR] * 40, [1.0] * 40) is None


def test_an_error_that_falls_or_a_dual_that_rises_goes_on() -> None:
    falling = [2 * FLOOR * (0.99 * FALLEN) ** (k / PATIENCE) for k in range(40)]
    assert ends(falling, [1.0] * 40) is None
    rising = [1.0 + 1.01 * UNIT * k / PATIENCE for k in range(40)]
    assert ends([2 * FLOOR] * 40, rising) is None


def test_noise_about_a_plateau_ends() -> None:
    noisy = [FLOOR * (2 + k % 3) for k in range(40)]
    assert ends(noisy, [1.0] * 40) == PATIENCE
