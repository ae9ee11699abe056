"""Running many problems until each is done: what is kept of them, told, and watched."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.engine.run import Told, run, run_one


class Countdown:
    """Problems that are done after so many steps each; what they prove is how many."""

    def __init__(self, steps, together=1):
        self.numbers = torch.tensor(steps, dtype=torch.float64)
        self.taken = torch.zeros_like(self.numbers)
        self.names = torch.arange(len(steps))
        self.together, self.work = together, 0

    @property
    def active(self):
        return self.taken < self.numbers

    @property
    def terms(self):
        numbers = self.taken + 100 * self.names
        return torch.stack([*[numbers] * (len(Told._fields) - 1), self.active.double()], 1)

    def step(self):
        self.work += len(self.numbers)
        self.taken = self.taken + self.active

    def repeat(self, step):
        for _ in range(self.together):
            step()

    def keep(self, order):
        """The numbers of a rule, and of its segments, which are the same here."""

    def kept(self, order):
        self.numbers, self.taken = self.numbers[order], self.taken[order]
        self.names = self.names[order]


class Rule:
    """The countdown's iterations; drops segments once, where the countdown as segments is told."""

    def __init__(self, countdown):
        self.countdown, self.step, self.keep = countdown, countdown.step, countdown.kept

    def __getattr__(self, name):
        return getattr(self.countdown, name)


STEPS = [3, 1, 8, 1, 5, 13, 2]


@pytest.mark.parametrize("together", [1, 4, 50])
def test_every_problem_has_what_it_proved_when_it_ended(together):
    told = []
    countdown = Countdown(STEPS, together)
    found = run(countdown, Rule(countdown), told.append)
    expected = torch.tensor(STEPS).double() + 100 * torch.arange(len(STEPS))
    for terms in found:
        assert torch.equal(terms, expected)
    assert sum(told) == len(STEPS)
    assert min(told) > 0


def test_a_problem_that_is_done_costs_nothing_more():
    countdown = Countdown(STEPS)
    run(countdown, Rule(countdown))
    assert countdown.work == sum(STEPS)


def test_who_watches_ends_it_and_what_was_proved_by_then_counts():
    countdown, seen = Countdown([9]), []

    def watch(*told):
        seen.append(told)
        return len(seen) == 4

    found = run_one(countdown, Rule(countdown), watch)
    assert seen == [(float(k), k) for k in (1, 2, 3, 4)]
    assert found == Told(*[4.0] * 7, 1.0)


def test_a_single_problem_ends_by_itself():
    countdown = Countdown([3])
    assert run_one(countdown, Rule(countdown), lambda *_: False) == Told(*[3.0] * 7, 0.0)
    assert countdown.work == 3
