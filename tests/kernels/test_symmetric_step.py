"""The half-step of a self term, each pair once, against dense float64."""

from __future__ import annotations

import pytest
import reference
import torch
from kernel_cases import (
    DEVICE,
    EPSILON,
    LARGE_CASES,
    SMALL_CASES,
    dense_cost,
    largest_error,
    self_cost_of,
)
from pairwise import pairwise

from otdd_flash.kernels.passes import symmetric_step
from otdd_flash.operators import kernel as kernel_operator
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.symmetric import solve_symmetric


@pytest.fixture(autouse=True)
def _always_by_halves(monkeypatch):
    monkeypatch.setattr(kernel_operator, "MANY_SCORES", 1)


# Three blocks of rows of one class, and of several.
SEVERAL_BLOCKS = [(700, 1, 20, 1, 1), (1100, 1, 5, 2, 1)]


@pytest.mark.slow(after=1)
@pairwise(
    case=[*SMALL_CASES, *SEVERAL_BLOCKS, *LARGE_CASES],
    precision=["fast", "high"],
    epsilon=[0.05, EPSILON, 30.0],
)
def test_symmetric_steps_are_exact_for_the_rounded_points(case, precision, epsilon):
    operator = KernelOperator(self_cost_of(case), precision)
    cost = dense_cost(operator)
    f = torch.zeros(case[0], device=DEVICE)
    atol = largest_error(operator) + 1e-6 * (float(cost.max()) + epsilon)
    for _ in range(3):
        expected = reference.softmin_rows(cost, operator.a, f, epsilon)
        got = operator.softmin_rows(f, epsilon, f)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol)
        f = (f + got) / 2


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("case", [*SMALL_CASES, *SEVERAL_BLOCKS], ids=str)
def test_potentials_far_from_the_solution_are_done_with_a_maximum(case):
    operator = KernelOperator(self_cost_of(case), "fast")
    draw = torch.Generator().manual_seed(0)
    f = torch.randn(case[0], generator=draw).to(DEVICE) * 100
    cost = dense_cost(operator)
    expected = reference.softmin_rows(cost, operator.a, f, EPSILON)
    got = operator.softmin_rows(f, EPSILON, f)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", [(140, 1, 5, 1, 1), (150, 1, 5, 2, 1)], ids=str)
def test_a_self_term_is_the_same_by_halves_and_in_full(case, monkeypatch):
    operator = KernelOperator(self_cost_of(case), "fast")
    halves = solve_symmetric(operator, EPSILON, Converged(1e-4))
    monkeypatch.setattr(kernel_operator, "MANY_SCORES", 1 << 40)
    full = solve_symmetric(KernelOperator(self_cost_of(case), "fast"), EPSILON, Converged(1e-4))
    assert halves.converged
    assert halves.value == pytest.approx(full.value, abs=1e-5 * abs(full.value))
    torch.testing.assert_close(halves.f, full.f, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_two_runs_agree_bit_for_bit():
    operator = KernelOperator(self_cost_of(SEVERAL_BLOCKS[1]), "fast")
    f = torch.zeros(operator.shape[0], device=DEVICE)
    assert torch.equal(operator.softmin_rows(f, EPSILON, f), operator.softmin_rows(f, EPSILON, f))


@pytest.mark.slow
def test_stripes_of_row_blocks_give_the_sums_of_all_at_once(monkeypatch):
    case = SEVERAL_BLOCKS[1]
    operator = KernelOperator(self_cost_of(case), "fast")
    f = torch.zeros(case[0], device=DEVICE)
    whole = operator.softmin_rows(f, EPSILON, f)
    blocks = operator.packed[0].layout.size // symmetric_step.BLOCK_ROWS
    monkeypatch.setattr(symmetric_step, "STRIPE_BYTES", 4 * 4 * symmetric_step.BLOCK_ROWS * blocks)
    assert 1 < symmetric_step.stripe_height(blocks) < blocks
    assert blocks % symmetric_step.stripe_height(blocks) != 0
    torch.testing.assert_close(operator.softmin_rows(f, EPSILON, f), whole, rtol=1e-6, atol=1e-6)
