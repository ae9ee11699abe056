"""Sums of rows and of columns of a rectangle in one pass: in stripes, and where they are lost."""

from __future__ import annotations

import pytest
import reference
import torch
from kernel_cases import (
    EPSILON,
    cost_of,
    dense_cost,
    largest_error,
    potentials,
)

from otdd_flash.kernels.passes import symmetric_step
from otdd_flash.operators.kernel import KernelOperator


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
