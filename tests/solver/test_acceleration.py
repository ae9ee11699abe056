"""Accelerated solves survive bad steps, and reach every tolerance that is not refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.formulas.differences import OneMemory
from otdd_flash.operators.given_costs import matrix_operator
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver.evidence import magnitude, rounding_floor
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_term

Case = tuple[Tensor, Tensor, Tensor]
TOLERANCE = 1e-3


def uniform(n: int) -> Tensor:
    return torch.ones(n).double() / n


def random_clouds(draw: torch.Generator) -> Case:
    x, y = torch.randn(33, 2, generator=draw), torch.randn(41, 2, generator=draw) + 1
    a, b = (torch.rand(n, generator=draw).double() + 0.01 for n in (33, 41))
    return reference.dense_cost(x, y), a / a.sum(), b / b.sum()


def nearly_decoupled(draw: torch.Generator) -> Case:
    """Three far clusters whose masses differ a little: mass must cross the gaps."""
    centres = 10 * torch.randn(3, 2, generator=draw)
    x, y = (
        centres[torch.arange(n) % 3] + 0.3 * torch.randn(n, 2, generator=draw) for n in (33, 40)
    )
    return reference.dense_cost(x, y), uniform(33), uniform(40)


def decoupled(draw: torch.Generator) -> Case:
    x, y = (torch.arange(30.0)[:, None] + 0.01 * torch.rand(30, 1, generator=draw) for _ in "xy")
    return reference.dense_cost(x, y), uniform(30), uniform(30)


def without_mass(draw: torch.Generator) -> Case:
    cost, a, b = random_clouds(draw)
    a[::3], b[1::3] = 0, 0
    # What carries no mass may be anywhere.
    cost[::3] += 1e4
    return cost, a / a.sum(), b / b.sum()


def no_geometry(draw: torch.Generator) -> Case:
    return torch.rand(40, 30, generator=draw).double(), uniform(40), uniform(30)


Make = Callable[[torch.Generator], Case]
# The quickest first.
CASES = [decoupled, no_geometry, random_clouds, nearly_decoupled, without_mass]


def case_of(make: Make) -> Case:
    return make(torch.Generator().manual_seed(0))


def operator_of(case: Case, dtype: torch.dtype = torch.float64) -> TorchOperator[Any]:
    return matrix_operator(case[0].to(dtype), *case[1:])


# What the residual is scaled by, and the size of weights of remembered differences.
SABOTAGES = {
    "backwards": (-1.0, 0.0),
    "too far": (1e6, 0.0),
    "not a number": (torch.nan, 0.0),
    "still": (0.0, 0.0),
    "noise": (1.0, 30.0),
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("sabotage", "dtype"),
    [*((name, torch.float64) for name in SABOTAGES), ("still", torch.float32)],
)
def test_bad_steps_hold_the_plain_iteration_up_by_a_few(
    sabotage: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(random_clouds)
    operator = operator_of(case, dtype)
    epsilon = 0.05 * operator.costs.mean
    plain = reference.plain_iterations(*case, epsilon, TOLERANCE)
    assert plain > 20

    turns = []

    def direction(
        _: OneMemory, steps: list[float], differences: list[float]
    ) -> tuple[float, list[float]]:
        scale, size = SABOTAGES[sabotage]
        turns.append(scale)
        noise = size * torch.linspace(-30, 30, len(steps) + len(differences)).double().sin()
        return scale, noise.tolist()

    monkeypatch.setattr(OneMemory, "_direction", direction)
    start = torch.zeros_like(operator.b)
    term = solve_term(operator, epsilon, Converged(TOLERANCE), start=start)
    assert term.converged
    assert turns
    # In float32 the dual does not see a step that stands still; patience runs out again and again.
    held_up = 12 if dtype == torch.float64 else plain // 2
    assert term.iterations <= plain + held_up


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("relative", [0.3, 3e-3])
def test_every_tolerance_that_is_not_refused_is_reached_in_float32(
    make: Make, relative: float
) -> None:
    """Just above the refusal, the measured error does not stall above what is left to it."""
    operator = operator_of(case_of(make), torch.float32)
    epsilon = relative * operator.costs.mean
    coarse = solve_term(operator, epsilon, Converged(0.02))
    floor = rounding_floor(operator.costs, float(magnitude(operator, coarse.f, coarse.g)), epsilon)
    with pytest.raises(InputError, match=r"too tight for float32.*precision=double"):
        solve_term(operator, epsilon, Converged(1.9 * floor))
    term = solve_term(operator, epsilon, Converged(2.5 * floor, max_iterations=2000))
    assert term.converged
