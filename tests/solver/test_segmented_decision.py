"""What one kernel decides for many problems is what the PyTorch reference decides."""

from __future__ import annotations

import math

import pytest
import torch
from otdd_flash.solver.segmented_kernels import QuasiNewtonKernels
from otdd_flash.solver.segmented_quasi_newton import QuasiNewton, Start
from torch.utils._python_dispatch import TorchDispatchMode

from otdd_flash.engine.evidence import CROSS, SELF
from otdd_flash.engine.segments import MEMORY, Look, PassErrors
from otdd_flash.kernels import segmented_decision
from otdd_flash.solver import segmented_kernels, segmented_quasi_newton, trust
from otdd_flash.solver.converged import Converged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON, TOLERANCE, STEPS, COUNT = 0.1, 1e-3, 14, 9
OPTIONS = Converged(TOLERANCE, max_iterations=STEPS - 1)
# Where the dual falls, where a level is never done, where the dual cannot tell, where rounding is
# hopeless, where nothing gets better, and where there are numbers that are none.
WORSE, SLOW, UNDECIDED, HOPELESS, STUCK, SPOILT = range(1, 7)
# Marginal errors that leave a level early, and that stay, fall and grow.
WORSE_GAPS = (0.5, 0.5, 0.5, 0.5, 0.01)
UNDECIDED_GAPS = (0.4, 0.8, 0.8, 0.8, 0.3, 3.0, 0.6)


class Drawn:
    """Problems whose looks are drawn at random; they write down all levels and moves."""

    dtype = sum_dtype = torch.float32

    def __init__(self, form):
        self.draw = torch.Generator().manual_seed(3)
        costs = self.random(9, COUNT).abs().to(DEVICE)
        self.mean_cost, self.cost_spread, self.offset, *errors = costs
        sizes = (1e-7, 3e-7, 1.0, 1e-6, 6e-8, 1e-7)
        self.errors = PassErrors(*(size * one for size, one in zip(sizes, errors, strict=True)))
        self.errors.mean[HOPELESS] = self.errors.largest[HOPELESS] = 1e-3
        self.looks = [self.drawn(form, step) for step in range(STEPS)]
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
        mean_step, mean_fall, more = columns[:, 6], columns[:, 7], columns[:, 9:12].clone()
        columns[:, 9] = mean_step.square() + more[:, 0].abs()
        columns[:, 10] = mean_step * mean_fall + more[:, 1] + 0.08
        columns[:, 11] = mean_fall.square() + more[:, 2].abs() + 0.1
        rows[UNDECIDED, 0] = columns[UNDECIDED, 0] = columns[UNDECIDED, 8] = 0
        columns[UNDECIDED, 5] = 1
        columns[SLOW, 4], columns[STUCK, 4] = 0.5, 1e-6
        # What makes no progress, in its dual either.
        rows[STUCK, 0] = columns[STUCK, 0] = 0
        columns[STUCK, 5] = 1
        rows[WORSE, 0] = columns[WORSE, 0] = -step
        for segment, gaps in ((WORSE, WORSE_GAPS), (UNDECIDED, UNDECIDED_GAPS)):
            columns[segment, 4] = gaps[step % len(gaps)]
        if step == 6:
            columns[SPOILT, -1] = rows[SPOILT + 1, 0] = columns[SPOILT + 1, 0] = math.nan
        columns, rows = columns.to(DEVICE), rows.to(DEVICE)
        return columns[:, :2] if form is SELF else rows, columns

    def numbers(self, epsilon, active):
        self.levels.append(epsilon)
        return self.looks[len(self.levels) - 1]

    def look(self, epsilon, active):
        return Look.of(*self.numbers(epsilon, active))

    def move_by(self, numbers, active):
        self.moves.append(numbers)

    def move(self, move, active):
        self.move_by(move.numbers, active)

    def keep(self, order):
        for name in ("mean_cost", "cost_spread", "offset"):
            setattr(self, name, getattr(self, name)[order])
        self.errors = PassErrors(*(numbers[order] for numbers in self.errors))
        self.looks = [(rows[order], columns[order]) for rows, columns in self.looks]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """After two iterations without a lower error it counts, and after five they end."""
    limits = segmented_kernels.LIMITS._replace(patience=2.0, stalled=5.0)
    monkeypatch.setattr(segmented_kernels, "LIMITS", limits)
    monkeypatch.setattr(trust, "PATIENCE", 2)
    monkeypatch.setattr(segmented_quasi_newton, "STALLED", 5)


