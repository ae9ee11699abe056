"""Derivatives that are asked for later refuse inputs that changed in place meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from derivative_cases import DEVICE, drawn
from pairwise import named, pairwise
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import InputError

CHANGED = "^an input was changed in place after the .*; clone it before$"


def counted(given: Tensor) -> None:
    with torch.no_grad():
        given += 1


def uncounted(given: Tensor) -> None:
    given.data += 1


def by_numpy(given: Tensor) -> None:
    given.detach().numpy()[:] += 1


CHANGES = {"counted": counted, "uncounted": uncounted, "by numpy": by_numpy}
if DEVICE == "cuda":
    # Torch's own count of changes is all there is.
    CHANGES = {"counted": counted}


def parts() -> dict[str, Tensor]:
    table = drawn(4, 2, seed=3)
    found = {
        "x": drawn(9, 3),
        "y": drawn(7, 3, seed=1),
        "a": torch.full((9,), 1 / 9, dtype=torch.float64),
        "labels_x": torch.arange(9) % 2,
        "labels_y": torch.arange(7) % 2,
        "class_table": torch.cdist(table, table).square(),
    }
    return {key: part.to(DEVICE) for key, part in found.items()}


def derivative(of: str, **given: Tensor) -> Callable[[], object]:
    """What computes it later."""
    if of.endswith("product"):
        hessian = otdd.sinkhorn_hessian(**given, epsilon=2.0)
        if of == "second product":
            hessian.product(given["x"])
        return lambda: hessian.product(drawn(9, 3).to(DEVICE))
    for key in {"x", "values", "costs"} & given.keys():
        given[key].requires_grad_()
    found = getattr(otdd, of)(**given, epsilon=2.0)
    if of == "sinkhorn_loss":
        (gradient,) = torch.autograd.grad(found, given["x"], create_graph=True)
        return lambda: torch.autograd.grad(gradient.sum(), given["x"])
    return (found if isinstance(found, Tensor) else found[0]).sum().backward


@pytest.mark.slow(after=10)
@pairwise(
    of=["product", "second product", "sinkhorn_loss", "transport_map", "sinkhorn_potentials"],
    key=["x", "y", "a", "class_table", "labels_x", "labels_y"],
    change=named(CHANGES),
)
def test_inputs_of_clouds(of: str, key: str, change: Callable[[Tensor], object]) -> None:
    given = parts()
    later = derivative(of, **given)
    change(given[key])
    with pytest.raises(InputError, match=CHANGED):
        later()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inference_tensors(dtype: torch.dtype) -> None:
    """They have no count of changes."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        return otdd.sinkhorn_hessian(x, y, epsilon=2.0, debias=False).product(v).values

    with torch.inference_mode():
        x, y, v = (drawn(9, 3, seed=seed).to(DEVICE, dtype) for seed in range(3))
        found = product(x, y)
    v, moving = v.clone(), x.clone()
    assert torch.equal(found, product(moving, y.clone()))
    assert torch.equal(found, product(x, y))
    moving.requires_grad_()
    settings: dict[str, Any] = {"epsilon": 2.0}
    loss = otdd.sinkhorn_loss(moving, y, **settings)
    (gradient,) = torch.autograd.grad(loss, moving, create_graph=True)
    results = gradient, otdd.transport_map(moving, y, **settings)
    for result in (*results, otdd.sinkhorn_potentials(moving, y, **settings)[0]):
        (by_inference,) = torch.autograd.grad(result.sum(), moving)
        assert bool(by_inference.isfinite().all())
