"""What derivatives of solved plans hold on a GPU beside their inputs, where no plan is held."""

from __future__ import annotations

import pytest
import torch
from live_bytes import peak
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.operators import triton_plans

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
# A block of the plan, what products of blocks need and what libraries keep.
CONSTANT = 256 << 20


@pytest.fixture(autouse=True)
def _no_plan_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plans, "holds", lambda *_: False)


def clouds(count: int, dim: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(count, dim, generator=draw).to(GPU) for _ in range(3))


def test_the_gradient_of_a_map_holds_few_copies_of_its_numbers() -> None:
    (count, dim), relative = (50_000, 64), 0.1
    x, y, cotangent = clouds(count, dim)
    x.requires_grad_()
    mapped = otdd.transport_map(x, y, epsilon=relative * dim)

    def gradient() -> Tensor:
        return torch.autograd.grad(mapped, x, cotangent, retain_graph=True)[0]

    gradient()
    numbers = 2 * count * (2 * dim + 3)
    assert peak(gradient, GPU) <= 3 * 4 * numbers + CONSTANT


@pytest.mark.parametrize(("debias", "copies"), [(False, 4), (True, 6)])
def test_products_with_a_hessian_hold_few_copies_of_the_points(debias: bool, copies: int) -> None:
    """In float32, beside the result: packed points of both clouds, images of y and the direction.

    Of a self term packed points, images of x and the direction, for which the first has gone.
    """
    (count, dim), relative = (30_000, 512), 0.1
    x, y, v = clouds(count, dim)
    hessian = otdd.sinkhorn_hessian(x, y, epsilon=relative * dim, debias=debias)
    hessian.product(v)
    hessian = otdd.sinkhorn_hessian(x, y, epsilon=relative * dim, debias=debias)
    assert peak(lambda: hessian.product(v), GPU) <= (copies + 1) * 4 * count * dim + CONSTANT
