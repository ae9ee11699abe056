"""Derivatives that are asked for later refuse inputs that changed in place meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from derivative_cases import DEVICE, drawn
from pairwise import named, pairwise
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import InputError

CHANGED = "^an input was changed in place after the .*; clone it before$"
Given = dict[str, Tensor]


def counted(given: Tensor) -> None:
    with torch.no_grad():
        given += 1


def uncounted(given: Tensor) -> None:
    given.data += 1


def by_numpy(given: Tensor) -> None:
    given.detach().numpy()[:] += 1


# On a GPU torch's own count of changes is all there is.
CHANGES = {"counted": counted}
if DEVICE == "cpu":
    CHANGES |= {"uncounted": uncounted, "by numpy": by_numpy}


def parts() -> Given:
    table = drawn(4, 2, seed=3)
    found = {
        "x": drawn(9, 3),
        "y": drawn(7, 3, seed=1),
        "a": torch.full((9,), 1 / 9, dtype=torch.float64),
        "labels_x": torch.arange(9) % 2,
        "labels_y": torch.arange(7) % 2,
        "class_table": torch.cdist(table, table).square(),
        "values": drawn(7, 2, seed=2),
        "costs": drawn(5, 6).square(),
    }
    return {key: part.to(DEVICE) for key, part in found.items()}


def cloud_inputs(given: Given) -> Given:
    return {key: part for key, part in given.items() if key not in ("values", "costs")}


def of_a_hessian(given: Given, *, asked: bool) -> Callable[[], object]:
    hessian = otdd.sinkhorn_hessian(**cloud_inputs(given), epsilon=2.0)
    if asked:
        hessian.product(given["x"])
    return lambda: hessian.product(drawn(9, 3).to(DEVICE))


def of_a_second_pass(given: Given) -> Callable[[], object]:
    x = given["x"].requires_grad_()
    loss = otdd.sinkhorn_loss(**cloud_inputs(given), epsilon=2.0)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return lambda: torch.autograd.grad(gradient.sum(), x)


def of_clouds(function: Any, given: Given, *more: str) -> Callable[[], object]:
    given["x"].requires_grad_()
    found = function(
        **cloud_inputs(given), **{key: given[key].requires_grad_() for key in more}, epsilon=2.0
    )
    return (found if isinstance(found, Tensor) else found[0]).sum().backward


def of_costs(function: Any, given: Given) -> Callable[[], object]:
    return function(given["costs"].requires_grad_(), epsilon=1.0).sum().backward


ASKED: dict[str, Callable[[Given], Callable[[], object]]] = {
    "product": lambda given: of_a_hessian(given, asked=False),
    "second product": lambda given: of_a_hessian(given, asked=True),
    "second pass": of_a_second_pass,
    "map": lambda given: of_clouds(otdd.transport_map, given),
    "potentials": lambda given: of_clouds(otdd.sinkhorn_potentials, given),
}
OF_ONE_INPUT: dict[str, tuple[str, Callable[[Given], Callable[[], object]]]] = {
    "map of values": ("values", lambda given: of_clouds(otdd.transport_map, given, "values")),
    "loss of a matrix": ("costs", lambda given: of_costs(otdd.matrix_loss, given)),
    "plan of a matrix": ("costs", lambda given: of_costs(otdd.matrix_plan, given)),
}


def assert_refused(
    ask: Callable[[Given], Callable[[], object]], key: str, change: Callable[[Tensor], object]
) -> None:
    given = parts()
    derivative = ask(given)
    change(given[key])
    with pytest.raises(InputError, match=CHANGED):
        derivative()


@pytest.mark.slow(after=10)
@pairwise(
    ask=named(ASKED),
    key=["x", "y", "a", "class_table", "labels_x", "labels_y"],
    change=named(CHANGES),
)
def test_of_clouds(ask: Any, key: str, change: Callable[[Tensor], object]) -> None:
    assert_refused(ask, key, change)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("key", "ask"), OF_ONE_INPUT.values(), ids=OF_ONE_INPUT)
def test_of_one_input(key: str, ask: Any, change: Callable[[Tensor], object]) -> None:
    assert_refused(ask, key, change)


def test_points_of_an_array() -> None:
    array = np.random.default_rng(0).normal(size=(9, 3))
    hessian = otdd.sinkhorn_hessian(torch.from_numpy(array), drawn(7, 3, seed=1), epsilon=2.0)
    array += 1
    with pytest.raises(InputError, match=CHANGED):
        hessian.product(drawn(9, 3))


def test_what_was_copied_may_change() -> None:
    """Points in half types are computed in float32, of which a copy is made."""
    x, y, v = (drawn(9, 3, seed=seed).to(DEVICE).bfloat16() for seed in range(3))
    hessian = otdd.sinkhorn_hessian(x, y, epsilon=2.0)
    expected = hessian.product(v).values
    x += 1
    assert torch.equal(hessian.product(v).values, expected)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inference_tensors(dtype: torch.dtype) -> None:
    """They have no count of changes."""
    with torch.inference_mode():
        x, y, v = (drawn(9, 3, seed=seed).to(DEVICE, dtype) for seed in range(3))
        found = otdd.sinkhorn_hessian(x, y, epsilon=2.0).product(v).values
    copies = x.clone(), y.clone()
    expected = otdd.sinkhorn_hessian(*copies, epsilon=2.0).product(v.clone()).values
    assert torch.equal(found, expected)
    assert torch.equal(otdd.sinkhorn_hessian(x, y, epsilon=2.0).product(v).values, expected)
    moving = copies[0].requires_grad_()
    loss = otdd.sinkhorn_loss(moving, y, epsilon=2.0)
    (gradient,) = torch.autograd.grad(loss, moving, create_graph=True)
    results = gradient, otdd.transport_map(moving, y, epsilon=2.0)
    for result in (*results, otdd.sinkhorn_potentials(moving, y, epsilon=2.0)[0]):
        (by_inference,) = torch.autograd.grad(result.sum(), moving)
        assert bool(by_inference.isfinite().all())
