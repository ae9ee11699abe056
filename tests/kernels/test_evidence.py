"""A kernel makes of an evaluation what formulas make of tensors, number by number."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from otdd_flash.formulas.evidence import (
    MOST_ERROR,
    CostNumbers,
    Evaluation,
    Evidence,
    PassErrors,
    evaluate_cross,
    evaluate_self,
)
from otdd_flash.kernels.segments.decision import COSTS, compiled, load_numbers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNT, NUMBERS = 64, 14
# Unit roundoffs of potentials and of sums: coarser ones than sums have, so that their terms show.
UNITS = 2.0**-24, 2.0**-11

of_cross, of_self = compiled(evaluate_cross), compiled(evaluate_self)


@triton.jit
def evaluate_kernel(
    rows_ptr,  # (COUNT, 2)
    columns_ptr,  # (COUNT, NUMBERS)
    costs_ptr,  # (COUNT, COSTS)
    units_ptr,  # (2,)
    epsilon_ptr,  # (COUNT,)
    out_ptr,  # (9, COUNT)
    SELF: tl.constexpr,
    NUMBERS: tl.constexpr,
    COSTS: tl.constexpr,
    COUNT: tl.constexpr,
):
    i_problem = tl.arange(0, COUNT)
    p_costs = costs_ptr + COSTS * i_problem
    numbers = load_numbers((), rows_ptr + 2 * i_problem, 2)
    numbers = load_numbers(numbers, columns_ptr + NUMBERS * i_problem, NUMBERS)
    # Products with what is remembered, which have no part in this.
    numbers = load_numbers(numbers, rows_ptr + 2 * i_problem, 2)
    errors = PassErrors(*load_numbers((), p_costs + 3, 9))
    mean, spread, offset = load_numbers((), p_costs, 3)
    unit, unit_of_sums = load_numbers((), units_ptr, 2)
    costs = CostNumbers(mean, spread, offset, errors, unit, unit_of_sums)
    epsilon = tl.load(epsilon_ptr + i_problem)
    if SELF:
        evidence = of_self(costs, Evaluation(*numbers, numbers[10]), epsilon)
    else:
        evidence = of_cross(costs, Evaluation(*numbers, numbers[10]), epsilon)
    for k in tl.static_range(9):
        tl.store(out_ptr + k * COUNT + i_problem, evidence[k])


def drawn():
    """Numbers of evaluations, and of costs with errors so large that limits are reached."""
    draw = torch.Generator().manual_seed(0)
    rows, columns = (
        torch.randn(COUNT, n, generator=draw, dtype=torch.float64) for n in (2, NUMBERS)
    )
    rows[:, 1], columns[:, 1] = rows[:, 1].abs(), columns[:, 1].abs()
    columns[:, 3] = columns[:, 2] + columns[:, 3].abs()
    columns[:, 4], columns[:, 5] = columns[:, 4].abs(), (columns[:, 5] / 4).exp()
    columns[0, 5], columns[1, 5] = torch.inf, 0.0
    costs = torch.rand(COUNT, COSTS, generator=draw, dtype=torch.float64)
    costs[:, 2] -= 0.5
    costs[:, 3:] *= 10 ** (-8 * torch.rand(COUNT, 1, generator=draw, dtype=torch.float64))
    costs[:, 5] = 30 * torch.rand(COUNT, generator=draw, dtype=torch.float64)
    epsilon = 0.05 + torch.rand(COUNT, generator=draw, dtype=torch.float64)
    return (part.to(DEVICE) for part in (rows, columns, costs, epsilon))


@pytest.mark.parametrize("own", [False, True])
def test_a_kernel_evaluates_like_pytorch(own):
    rows, columns, costs, epsilon = drawn()
    out = torch.full((9, COUNT), torch.nan, dtype=torch.float64, device=DEVICE)
    units = torch.tensor(UNITS, dtype=torch.float64, device=DEVICE)
    constants = own, NUMBERS, COSTS, COUNT
    evaluate_kernel[(1,)](rows, columns, costs, units, epsilon, out, *constants)

    mean_cost, spread, offset, *errors = costs.unbind(1)
    facts = CostNumbers(mean_cost, spread, offset, PassErrors(*errors), *UNITS)
    evaluation = Evaluation(*rows.unbind(1), *columns.unbind(1), *rows.unbind(1), columns[:, 8])
    expected = (evaluate_self if own else evaluate_cross)(facts, evaluation, epsilon)
    for name, found, true in zip(Evidence._fields, out, expected, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-13, atol=1e-13, msg=name)
    # All of these are reached, and not all of them always.
    for reached in (expected.error == MOST_ERROR, evaluation.mass > 1):
        assert 0 < int(reached.sum()) < COUNT
