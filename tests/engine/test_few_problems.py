"""Iterations of a few problems in floats take the decisions that tensors take of many."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from otdd_flash.engine import numbers
from otdd_flash.engine.differences import Differences
from otdd_flash.engine.evidence.evaluated import CROSS, SELF, Form
from otdd_flash.engine.few_problems import Memory
from otdd_flash.engine.levels import Levels
from otdd_flash.engine.quasi_newton import Progress, State, decide
from otdd_flash.engine.rule import Goal
from otdd_flash.engine.segments import Evaluation, PassErrors
from otdd_flash.engine.trust import Trust
from otdd_flash.operators.one_problem import Scalars

MEMORY, EPSILON = 8, 0.25
GOAL = Goal(EPSILON, 1e-4, 1e-2, 40)
DOUBLE = torch.float64


def drawn(draw: torch.Generator, count: int, low: float, high: float) -> Tensor:
    """Positive numbers over so many orders of magnitude, some of them 0, infinite or NaN."""
    found = 10 ** (low + (high - low) * torch.rand(count, generator=draw, dtype=DOUBLE))
    kind = torch.randint(0, 40, (count,), generator=draw)
    for k, extreme in enumerate((0.0, math.inf, math.nan)):
        found[kind == k] = extreme
    return found


def states(count: int) -> tuple[State, Evaluation]:
    draw = torch.Generator().manual_seed(5)

    def whole(most: int) -> Tensor:
        return torch.randint(0, most, (count,), generator=draw).double()

    def spread(low: float, high: float) -> Tensor:
        return drawn(draw, count, low, high)

    dual = torch.randn(count, generator=draw, dtype=DOUBLE)
    dual[whole(9) == 0] = -math.inf
    level = EPSILON * 2 ** whole(3)
    levels = Levels(level, level, whole(20), spread(-5, 0), whole(2))
    trust = Trust(dual, spread(-9, 0), spread(-5, 0), whole(12), whole(3), 1 + whole(4))
    progress = Progress(spread(-5, 0), dual - spread(-9, 0), whole(25))
    near = dual.nan_to_num(neginf=0.0)
    numbers = [spread(-6, 1) for _ in range(16)]
    # <a, f>, <1, g> and the mass give a dual near that of before.
    numbers[0], numbers[2] = near / 2 + numbers[0] * 1e-3, near / 2
    numbers[7] = 1 + spread(-9, -1)
    return State(1 + whole(41), levels, trust, progress), Evaluation(*numbers, dual, dual)


EXTREMES = (-math.inf, -2.5, -0.0, 0.0, 1e-300, 0.5, 800.0, math.inf, math.nan)
OPERATIONS: dict[str, Callable[..., Any]] = {
    "ratio": numbers.ratio,
    "maximum": numbers.maximum,
    "minimum": numbers.minimum,
    "log": lambda one, _: numbers.log(one),
    "exp": lambda one, _: numbers.exp(one),
    "sqrt": lambda one, _: numbers.sqrt(one),
    "is_finite": lambda one, _: numbers.is_finite(one),
    "clamp": lambda one, _: numbers.clamp(one, -1.0, 2.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_floats_follow_what_tensors_do_at_the_extremes(name: str) -> None:
    """Infinities, NaN and zeros of both signs: nothing raises, and signs are equal."""
    operation = OPERATIONS[name]
    for pair in product(EXTREMES, EXTREMES):
        expected = operation(*(torch.tensor([each], dtype=DOUBLE) for each in pair))
        found = torch.tensor([operation(*pair)], dtype=expected.dtype)
        torch.testing.assert_close(
            found, expected, rtol=1e-14, atol=0, equal_nan=True, msg=f"{name} of {pair}"
        )


def flat(value: object) -> list[object]:
    return [each for part in value for each in flat(part)] if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("form", [CROSS, SELF])
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_decisions_are_those_of_tensors(form: Form, count: int) -> None:
    """Equal but where the last bits of a logarithm or an exponential decide."""
    state, found = states(count)
    costs = Scalars(
        torch.float32,
        torch.float32,
        0.7,
        2.5,
        PassErrors(1e-7, 2e-7, 0.0, 1e-7, 0.0, 0.0, 6e-8, 1e-7, 0.0),
        0.0,
    )
    of_all = costs._replace(
        mean_cost=torch.full((count,), costs.mean_cost, dtype=DOUBLE),
        cost_spread=torch.full((count,), costs.cost_spread, dtype=DOUBLE),
        offset=torch.zeros(count, dtype=DOUBLE),
        errors=PassErrors(*(torch.full((count,), each, dtype=DOUBLE) for each in costs.errors)),
    )
    together = flat(decide(GOAL, form, of_all, state, found))
    given = torch.stack([*flat(state), *found], 1).tolist()
    alone = []
    for row in given:
        iterations, *numbers = row[:15]
        parts = Levels(*numbers[:5]), Trust(*numbers[5:11]), Progress(*numbers[11:14])
        one = State(iterations, *parts), Evaluation(*row[15:])
        alone.append(flat(decide(GOAL, form, costs, *one)))
    differing = 0
    for many, ones in zip(together, zip(*alone, strict=True), strict=True):
        single = torch.tensor(ones, dtype=many.dtype)
        if many.dtype == torch.bool:
            differing += int((many != single).sum())
        else:
            same = torch.isclose(many, single, rtol=1e-14, atol=0, equal_nan=True)
            differing += int((~same).sum())
    assert differing <= count // 10_000


def test_directions_are_those_of_tensors() -> None:
    """Of twenty differences one after the other, more than slots, some of which are not learnt."""
    draw = torch.Generator().manual_seed(2)
    basis = torch.randn(30, 30, generator=draw, dtype=DOUBLE)
    # Residual differences of a convex problem: y = H s.
    hessian = basis @ basis.T / 30 + torch.eye(30, dtype=DOUBLE)
    slots = torch.zeros(2 * MEMORY, 30, dtype=DOUBLE)
    alone, together = Memory(MEMORY), Differences(torch.zeros(1, dtype=DOUBLE), MEMORY)
    for k in range(20):
        step, residual = torch.randn(2, 30, generator=draw, dtype=DOUBLE)
        difference, learnt = hessian @ step, k % 5 != 3
        products = {
            "step_step": step @ step,
            "step_difference": step @ difference,
            "difference_difference": difference @ difference,
            "step_residual": step @ residual,
            "difference_residual": difference @ residual,
        }
        zeros = dict.fromkeys(Evaluation._fields, 0.0)
        found = Evaluation(**zeros | {name: float(each) for name, each in products.items()})
        slot, before = alone.slot, slots.clone()
        one = alone.after(
            found._replace(
                remembered_differences=(before @ difference).tolist(),
                remembered_residual=(before @ residual).tolist(),
            ),
            learnt,
            1e-9,
        )
        assert (one.learnt, slot) == (learnt, int(together.slot))
        if learnt:
            slots[slot], slots[slot + MEMORY] = step, difference
        flag = torch.tensor([learnt])
        together.learn(flag, *(slots @ difference)[None].chunk(2, 1))
        expected = together.direction(*(slots @ residual)[None].chunk(2, 1))
        assert one.scale == pytest.approx(float(expected.scale), rel=1e-10)
        direction = slots.T @ torch.tensor(one.weights, dtype=DOUBLE)
        torch.testing.assert_close(direction, slots.T @ expected.weights[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("extreme", [math.inf, 1e308])
def test_numbers_that_overflow_have_no_direction(extreme: float) -> None:
    """As tensors they would be infinite, or NaN: nothing is raised."""
    memory = Memory(MEMORY)
    found = Evaluation(*[1.0] * 16, [0.0] * 2 * MEMORY, [0.0] * 2 * MEMORY)
    found = found._replace(mean_step=0.0, mean_difference=0.0, mean_residual=0.0)
    assert memory.after(found, True, 0.0).learnt
    products = [extreme, -extreme] * MEMORY
    found = found._replace(remembered_differences=products, remembered_residual=products)
    found = found._replace(step_difference=extreme, step_residual=extreme)
    memory.after(found, True, 0.0)
    found = memory.after(found, True, 0.0)
    assert not all(map(math.isfinite, (found.scale, *found.weights)))


def test_nothing_remembered_has_no_direction() -> None:
    found = Evaluation(*[0.0] * 16, [0.0] * 2 * MEMORY, [0.0] * 2 * MEMORY)
    assert math.isnan(Memory(MEMORY).after(found, False, 0.0).scale)
