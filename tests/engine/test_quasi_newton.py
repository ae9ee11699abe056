"""Iterations: their levels of epsilon, what is learnt and kept, and when they end."""

from __future__ import annotations

import math

import pytest
import torch
from single_problems import problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from otdd_flash.engine.evidence.evaluated import CROSS, SELF
from otdd_flash.engine.levels import ITERATIONS_PER_LEVEL, MOST_LEVELS, TOP, Levels, first_level
from otdd_flash.engine.quasi_newton import FALLEN, STALLED, Progress
from otdd_flash.engine.rule import Goal, Start
from otdd_flash.engine.segments import Move
from otdd_flash.engine.trust import GROWTH, PATIENCE, Trust
from otdd_flash.operators.one_segment import TorchSegment

EPSILON = 0.3
GOAL = Goal(EPSILON, 1e-10, 1e-10, 1000)


def begin(segment: TorchSegment, goal: Goal = GOAL):
    level = torch.full_like(segment.mean_cost, goal.epsilon)
    form = SELF if segment.symmetric else CROSS
    return segment.iterations(goal, form, Start(Levels.descending(level), 0 * level))


class Watched(TorchSegment):
    """Notes candidates and moves; `spoil` changes what is seen of a step."""

    spoil = None

    def evaluate(self, epsilon: Tensor, active: Tensor):
        self.seen = [*getattr(self, "seen", []), self._candidate]
        found = super().evaluate(epsilon, active)
        return found if self.spoil is None else self.spoil(len(self.seen), found)

    def move(self, move: Move, active: Tensor) -> None:
        self.moves = [*getattr(self, "moves", []), move]
        super().move(move, active)


def watched(symmetric: bool = False) -> Watched:
    operator = problem(30, None if symmetric else 17, torch.float64)
    return Watched(operator, torch.zeros_like(operator.b), symmetric=symmetric)


@pytest.mark.parametrize("symmetric", [False, True])
def test_differences_lead_to_the_solution_superlinearly(symmetric: bool) -> None:
    """Where plain updates gain a fraction each time; a constant is of no account."""
    segment = watched(symmetric)
    rule = begin(segment)
    errors = []
    while bool(rule.active) and len(errors) < 60:
        rule.step()
        errors.append(float(rule.terms[0, 3]))
    assert errors[-1] <= GOAL.tolerance
    assert len(errors) < 60
    assert all(bool(move.learnt) for move in segment.moves[2:-3])


def test_a_step_that_loses_is_not_kept_and_the_plain_update_follows() -> None:
    segment, lost = watched(), []

    def spoil(step, found):
        if lost or step < 6 or not bool(segment.moves[-1].weights.any()):
            return found
        lost.append(step - 1)
        return found._replace(value=found.value - 100)

    segment.spoil = spoil
    rule = begin(segment)
    for _ in range(12):
        rule.step()
    kept = [bool(move.kept) for move in segment.moves]
    assert not kept[lost[0]]
    assert kept[lost[0] + 1]
    # From the potentials that were kept last.
    last = max(step for step in range(lost[0]) if kept[step])
    f = segment.operator.softmin_rows(segment.seen[last], EPSILON)
    plain = segment.operator.softmin_columns(f, EPSILON)
    torch.testing.assert_close(segment.seen[lost[0] + 1], plain)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_kept_and_not_remembered(bad: float) -> None:
    segment = watched()
    rule = begin(segment)
    for _ in range(4):
        rule.step()
    before = segment.kept
    spoilt = segment.seen[-1].clone()
    spoilt[7] = bad
    segment.go_on_from(spoilt)
    rule.step()
    assert not bool(segment.moves[-1].kept)
    assert not bool(segment.moves[-1].learnt)
    assert torch.equal(segment.kept, before)
    segment.spoil = None
    for _ in range(3):
        rule.step()
    assert bool(segment.seen[-1].isfinite().all())


def test_a_direction_that_is_not_finite_gives_way_to_the_plain_update() -> None:
    segment = watched()
    segment.spoil = lambda step, found: (
        found._replace(remembered_residual=found.remembered_residual * math.nan)
        if step == 6
        else found
    )
    rule = begin(segment)
    for _ in range(6):
        rule.step()
    move = segment.moves[-1]
    assert (float(move.scale), float(move.shift), bool(move.weights.any())) == (1.0, 0.0, False)


def test_a_restart_forgets_the_evaluation_but_not_the_differences() -> None:
    segment = watched()
    rule = begin(segment)
    for _ in range(5):
        rule.step()
    segment.go_on_from(segment.seen[-1] + 1)
    rule.restart(1.0)
    rule.step()
    last = segment.moves[-1]
    # The difference to what came before says nothing, but the direction is that of many.
    assert bool(last.kept)
    assert not bool(last.learnt)
    assert int((last.weights != 0).sum()) == 2 * 4


