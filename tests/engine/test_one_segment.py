"""One problem as a segment: what its evaluations and moves are, in PyTorch and in Triton."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise
from single_problems import DEVICE, InTriton, draw, masses, problem
from torch import Tensor

from otdd_flash.engine.segments import Evaluation, Move
from otdd_flash.operators.matrix import MatrixOperator
from otdd_flash.operators.one_segment import MEMORY
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.alternating import solve_alternating
from otdd_flash.solver.term.symmetric import solve_symmetric

SOLVES = {False: solve_alternating, True: solve_symmetric}
# A block of the kernels has 256 points.
SIZES = [(1, 1), (2, 1), (7, 129), (300, 1000), (1, None), (600, None)]

LARGE = [pytest.param(size, marks=pytest.mark.gpu) for size in [(333, 150_000), (70_001, 333)]]


def random_move(draws: int) -> Move:
    """Every third is not kept, every fourth teaches nothing, every fifth ends a level."""
    scale, shift, extrapolation, *means = draw(5, seed=draws)[:, None]
    flags = (torch.tensor([draws % k > 0], device=DEVICE) for k in (3, 4, 5))
    kept, learnt, within = flags
    slot = torch.tensor([draws % MEMORY], device=DEVICE)
    weights = draw(1, 2 * MEMORY, seed=draws + 100) / MEMORY
    ahead = torch.where(within, 0, extrapolation.abs())
    return Move(kept, learnt, slot, *means, scale, shift, ~within, ahead, weights)


class Vectors:
    """What should happen to the vectors of one problem, dense and in float64."""

    def __init__(self, operator: StoredOperator, candidate: Tensor, symmetric: bool) -> None:
        # The scores as they are held.
        scores = operator.softmin_rows, operator.softmin_columns
        self.operator, self.symmetric, self.softmins = operator, symmetric, scores
        self.candidate = candidate.double()
        self.kept = self.residual = self.level = torch.zeros_like(self.candidate)
        self.remembered = draw(2 * MEMORY, len(candidate)) * 0

    def evaluate(self, epsilon: float) -> list[Tensor]:
        """The numbers of an evaluation, as they stand in one."""
        operator, b, g = self.operator, self.operator.b, self.candidate
        held = g.to(operator.dtype)
        self.f = g if self.symmetric else operator.softmin_rows(held, epsilon).double()
        update = operator.softmin_rows if self.symmetric else operator.softmin_columns
        self.fresh = update(self.f.to(operator.dtype), epsilon).double() - g
        support, a = b > 0, operator.a
        r, step, change = self.fresh, g - self.kept, self.residual - self.fresh
        off = torch.where(support, (-r / epsilon).exp(), 0)
        return [
            *(a @ self.f, a @ self.f.abs(), b @ g, b @ g.abs(), g[support].min(), g[support].max()),
            *(b @ (off - 1).abs(), b @ off, b @ step, b @ change, b @ r, b @ (step * step)),
            *(b @ (step * change), b @ (change * change), b @ (step * r), b @ (change * r)),
            *(self.remembered @ (b * change), self.remembered @ (b * r)),
        ]

    def move(self, move: Move) -> None:
        support, slot = self.operator.b > 0, int(move.slot)
        if move.learnt:
            step = self.candidate - self.kept - move.mean_step
            change = self.residual - self.fresh - move.mean_difference
            self.remembered[slot] = torch.where(support, step, 0)
            self.remembered[slot + MEMORY] = torch.where(support, change, 0)
        if move.kept:
            self.kept, self.residual = self.candidate, self.fresh
        moved = self.kept + move.scale * self.residual + move.shift
        moved = moved + move.weights[0] @ self.remembered
        moved = torch.where(support, moved, self.kept + self.residual)
        self.candidate = moved + move.extrapolation * (moved - self.level)
        if move.ends:
            self.level = moved


@pytest.mark.slow(after=3)
@pairwise(size=[*SIZES, *LARGE], zeros=[False, True], kind=["float32", "float64", "triton"])
def test_evaluations_and_moves_are_their_formulas(size, zeros, kind) -> None:
    """At a level of epsilon each, with the oldest differences overwritten in the end."""
    n, m = size
    symmetric, single = m is None, kind != "float64"
    operator = problem(n, m, torch.float32 if single else torch.float64, zeros=zeros)
    whole = InTriton(operator) if kind == "triton" else operator
    candidate = draw(operator.shape[1], seed=3).to(operator.dtype)
    segment = whole.execution.segment(whole, candidate, symmetric=symmetric)
    expected = Vectors(operator, candidate, symmetric)
    expected.kept = expected.candidate
    active = torch.ones(1, dtype=torch.bool, device=DEVICE)
    for step in range(1, MEMORY + 4 if 129 in size else 4):
        level = operator.costs.mean / 2**step + 0.1
        epsilon = torch.full((1,), level, dtype=torch.float64, device=DEVICE)
        numbers = expected.evaluate(level)
        move = random_move(step)
        if kind == "triton":
            evaluation = Evaluation.of(*segment.numbers(epsilon, active))
            segment.move_by(move.numbers, active)
        else:
            evaluation = segment.evaluate(epsilon, active)
            segment.move(move, active)
        expected.move(move)
        largest = 1 + float(expected.candidate.abs().max())
        rounding = (2e-5 if single else 1e-11) * largest
        for found, number in zip(evaluation, numbers, strict=True):
            torch.testing.assert_close(found[0], number, rtol=rounding, atol=rounding * largest)
        seen = [
            (segment.kept, expected.kept),
            (segment.updated, expected.kept + expected.residual),
        ]
        for found, vector in seen if symmetric else [*seen, (segment.rows, expected.f)]:
            torch.testing.assert_close(found.double(), vector, rtol=0, atol=rounding)


@pytest.mark.parametrize(("symmetric", "in_triton"), [(False, False), (True, False), (False, True)])
def test_before_any_evaluation_the_start_is_what_there_is(symmetric, in_triton) -> None:
    """A term that has one iteration left proves what it is given."""
    operator = problem(30, None if symmetric else 40, torch.float32)
    solve, whole = SOLVES[symmetric], InTriton(operator) if in_triton else operator
    first = solve(operator, 0.5, Converged(1e-3))
    again = solve(whole, 0.5, Converged(1e-4, max_iterations=1), start=first.g)
    assert again.iterations == 1
    assert again.marginal_error <= first.marginal_error * (1 + 1e-9)
    segment = whole.execution.segment(whole, first.g, symmetric=symmetric)
    assert torch.equal(segment.kept, first.g)
    assert torch.equal(segment.updated, first.g)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("constant", "far"), [(True, 1e4), (False, 1e3), (True, -1e3)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_solve_may_start_from_anywhere(symmetric, constant, far) -> None:
    """Masses of the first plans are infinite or 0."""
    operator = problem(30, None if symmetric else 40, torch.float64)
    epsilon, solve = 0.03 * operator.costs.mean, SOLVES[symmetric]
    near = solve(operator, epsilon, Converged(1e-6))
    start = far * (torch.ones_like(near.g) if constant else draw(len(near.g)))
    term = solve(operator, epsilon, Converged(1e-6), start=start)
    assert term.converged
    assert term.value == pytest.approx(near.value, rel=1e-5)
    if constant:
        assert term.iterations <= near.iterations + 3


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("symmetric", "relative"), [(False, 30.0), (False, 0.05), (True, 0.3)])
def test_whole_solves_in_triton_are_those_of_the_reference(symmetric, relative) -> None:
    operator = problem(40, None if symmetric else 33, zeros=True)
    solve, epsilon = SOLVES[symmetric], relative * operator.costs.mean
    expected = solve(operator, epsilon, Converged(1e-3))
    found = solve(InTriton(operator), epsilon, Converged(1e-3))
    assert found.converged
    assert found.iterations <= expected.iterations + 2
    assert max(found.bounds[0], expected.bounds[0]) <= min(found.bounds[1], expected.bounds[1])
    if not symmetric:
        # Points without mass end with their softmin.
        softmin, without = operator.softmin_rows(found.g, epsilon), operator.a == 0
        off = (found.f - softmin)[without].abs().max()
        assert float(off) < 1e-3 * epsilon


@pytest.mark.parametrize("relative", [1e-3, 1.0, 1e3])
def test_a_cloud_of_one_point(relative) -> None:
    """The plan is all of its mass, at once."""
    one = masses(1)
    cost = torch.full((1, 1), 0.7, dtype=torch.float64, device=DEVICE)
    operator = MatrixOperator(cost, one, one)
    for solve in (solve_symmetric, solve_alternating):
        term = solve(operator, 0.7 * relative, Converged(1e-9))
        assert term.converged
        assert term.value == pytest.approx(0.7, rel=1e-9)
        assert term.iterations <= 3
