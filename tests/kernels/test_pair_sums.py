"""Sums of rows and of columns of a rectangle in one pass, against dense float64."""

from __future__ import annotations

import pytest
import reference
import torch
from kernel_cases import (
    EPSILON,
    LARGE_CASES,
    SMALL_CASES,
    cost_of,
    dense_cost,
    largest_error,
    potentials,
)
from pairwise import pairwise

from otdd_flash.kernels.passes import symmetric_step
from otdd_flash.operators.kernel import KernelOperator

# Three blocks of rows of several classes.
SEVERAL_BLOCKS = [(700, 300, 20, 1, 1), (1100, 500, 5, 2, 3)]


@pytest.mark.slow(after=1)
@pairwise(
    case=[*SMALL_CASES, *SEVERAL_BLOCKS, *LARGE_CASES],
    precision=["fast", "high"],
    stripe=[1, 1 << 28],
)
def test_both_softmins_come_of_one_pass(case, precision, stripe, monkeypatch):
    monkeypatch.setattr(symmetric_step, "STRIPE_BYTES", stripe)
    operator = KernelOperator(cost_of(case), precision)
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
    operator = KernelOperator(cost_of(SMALL_CASES[1]), "fast")
    f, g = (torch.full_like(potential, -1e4) for potential in potentials(operator))
    rows, columns = operator.softmin_pair(f, g, EPSILON)
    assert bool((rows == torch.inf).all())
    assert bool((columns == torch.inf).all())
