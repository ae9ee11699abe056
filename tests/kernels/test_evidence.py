"""A kernel makes of an evaluation what the PyTorch reference makes of it, number by number."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from otdd_flash.engine.evidence.dual import LEAST_MASS, MOST_MASS
from otdd_flash.engine.evidence.evaluated import Evidence, evaluate_cross, evaluate_self
from otdd_flash.engine.evidence.oscillation import MOST_ERROR
from otdd_flash.engine.evidence.two_passes import VALUE_TRIFLE
from otdd_flash.engine.segments import Evaluation, PassErrors
from otdd_flash.kernels.segments.evidence import COSTS, evaluate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNT, NUMBERS = 64, 14
# Unit roundoffs of potentials and of sums: coarser ones than sums have, so that their terms show.
DTYPES = torch.float32, torch.float16


@triton.jit
def evaluate_kernel(
    rows_ptr,  # (COUNT, 2)
    columns_ptr,  # (COUNT, NUMBERS)
    costs_ptr,  # (COUNT, COSTS)
    epsilon_ptr,  # (COUNT,)
    out_ptr,  # (9, COUNT)
    unit: tl.float64,
    unit_of_sums: tl.float64,
    SELF: tl.constexpr,
    VALUE_TRIFLE: tl.constexpr,
    MOST_ERROR: tl.constexpr,
    LEAST_MASS: tl.constexpr,
    MOST_MASS: tl.constexpr,
    NUMBERS: tl.constexpr,
    COSTS: tl.constexpr,
    COUNT: tl.constexpr,
):
    i_problem = tl.arange(0, COUNT)
    numbers = evaluate(
        rows_ptr + 2 * i_problem,
        columns_ptr + NUMBERS * i_problem,
        costs_ptr + COSTS * i_problem,
        tl.load(epsilon_ptr + i_problem),
        unit,
        unit_of_sums,
        SELF,
        VALUE_TRIFLE,
        MOST_ERROR,
        LEAST_MASS,
        MOST_MASS,
    )
    for k in tl.static_range(9):
        tl.store(out_ptr + k * COUNT + i_problem, numbers[k])


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
    units = (torch.finfo(dtype).eps / 2 for dtype in DTYPES)
    limits = VALUE_TRIFLE, MOST_ERROR, LEAST_MASS, MOST_MASS
    constants = own, *limits, NUMBERS, COSTS, COUNT
    evaluate_kernel[(1,)](rows, columns, costs, epsilon, out, *units, *constants)

    mean_cost, spread, offset, *errors = costs.unbind(1)
    segments = SimpleNamespace(
        dtype=DTYPES[0],
        sum_dtype=DTYPES[1],
        mean_cost=mean_cost,
        cost_spread=spread,
        offset=offset,
        errors=PassErrors(*errors),
    )
    products = columns.new_zeros(COUNT, 16)
    evaluation = Evaluation.of(rows, torch.cat((columns, products), 1))
    expected = (evaluate_self if own else evaluate_cross)(segments, evaluation, epsilon)
    for name, found, true in zip(Evidence._fields, out, expected, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-13, atol=1e-13, msg=name)
    # All of these are reached, and not all of them always.
    for reached in (expected.error == MOST_ERROR, evaluation.mass > 1):
        assert 0 < int(reached.sum()) < COUNT
