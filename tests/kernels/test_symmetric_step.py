"""The half-step of a self term: solves by it, its bits, and stripes of row blocks."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    DEVICE,
    EPSILON,
    self_cost_of,
)

from otdd_flash.kernels.passes import symmetric_step
from otdd_flash.operators import kernel as kernel_operator
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.symmetric import solve_symmetric


@pytest.fixture(autouse=True)
def _always_by_halves(monkeypatch):
    monkeypatch.setattr(kernel_operator, "MANY_SCORES", 1)


# Three blocks of rows of several classes.
SEVERAL_BLOCKS = (1100, 1, 5, 2, 1)


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
    operator = KernelOperator(self_cost_of(SEVERAL_BLOCKS), "fast")
    f = torch.zeros(operator.shape[0], device=DEVICE)
    assert torch.equal(operator.softmin_rows(f, EPSILON, f), operator.softmin_rows(f, EPSILON, f))


@pytest.mark.slow
def test_stripes_of_row_blocks_give_the_sums_of_all_at_once(monkeypatch):
    case = SEVERAL_BLOCKS
    operator = KernelOperator(self_cost_of(case), "fast")
    f = torch.zeros(case[0], device=DEVICE)
    whole = operator.softmin_rows(f, EPSILON, f)
    blocks = operator.packed[0].layout.size // symmetric_step.BLOCK_ROWS
    monkeypatch.setattr(symmetric_step, "STRIPE_BYTES", 4 * 4 * symmetric_step.BLOCK_ROWS * blocks)
    assert 1 < symmetric_step.stripe_height(blocks) < blocks
    assert blocks % symmetric_step.stripe_height(blocks) != 0
    torch.testing.assert_close(operator.softmin_rows(f, EPSILON, f), whole, rtol=1e-6, atol=1e-6)