def begin(rule, form, order=None):
    """The iterations of all drawn problems, or of those in an order."""
    segments = Drawn(form)
    exponents = torch.arange(COUNT, device=DEVICE) % 6 if form is CROSS else 0
    level = EPSILON * torch.ones_like(segments.mean_cost) * 2**exponents
    before = torch.zeros_like(level)
    if order is not None:
        segments.keep(order)
        level, before = level[order], before[order]
    return segments, rule(segments, OPTIONS, EPSILON, form, Start(level, before))


def all_steps(segments, rule, steps=STEPS):
    """done (steps, S), terms (steps, S, 6), levels (steps, S) and moves (steps, S, .)."""
    active = torch.ones(len(segments.mean_cost), dtype=torch.bool, device=DEVICE)
    seen = [rule.step(active) for _ in range(steps)]
    done, terms = (torch.stack(values) for values in zip(*seen, strict=True))
    return done, terms, torch.stack(segments.levels), torch.stack(segments.moves)


@pytest.mark.slow
@pytest.mark.parametrize("form", [CROSS, SELF], ids=["cross", "self"])
def test_decisions_are_those_of_the_reference(form):
    found = all_steps(*begin(QuasiNewtonKernels, form))
    expected = all_steps(*begin(QuasiNewton, form))
    assert torch.equal(found[0], expected[0])
    for one, two, rounding in zip(found[1:], expected[1:], (1e-13, 0, 1e-8), strict=True):
        torch.testing.assert_close(one, two, rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.parametrize("form", [CROSS, SELF], ids=["cross", "self"])
def test_what_is_drawn_leads_to_every_decision(form):
    """Or the test above would compare too little."""
    done, terms, levels, moves = all_steps(*begin(QuasiNewton, form))
    for decision in (done[:-2], moves[:, :, 0], moves[:, :, 1]):
        assert 0 < int(decision.sum()) < decision.numel()
    kept = moves[:, UNDECIDED, 0]
    assert 0 < int(kept.sum()) < STEPS
    assert bool((moves[:, :, 7:] != 0).any(2).sum() > STEPS)
    assert float(moves[:, :, 2].max()) == MEMORY - 1
    stalled = terms[:, STUCK, 3] == terms[:, STUCK, 4]
    assert 0 < int(stalled.sum()) < STEPS
    assert bool(done[:, HOPELESS][levels[:, HOPELESS] <= EPSILON].all())
    assert bool(done[STEPS - 2 :].all())
    if form is CROSS:
        assert bool((levels[: STEPS - 2, SLOW] > EPSILON).all())
        assert bool((levels[STEPS - 2] == EPSILON).all())
        assert bool((levels[1 : STEPS - 2] < levels[: STEPS - 3]).any())


@pytest.mark.slow
@pytest.mark.parametrize("form", [CROSS, SELF], ids=["cross", "self"])
def test_segments_do_not_see_each_other(form):
    """To the last bit: among others, and alone."""
    together = all_steps(*begin(QuasiNewtonKernels, form))
    for segment in (UNDECIDED, COUNT - 1):
        order = torch.tensor([segment], device=DEVICE)
        alone = all_steps(*begin(QuasiNewtonKernels, form, order))
        for one, two in zip(together, alone, strict=True):
            assert torch.equal(one[:, order].nan_to_num(7.0), two.nan_to_num(7.0))


@pytest.mark.slow
def test_segments_that_stay_keep_what_they_know():
    order = torch.tensor([5, 0, 2], device=DEVICE)
    together = all_steps(*begin(QuasiNewtonKernels, CROSS))
    segments, rule = begin(QuasiNewtonKernels, CROSS)
    all_steps(segments, rule, 8)
    rule.keep(order)
    segments.keep(order)
    segments.levels, segments.moves, segments.looks = [], [], segments.looks[8:]
    stayed = all_steps(segments, rule, STEPS - 8)
    for one, two in zip(together, stayed, strict=True):
        assert torch.equal(one[8:, order], two)


class Count(TorchDispatchMode):
    """Notes PyTorch's operations, without views and fresh memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in ("detach", "view", "empty", "empty_like", "new_empty"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class Idle:
    """A kernel that does nothing, of which the interpreter makes many operations otherwise."""

    def __getitem__(self, grid):
        return lambda *args, **constants: None


def test_pytorch_has_nothing_to_do_between_look_and_move(monkeypatch):
    """Launches, not work, are what iterations on small problems take."""
    monkeypatch.setattr(segmented_decision, "segmented_decision_kernel", Idle())
    _, rule = begin(QuasiNewtonKernels, CROSS)
    active = torch.ones(COUNT, dtype=torch.bool, device=DEVICE)
    with Count() as count:
        rule.step(active)
    assert count.names == []
