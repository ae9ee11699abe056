"""Derivatives that are asked for later refuse inputs that changed in place meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import InputError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHANGED = "^an input was changed in place after the .*; clone it before$"
Change = Callable[[Tensor], object]


def drawn(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(device)


def counted(given: Tensor) -> None:
    with torch.no_grad():
        given += 1


def uncounted(given: Tensor) -> None:
    given.data += 1


def by_numpy(given: Tensor) -> None:
    given.detach().numpy()[:] += 1


# On a GPU torch's own count of changes is all there is.
CHANGES = [
    counted,
    *(pytest.param(one, marks=pytest.mark.skipif(DEVICE == "cuda", reason="not counted"))
      for one in (uncounted, by_numpy)),
]  # fmt: skip


def labelled(n: int, m: int) -> dict[str, Tensor]:
    of_x, of_y = (torch.arange(size, device=DEVICE) % 2 for size in (n, m))
    table = drawn(4, 2, seed=3, device=DEVICE)
    return {
        "labels_x": of_x,
        "labels_y": of_y,
        "class_table": torch.cdist(table, table).square(),
    }


def parts() -> dict[str, Tensor]:
    given = {"x": drawn(9, 3, device=DEVICE), "y": drawn(7, 3, seed=1, device=DEVICE)}
    given |= {"a": torch.full((9,), 1 / 9, dtype=torch.float64, device=DEVICE)}
    return given | labelled(9, 7)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("key", ["x", "y", "a", "class_table", "labels_x"])
def test_products_with_a_hessian(key: str, change: Change) -> None:
    """After a product was asked for, and before."""
    given = parts()
    for asked in (False, True):
        hessian, v = otdd.sinkhorn_hessian(**given, epsilon=1.0), drawn(9, 3, device=DEVICE)
        if asked:
            hessian.product(v)
        kept = given[key].clone()
        change(given[key])
        with pytest.raises(InputError, match=CHANGED):
            hessian.product(v)
        given[key].data.copy_(kept)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("key", ["x", "y", "a", "class_table", "labels_y"])
def test_second_passes_of_autograd(key: str, change: Change) -> None:
    given = parts()
    given["x"].requires_grad_()
    loss = otdd.sinkhorn_loss(**given, epsilon=1.0)
    (gradient,) = torch.autograd.grad(loss, given["x"], create_graph=True)
    change(given[key])
    with pytest.raises(InputError, match=CHANGED):
        torch.autograd.grad(gradient.sum(), given["x"])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("key", ["x", "y", "a", "class_table", "labels_x"])
@pytest.mark.parametrize("function", [otdd.transport_map, otdd.sinkhorn_potentials])
def test_gradients_of_solved_plans(
    function: Callable[..., Tensor | tuple[Tensor, Tensor]], key: str, change: Change
) -> None:
    given = parts()
    given["x"].requires_grad_()
    found = function(**given, epsilon=1.0)
    result = found if isinstance(found, Tensor) else found[0]
    change(given[key])
    with pytest.raises(InputError, match=CHANGED):
        result.sum().backward()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("function", [otdd.matrix_loss, otdd.matrix_plan])
def test_gradients_by_costs(function: Callable[..., Tensor], change: Change) -> None:
    costs = drawn(5, 6, device=DEVICE).square().requires_grad_()
    result = function(costs, epsilon=1.0)
    change(costs)
    with pytest.raises(InputError, match=CHANGED):
        result.sum().backward()


def test_points_of_an_array() -> None:
    array = np.random.default_rng(0).normal(size=(9, 3))
    hessian = otdd.sinkhorn_hessian(torch.from_numpy(array), drawn(7, 3, seed=1), epsilon=1.0)
    array += 1
    with pytest.raises(InputError, match=CHANGED):
        hessian.product(drawn(9, 3))


def test_what_was_copied_may_change() -> None:
    """Points in half types are computed in float32, of which a copy is made."""
    x, y, v = (drawn(9, 3, seed=seed, device=DEVICE).bfloat16() for seed in range(3))
    hessian = otdd.sinkhorn_hessian(x, y, epsilon=1.0)
    expected = hessian.product(v).values
    x += 1
    assert torch.equal(hessian.product(v).values, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inference_tensors(dtype: torch.dtype) -> None:
    """They have no count of changes."""
    with torch.inference_mode():
        x, y, v = (drawn(9, 3, seed=seed, device=DEVICE).to(dtype) for seed in range(3))
        found = otdd.sinkhorn_hessian(x, y, epsilon=1.0).product(v).values
    again = otdd.sinkhorn_hessian(x, y, epsilon=1.0).product(v).values
    copies = x.clone(), y.clone()
    expected = otdd.sinkhorn_hessian(*copies, epsilon=1.0).product(v.clone()).values
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)
    moving = copies[0].requires_grad_()
    loss = otdd.sinkhorn_loss(moving, y, epsilon=1.0)
    (gradient,) = torch.autograd.grad(loss, moving, create_graph=True)
    torch.autograd.grad(gradient.sum(), moving)
    for result in (otdd.transport_map(moving, y, epsilon=1.0),
                   otdd.sinkhorn_potentials(moving, y, epsilon=1.0)[0]):  # fmt: skip
        (by_inference,) = torch.autograd.grad(result.sum(), moving)
        assert bool(by_inference.isfinite().all())
