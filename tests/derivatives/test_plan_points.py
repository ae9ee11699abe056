"""Second derivatives by points of many coordinates, which are multiplied as they are packed."""

from __future__ import annotations

import pytest
import torch
from derivative_cases import DEVICE, DenseHessian, drawn, labelled, masses
from live_bytes import LiveBytes
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.cost import points as cost_points
from otdd_flash.derivatives import plan_points
from otdd_flash.derivatives.plan_points import PackedPlanPoints
from otdd_flash.derivatives.plan_system import CGOptions
from otdd_flash.kernels.passes import plan_blocks
from otdd_flash.operators import triton_plans

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("iterations_alone")]
DIM = 136


@pytest.fixture(autouse=True)
def _several_blocks_of_a_streamed_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plans, "KEPT_BYTES", 0)
    monkeypatch.setattr(triton_plans, "holds", lambda *_: False)
    monkeypatch.setattr(plan_points, "LOOKED_AT", 1 << 14)
    monkeypatch.setattr(plan_blocks, "BLOCK_HEIGHT", 128)
    monkeypatch.setattr(plan_blocks, "BLOCK_WIDTH", 256)


def cloud(n: int, seed: int) -> Tensor:
    return (drawn(n, DIM, seed=seed) + 10 + seed / 5).float().to(DEVICE)


EXACT, BOTH, ROWS = (None, None), (30.0, 30.0), (20.0, None)


@pytest.mark.parametrize(
    ("debias", "both", "lambda_x", "unbalanced"),
    [
        *((False, True, 0.5, EXACT), (False, False, 1.0, EXACT), (True, False, 1.0, EXACT)),
        *((True, True, 0.5, BOTH), (True, False, 0.5, BOTH)),
        *((False, True, 0.5, ROWS), (False, False, 0.5, ROWS)),
    ],
)
def test_products_are_those_of_the_dense_inverse(
    debias: bool, both: bool, lambda_x: float, unbalanced: tuple[float | None, float | None]
) -> None:
    """Of x alone, or of both clouds, for two directions of different sizes."""
    x, y = cloud(140, 0), cloud(100, 1)
    v, w = torch.stack((cloud(140, 2), 1e-3 * cloud(140, 3))), torch.stack((cloud(100, 4),) * 2)
    a, options = masses(140, 0, zeros=True).to(DEVICE), labelled(140, 100)
    options |= {"lambda_x": lambda_x, "epsilon": 2.0 * DIM, "unbalanced": unbalanced}
    compute = otdd.ComputeOptions(DEVICE, backend="triton")
    given = {"debias": debias, "cg": CGOptions(1e-6), "compute": compute}
    found = otdd.sinkhorn_hessian(x, y, a, **options, **given)
    assert isinstance(found._curvature._cross._at, PackedPlanPoints)
    exact = DenseHessian(found.divergence.terms, x, y, a, **options)
    got = found._curvature.along(v, w if both else None)
    assert (got.y is None) == (not both)
    for k in range(2):
        by_x, by_y, energy = exact.along(v[k], w[k] if both else None)
        assert float((got.x[k] - by_x).norm()) <= 1e-5 * float(by_x.norm())
        if got.y is not None:
            assert float((got.y[k] - by_y).norm()) <= 1e-5 * float(by_y.norm())
        torch.testing.assert_close(got.curvature[k], energy, rtol=2e-5, atol=0)


@pytest.mark.parametrize(("debias", "copies"), [(False, 4), (True, 6)])
def test_few_copies_of_the_points_are_held(
    debias: bool, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32: packed points, images of y and the direction; of a self term three more, less it.

    Beside them the result, and for a block of a quarter of the rows what is found and made of it.
    """
    monkeypatch.setattr(cost_points, "CHUNK_ELEMENTS_CPU", 1 << 14)
    monkeypatch.setattr(cost_points, "CHUNK_ELEMENTS_GPU", 1 << 14)
    count, dim = 512, 256
    draw = torch.Generator().manual_seed(0)
    x, y, v = (torch.randn(count, dim, generator=draw).to(DEVICE) for _ in range(3))
    compute = otdd.ComputeOptions(DEVICE, backend="triton")
    options = {"options": otdd.Converged(0.5), "cg": CGOptions(0.3), "compute": compute}
    hessian = otdd.sinkhorn_hessian(x, y, epsilon=0.5 * dim, debias=debias, **options)
    with LiveBytes() as live:
        found = hessian.product(v)
    assert bool(found.converged)
    copy, inputs = 4 * count * dim, 3
    assert live.highest <= (inputs + copies + 1 + 2.5) * copy
