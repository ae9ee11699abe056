"""What one kernel decides for many problems is what the PyTorch reference decides."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_evaluations import evaluation_of
from operation_counts import Calls

from otdd_flash.engine import quasi_newton_kernels
from otdd_flash.engine.problems import Start
from otdd_flash.engine.quasi_newton import QuasiNewton
from otdd_flash.engine.quasi_newton_kernels import QuasiNewtonKernels
from otdd_flash.formulas.decision import CROSS, SELF, TOP, Goal, Levels
from otdd_flash.formulas.evidence import MOST_ERROR, PassErrors
from otdd_flash.kernels.segments import decision as decision_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS, RESTART, MEMORY = 40, 26, 4
GOAL = Goal(0.1, 1e-3, 1e-3, max_iterations=STEPS - 1)
# Its tolerance gives way to rounding, and more is asked for than that.
LOOSE = GOAL._replace(loosest=0.1, aim=0.5)
# Where the dual falls, where a level is never done, where the dual cannot tell, where rounding is
# hopeless, where nothing gets better, where there are numbers that are none, where a try is given
# up and where it is not, and where levels end at once.
WORSE, SLOW, UNDECIDED, HOPELESS, STUCK, SPOILT, NONE, TRIED, STAYED, FAST, COUNT = range(1, 12)
# Marginal errors that leave a level early, and that stay, fall and grow.
WORSE_GAPS = (0.5, 0.5, 0.5, 0.5, 0.01)
UNDECIDED_GAPS = (0.4, 0.8, 0.8, 0.8, 0.3, 3.0, 0.6)


class Drawn:
    """Problems whose evaluations are drawn at random; they write down all levels and moves."""

    dtype = sum_dtype = torch.float32
    memory, device = MEMORY, DEVICE
    softness = None

    def __init__(self, form):
        self.draw = torch.Generator().manual_seed(3)
        costs = self.random(12, COUNT).abs().to(DEVICE)
        self.mean_cost, self.cost_spread, self.offset, *errors = costs
        sizes = (1e-7, 3e-7, 1.0, 1e-6, 6e-8, 1e-7, 1e-7, 1e-7, 4e-15)
        self.errors = PassErrors(*(size * one for size, one in zip(sizes, errors, strict=True)))
        # The floor of one that stalls is between a tenth and a half of the tolerance.
        for segment, error in ((HOPELESS, 1e-3), (STUCK, 1e-5)):
            self.errors.mean[segment] = self.errors.largest[segment] = error
        self.evaluations = [self.drawn(form, step) for step in range(STEPS)]
        self.levels, self.moves = [], []

    def random(self, *size):
        return torch.randn(*size, generator=self.draw, dtype=torch.float64)

    def drawn(self, form, step):
        columns, rows = self.random(COUNT, 14 + 4 * MEMORY) / 8, self.random(COUNT, 2)
        rows[:, 1], columns[:, 1] = rows[:, 1].abs(), columns[:, 1].abs()
        columns[:, 0] += step / 8
        columns[:, 3] = columns[:, 2] + columns[:, 3].abs()
        columns[:, 4] = 10 ** (-1.5 + 8 * columns[:, 4])
        columns[:, 5] = 1 + columns[:, 5] / 100
        # Squares of vectors are those of their means and more, curvatures mostly positive.
        mean_step, mean_difference, more = columns[:, 6], columns[:, 7], columns[:, 9:12].clone()
        columns[:, 9] = mean_step.square() + more[:, 0].abs()
        columns[:, 10] = mean_step * mean_difference + more[:, 1] + 0.08
        columns[:, 11] = mean_difference.square() + more[:, 2].abs() + 0.1
        rows[UNDECIDED, 0] = columns[UNDECIDED, 0] = columns[UNDECIDED, 8] = 0
        columns[UNDECIDED, 5] = 1
        columns[SLOW, 4], columns[STUCK, 4] = 0.5, 1e-3
        # What makes no progress, in its dual either.
        rows[STUCK, 0] = columns[STUCK, 0] = 0
        columns[STUCK, 5] = 1
        rows[WORSE, 0] = columns[WORSE, 0] = -step
        columns[TRIED, 4], columns[STAYED, 4], columns[FAST, 4] = 0.3, 0.4 * 0.3**step, 1e-4
        for segment, gaps in ((WORSE, WORSE_GAPS), (UNDECIDED, UNDECIDED_GAPS)):
            columns[segment, 4] = gaps[step % len(gaps)]
        if step == 6:
            columns[SPOILT, -1] = rows[NONE, 0] = columns[NONE, 0] = math.nan
        if form is SELF:
            # A constant away from the solution, either way.
            columns[0, 5] = (0.0, math.inf, 1.0)[min(step, 2)]
        columns, rows = columns.to(DEVICE), rows.to(DEVICE)
        return columns[:, :2] if form is SELF else rows, columns

    def evaluate(self, epsilon, active):
        """Numbers as kernels take them."""
        self.levels.append(epsilon.clone())
        return self.evaluations[len(self.levels) - 1]

    def move(self, move, active):
        self.moves.append(move)

    def go_on_from(self, candidate):
        """Whatever is evaluated next is drawn already."""

    begin = go_on_from


class DrawnInTorch(Drawn):
    """The same with evaluations and moves by their names."""

    def evaluate(self, epsilon, active):
        return evaluation_of(*super().evaluate(epsilon, active))

    def move(self, move, active):
        super().move(move.numbers, active)


def begin(rule, form, goal=GOAL):
    """The iterations of all drawn problems."""
    segments = (DrawnInTorch if rule is QuasiNewton else Drawn)(form)
    exponents = torch.arange(COUNT, device=DEVICE) % (6 if form is CROSS else 1)
    exponents[STUCK] = exponents[HOPELESS] = 0
    top = goal.epsilon * torch.ones_like(segments.mean_cost) * 2**exponents
    # Of mean costs whose first level is `top`, with room for rounding.
    levels, tries = Levels.descending(top), Levels.trying(goal.epsilon, 1.2 * top / TOP)
    trying = torch.arange(COUNT, device=DEVICE) >= TRIED
    trying &= torch.arange(COUNT, device=DEVICE) < FAST
    levels = Levels(*(torch.where(trying, *two) for two in zip(tries, levels, strict=True)))
    # Some have had iterations before.
    before = (torch.arange(COUNT, device=DEVICE) == 0).double()
    return segments, rule(segments, segments, goal, form, Start(levels, before))


def all_steps(segments, rule, steps=STEPS):
    """active (steps, S), terms (steps, S, 6), levels (steps, S) and moves (steps, S, .)."""
    active, terms = [], []
    for _ in range(steps):
        if len(segments.levels) == RESTART:
            rule.restart(None, 0.7)
        rule.step()
        active.append(rule.active.clone())
        terms.append(rule.terms.clone())
    seen = active, terms, segments.levels, segments.moves
    return tuple(torch.stack(values) for values in seen)


FORMS = pytest.mark.parametrize("form", [CROSS, SELF], ids=["cross", "self"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "goal"), [(CROSS, GOAL), (SELF, LOOSE)], ids=["cross-fixed", "self-loose"]
)
def test_decisions_are_those_of_the_reference(form, goal):
    found = all_steps(*begin(QuasiNewtonKernels, form, goal=goal))
    expected = all_steps(*begin(QuasiNewton, form, goal=goal))
    assert torch.equal(found[0], expected[0])
    for one, two, rounding in zip(found[1:], expected[1:], (1e-13, 0, 1e-8), strict=True):
        torch.testing.assert_close(one, two, rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.slow
def test_differences_of_rounding_alone_are_not_learnt():
    """Their curvature is above 0, and far below what roundings of a step make."""
    moves = []
    for rule in (QuasiNewtonKernels, QuasiNewton):
        segments, each = begin(rule, CROSS)
        for _, columns in segments.evaluations:
            # <1, s>, <1, y>, <s, s> and <s, y>
            columns[:, 6:8], columns[:, 9], columns[:, 10] = 0, 1, 1e-13
        moves.append(all_steps(segments, each, steps=3)[3])
    for found in moves:
        assert not bool(found[:, :, 1].any())


@FORMS
def test_what_is_drawn_leads_to_every_decision(form):
    """Or the test above would compare too little."""
    active, terms, levels, moves = all_steps(*begin(QuasiNewton, form))
    for decision in (active[:-2], moves[:, :, 0], moves[:, :, 1]):
        assert 0 < int(decision.sum()) < decision.numel()
    assert 0 < int(moves[:, UNDECIDED, 0].sum()) < STEPS
    assert bool((moves[:, :, 9:] != 0).any(2).sum() > STEPS)
    assert float(moves[:, :, 2].max()) == MEMORY - 1
    stalled = terms[:, STUCK, 3] == terms[:, STUCK, 4]
    assert 0 < int(stalled.sum()) < STEPS
    assert not bool(active[RESTART - 1, HOPELESS])
    # Restarted ones go on, and the last iteration ends all.
    assert bool((active[RESTART] & ~active[RESTART - 1]).any())
    assert not bool(active[terms[:, :, 5] >= GOAL.max_iterations].any())
    if form is SELF:
        assert terms[1, 0, [0, 3]].tolist() == [-math.inf, MOST_ERROR]
        return
    # Levels halve where they end, and candidates go ahead; a try that goes nowhere is given up.
    falls = levels[1:RESTART] < levels[: RESTART - 1]
    assert bool((falls <= moves[: RESTART - 1, :, 7].bool()).all())
    assert bool(falls[:, FAST].any())
    assert bool((moves[:RESTART, FAST, 8] > 0).any())
    assert bool((levels[1:RESTART, TRIED] > levels[: RESTART - 1, TRIED]).any())
    assert bool((levels[:RESTART, STAYED] == GOAL.epsilon).all())


class Idle:
    """A kernel that does nothing, of which the interpreter makes many operations otherwise."""

    def __getitem__(self, grid):
        return lambda *args, **constants: None


def test_pytorch_does_nothing_between_evaluation_and_move(monkeypatch):
    """Launches, not work, are what iterations on small problems take."""
    monkeypatch.setattr(decision_kernel, "segmented_decision_kernel", Idle())
    segments, rule = begin(QuasiNewtonKernels, CROSS)
    monkeypatch.setattr(segments, "evaluate", lambda *_: segments.evaluations[0])
    with Calls() as calls:
        rule.step()
    # Views and fresh memory are no work.
    assert calls.by_name.keys() <= {"detach", "view", "empty", "empty_like", "new_empty"}


def test_a_step_that_was_recorded_before_a_restart_reads_the_new_aim(monkeypatch):
    """In the same memory."""
    seen = []

    class Noted(Idle):
        def __getitem__(self, grid):
            return lambda *args, **constants: seen.append(args[4:6])

    monkeypatch.setattr(decision_kernel, "segmented_decision_kernel", Noted())
    segments, rule = begin(QuasiNewtonKernels, CROSS)
    monkeypatch.setattr(segments, "evaluate", lambda *_: segments.evaluations[0])
    rule.step()
    rule.restart(None, 0.5)
    rule.step()
    for before, after in zip(*seen, strict=True):
        assert before.data_ptr() == after.data_ptr()
    assert 0.5 in seen[0][1].tolist()


def test_other_problems_begin_with_nothing_of_those_before():
    segments = Drawn(CROSS)
    level = torch.full((COUNT,), GOAL.epsilon, dtype=torch.float64, device=DEVICE)
    start = Start(Levels.descending(level), torch.zeros_like(level))
    fresh, used = (QuasiNewtonKernels(segments, segments, GOAL, CROSS, start) for _ in range(2))
    for part in used._state:
        part.fill_(0 if part.dtype == torch.bool else 3)
    used.begin(quasi_newton_kernels.settings_of(GOAL, segments).to(DEVICE), start, None)
    for found, expected in zip(used._state[:3], fresh._state[:3], strict=True):
        assert torch.equal(found, expected)


def test_the_last_iteration_is_at_the_final_epsilon():
    levels = Levels.descending(torch.full((3,), 4.0, dtype=torch.float64))
    start = Start(levels, torch.tensor([3.0, 4.0, 5.0], dtype=torch.float64))
    for limit in (5, torch.tensor(5.0, dtype=torch.float64)):
        found = quasi_newton_kernels._first_level(start, 0.5, limit)
        assert found.tolist() == [4.0, 0.5, 0.5]
