"""Iterations of a few problems in floats take the decisions that tensors take of many."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from otdd_flash.engine.problems import numbers_of
from otdd_flash.formulas import operations
from otdd_flash.formulas.decision import (
    CROSS,
    SELF,
    Form,
    Goal,
    Levels,
    Progress,
    State,
    Trust,
    decide,
)
from otdd_flash.formulas.differences import OneMemory, advance, empty_memory
from otdd_flash.formulas.evidence import Evaluation, PassErrors, Products, at_least, at_most
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
    return State(1 + whole(41), levels, trust, progress), Evaluation(
        *numbers, dual, dual, numbers[10]
    )


EXTREMES = (-math.inf, -2.5, -0.0, 0.0, 1e-300, 0.5, 800.0, math.inf, math.nan)
OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": lambda one, _: operations.abs(one),
    "log": lambda one, _: operations.log(one),
    "exp": lambda one, _: operations.exp(one),
    "sqrt": lambda one, _: operations.sqrt(one),
    "where": lambda one, two: operations.where(one > two, one, two),
    "at_least": at_least,
    "at_most": at_most,
    "bounded": lambda one, _: at_most(at_least(one, -1.0), 2.0),
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


def each_of(found: Evaluation, change: Callable[[Tensor], Any]) -> Evaluation:
    """An evaluation with every tensor changed."""
    return Evaluation(
        *(Products(*map(change, of)) if isinstance(of, Products) else change(of) for of in found)
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
    together = flat(decide(GOAL, numbers_of(of_all), state, found, form.symmetric))
    given = torch.stack([*flat(state), *found], 1).tolist()
    alone = []
    for row in given:
        iterations, *numbers = row[:15]
        parts = Levels(*numbers[:5]), Trust(*numbers[5:11]), Progress(*numbers[11:14])
        one = State(iterations, *parts), Evaluation(*row[15:])
        alone.append(flat(decide(GOAL, numbers_of(costs), *one, form.symmetric)))
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
    alone, together = OneMemory(MEMORY), empty_memory(torch.zeros(1, dtype=DOUBLE), MEMORY)
    numbers = torch.arange(MEMORY)[None]
    for k in range(20):
        step, residual = torch.randn(2, 30, generator=draw, dtype=DOUBLE)
        difference, learnt = hessian @ step, k % 5 != 3
        scalars = {
            "mean_step": step.mean(),
            "mean_difference": difference.mean(),
            "mean_residual": residual.mean(),
            "step_step": step @ step / 30,
            "step_difference": step @ difference / 30,
            "difference_difference": difference @ difference / 30,
            "step_residual": step @ residual / 30,
            "difference_residual": difference @ residual / 30,
        }
        none = torch.zeros((), dtype=DOUBLE)
        products = [Products(*(slots @ each / 30).chunk(2)) for each in (difference, residual)]
        found = Evaluation(*[none] * 16, *products, none)._replace(**scalars)
        of_all, of_one = each_of(found, lambda of: of[None]), each_of(found, Tensor.tolist)
        slot = alone.slot
        assert slot == int(together.slot)
        one = alone.advance(of_one, learnt, False, 1e-9, 0.25)
        flag, plain = torch.tensor([learnt]), torch.tensor([False])
        together, all_ = advance(together, numbers, of_all, flag, plain, 1e-9, 0.25)
        assert one.learnt == bool(all_.learnt) == learnt
        if learnt:
            slots[slot] = step - step.mean()
            slots[slot + MEMORY] = difference - difference.mean()
        assert one.scale == pytest.approx(float(all_.scale), rel=1e-10)
        assert one.shift == pytest.approx(float(all_.shift), rel=1e-10)
        direction = slots.T @ torch.tensor(one.weights, dtype=DOUBLE)
        expected = slots.T @ torch.cat(all_.weights, 1)[0]
        torch.testing.assert_close(direction, expected, rtol=1e-8, atol=1e-8)


ZEROS = Products([0.0] * MEMORY, [0.0] * MEMORY)


@pytest.mark.parametrize("extreme", [math.inf, 1e308])
def test_numbers_that_overflow_have_no_direction(extreme: float) -> None:
    """As tensors they would be infinite, or NaN: nothing is raised, and a plain update follows."""
    memory = OneMemory(MEMORY)
    found = Evaluation(*[1.0] * 16, *[ZEROS] * 2, 0.0)
    found = found._replace(mean_step=0.0, mean_difference=0.0, mean_residual=0.0)
    step = memory.advance(found, True, False, 0.0, 0.25)
    assert step.learnt
    assert (step.scale, any(step.weights)) == (1.0, True)
    products = Products(*[[extreme, -extreme] * (MEMORY // 2)] * 2)
    found = found._replace(remembered_differences=products, remembered_residual=products)
    found = found._replace(step_difference=extreme, step_residual=extreme)
    memory.advance(found, True, False, 0.0, 0.25)
    step = memory.advance(found, True, False, 0.0, 0.25)
    assert (step.scale, step.shift, step.weights) == (0.25, 0.0, [])


def test_nothing_remembered_has_no_direction() -> None:
    found = Evaluation(*[0.0] * 16, *[ZEROS] * 2, 0.0)
    assert OneMemory(MEMORY).advance(found, False, False, 0.0, 0.25)[1:] == (0.25, 0.0, [])
