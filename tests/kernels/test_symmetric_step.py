"""Sums of rows and of columns in one pass, by half a self term too: in stripes, and lost ones."""

from __future__ import annotations

import pytest
import reference
import torch
from kernel_cases import (
    DEVICE,
    EPSILON,
    cost_of,
    dense_cost,
    largest_error,
    potentials,
    self_cost_of,
)

from otdd_flash.kernels.passes import symmetric_step
from otdd_flash.operators import kernel as kernel_operator
from otdd_flash.operators.kernel import KernelOperator


@pytest.mark.slow
def test_stripes_of_row_blocks_give_the_sums_of_all_at_once(monkeypatch):
    monkeypatch.setattr(kernel_operator, "MANY_SCORES", 1)
    # Three blocks of rows of several classes.
    case = (1100, 1, 5, 2, 1)
    operator = KernelOperator(self_cost_of(case), "fast")
    f = torch.zeros(case[0], device=DEVICE)
    whole = operator.softmin_rows(f, EPSILON, f)
    blocks = operator.packed[0].layout.size // symmetric_step.BLOCK_ROWS
    monkeypatch.setattr(symmetric_step, "STRIPE_BYTES", 4 * 4 * symmetric_step.BLOCK_ROWS * blocks)
    assert 1 < symmetric_step.stripe_height(blocks) < blocks
    assert blocks % symmetric_step.stripe_height(blocks) != 0
    torch.testing.assert_close(operator.softmin_rows(f, EPSILON, f), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_stripes_of_row_blocks_give_the_softmins_of_both_sides(monkeypatch):
    monkeypatch.setattr(symmetric_step, "STRIPE_BYTES", 1)
    operator = KernelOperator(cost_of((700, 300, 20, 1, 1)), "fast")
    cost = dense_cost(operator)
    start, _ = potentials(operator)
    # Near a solution, as in a solve.
    g = reference.softmin_rows(cost.T, operator.a, start, EPSILON).float()
    f = reference.softmin_rows(cost, operator.b, g, EPSILON).float()
    atol = largest_error(operator) + 2e-6 * (float(cost.max()) + EPSILON)
    rows, columns = operator.softmin_pair(f, g, EPSILON)
    for found, expected in (
        (rows, reference.softmin_rows(cost, operator.b, g, EPSILON)),
        (columns, reference.softmin_rows(cost.T, operator.a, f, EPSILON)),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_sums_that_are_lost_are_infinite():
    operator = KernelOperator(cost_of((270, 140, 40, 3, 1)), "fast")
    f, g = (torch.full_like(potential, -1e4) for potential in potentials(operator))
    rows, columns = operator.softmin_pair(f, g, EPSILON)
    assert bool((rows == torch.inf).all())
    assert bool((columns == torch.inf).all())