def test_curvature_counts_where_it_exceeds_rounding_times_the_step() -> None:
    """For steps of these sizes, in units of the cost: a curvature is of the size of a square."""
    cases = {
        (0.0, 0.0, 1e-4, 1e-4): True,
        (0.0, 0.0, 1e-4, 1e-20): False,
        (2.0, 1.0, 4.0 + 1e-4, 2.0 + 1e-4): True,
        (0.0, 0.0, math.inf, math.inf): False,
    }
    for numbers, sound in cases.items():
        segment = watched()

        def spoil(step, found, numbers=numbers):
            names = "mean_step", "mean_difference", "step_step", "step_difference"
            values = (torch.full_like(found.value, number) for number in numbers)
            return found if step < 4 else found._replace(**dict(zip(names, values, strict=True)))

        segment.spoil = spoil
        rule = begin(segment)
        for _ in range(4):
            rule.step()
        assert bool(segment.moves[-1].learnt) is sound, numbers


FLOOR, SLACK = 1e-4, 1e-8


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ages(gaps: list[float], duals: list[float]) -> list[float]:
    """Iterations without progress after each evaluation."""
    progress, seen = Progress.none(numbers(0)), []
    for gap, dual in zip(gaps, duals, strict=True):
        progress = progress.after(numbers(gap), numbers(dual), numbers(SLACK))
        seen.append(float(progress.age))
    return seen


def test_a_plateau_ages_and_so_does_noise_about_it() -> None:
    assert ages([2 * FLOOR] * 40, [1.0] * 40)[STALLED] == STALLED
    noisy = [FLOOR * (2 + k % 3) for k in range(40)]
    assert ages(noisy, [1.0] * 40)[STALLED] == STALLED


def test_an_error_that_falls_or_a_dual_that_rises_does_not_age() -> None:
    falling = [2 * FLOOR * (0.99 * FALLEN) ** (k / STALLED) for k in range(40)]
    assert max(ages(falling, [1.0] * 40)) < STALLED
    rising = [1.0 + 1.01 * SLACK * k / (STALLED - 1) for k in range(40)]
    assert max(ages([2 * FLOOR] * 40, rising)) < STALLED


class NoHostReads(TorchDispatchMode):
    """Refuses operators that need a value, or a size that depends on values, on the host."""

    FORBIDDEN = ("_local_scalar_dense", "item", "equal", "nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.FORBIDDEN, f"a step calls {name}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_step_reads_nothing_on_the_host(symmetric: bool, monkeypatch) -> None:
    """Between an evaluation, which takes the level as a number on a CPU, and a move."""
    segment = watched(symmetric)
    rule = begin(segment)
    rule.step()
    active = torch.ones(1, dtype=torch.bool)
    seen = segment.evaluate(torch.full_like(segment.mean_cost, EPSILON), active)
    monkeypatch.setattr(segment, "evaluate", lambda *_: seen)

    def refuse(*_args: object) -> None:
        raise AssertionError("a step reads a tensor on the host")

    with NoHostReads(), monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
            patch.setattr(Tensor, name, refuse)
        rule.step()
        rule.step()


# Levels of epsilon on the way down, and when a try at the last one is given up.


@pytest.mark.parametrize("epsilon", [1e-300, 0.3, 1e290])
def test_the_first_level_is_a_power_of_2_below_a_share_of_the_mean_cost(epsilon: float) -> None:
    costs = epsilon * numbers(0.0, 1.0, 9.0, 10.1, 25.0, 1000.0, 1e6)
    ratios = first_level(epsilon, costs) / epsilon
    assert ratios.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 64.0, 65536.0]
    assert bool((2 * ratios > TOP * costs / epsilon).all())
    # No more than a float has.
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
        # Halved as well, but one more is enough.
        ([0.003, 0.0015], False),
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
    # There is but one, and none without levels above.
    assert float(levels.allowed) == (0.0 if hopeless else 6.0)
    above = Levels.trying(0.1, numbers(0.1))._replace(error=numbers(0.1))
    assert not bool(above.hopeless(numbers(9.0), numbers(0.5), numbers(1e-3)))


# Which steps are kept, and how long plain updates follow those that are not.


def after(*seen: tuple[float, float, float]) -> Trust:
    """After evaluations of a dual, its gain and a marginal error."""
    trust = Trust.fresh(numbers(0))
    for one in seen:
        trust = trust.judge(*map(numbers, one), numbers(1e-6)).trust
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


@pytest.mark.parametrize(
    ("growth", "stale", "kept"),
    [(GROWTH - 0.1, PATIENCE - 1, True), (GROWTH - 0.1, PATIENCE, False), (GROWTH + 0.1, 0, False)],
)
def test_where_the_dual_cannot_tell_the_marginal_error_decides(growth, stale, kept) -> None:
    trust = after((1.0, 0.0, 0.1))._replace(stale=numbers(stale))
    judged = trust.judge(numbers(1.0), numbers(0.0), numbers(0.1 * growth), numbers(1e-6))
    assert bool(judged.kept) is kept
