"""Second derivatives by points of many coordinates, which are multiplied as they are packed."""

from __future__ import annotations

import pytest
import reference
import torch
from live_bytes import LiveBytes
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import CGOptions
from otdd_flash.kernels.passes import plan_blocks
from otdd_flash.operators import float64_rows, kernel_plans
from otdd_flash.solver import directions
from otdd_flash.solver.packed_plan_points import PackedPlanPoints

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("iterations_alone")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIM, CLASSES = 136, 3


@pytest.fixture(autouse=True)
def _several_blocks_of_a_streamed_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_plans, "KEPT_BYTES", 0)
    monkeypatch.setattr(kernel_plans, "holds", lambda *_: False)
    monkeypatch.setattr(directions, "LOOKED_AT", 1 << 14)
    monkeypatch.setattr(plan_blocks, "BLOCK_HEIGHT", 128)
    monkeypatch.setattr(plan_blocks, "BLOCK_WIDTH", 256)


def cloud(n: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(n, DIM, generator=draw) + 10 + seed / 5).to(DEVICE)


@pytest.mark.parametrize(
    ("labels", "debias", "lambda_x"), [(False, True, 0.5), (True, False, 0.5), (True, True, 1.0)]
)
def test_products_are_those_of_the_dense_pseudo_inverse(
    labels: bool, debias: bool, lambda_x: float
) -> None:
    """Of x alone and of both clouds, for two directions of different sizes."""
    (n, m), epsilon = (140, 100), 0.1 * DIM
    x, y = cloud(n, 0), cloud(m, 1)
    v, w = torch.stack((cloud(n, 2), 1e-3 * cloud(n, 3))), torch.stack((cloud(m, 4), cloud(m, 5)))
    a = torch.rand(n, generator=torch.Generator().manual_seed(0)).double().to(DEVICE) + 0.1
    a[:: n // 3] = 0
    masses = {"x": a / a.sum(), "y": torch.full((m,), 1 / m, device=DEVICE).double()}
    of_labels = {name: torch.arange(len(b), device=DEVICE) % CLASSES for name, b in masses.items()}
    means = torch.randn(2 * CLASSES, 2, generator=torch.Generator().manual_seed(3)).double()
    table = 4 * torch.cdist(means, means).square().to(DEVICE) * labels
    found = otdd.sinkhorn_hessian(
        x,
        y,
        masses["x"],
        epsilon=epsilon,
        debias=debias,
        lambda_x=lambda_x,
        cg=CGOptions(1e-6),
        compute=otdd.ComputeOptions(str(DEVICE), backend="triton"),
        **{f"labels_{name}": numbers for name, numbers in of_labels.items()} if labels else {},
        **{"class_table": table, "class_totals": (CLASSES, CLASSES)} if labels else {},
    )
    assert isinstance(found._curvature._cross._at, PackedPlanPoints)
    points = {"x": x.double(), "y": y.double()}
    offset = {"x": 0, "y": CLASSES}

    def plan(name: str) -> Tensor:
        (one, other), term = name, found.divergence.terms[name]
        cost = reference.dense_cost(points[one], points[other], lambda_x)
        rows, columns = of_labels[one] + offset[one], of_labels[other] + offset[other]
        cost = cost + 0.5 * table[rows][:, columns]
        return reference.plan(cost, masses[one], masses[other], term.f, term.g, epsilon)

    plans = {name: plan(name) for name in found.divergence.terms}
    for along in ((v, None), (v, w)):
        got = found._curvature.along(*along)
        for k in range(2):
            of_x, of_y = v[k].double(), torch.zeros_like(points["y"])
            of_y = of_y if along[1] is None else along[1][k].double()
            given = (points["x"], points["y"]), (of_x, of_y), epsilon, lambda_x
            by_x, by_y = reference.hessian_product(plans["xy"], *given)
            if debias:
                own = reference.own_hessian_product
                by_x = by_x - own(plans["xx"], points["x"], of_x, epsilon, lambda_x) / 2
                by_y = by_y - own(plans["yy"], points["y"], of_y, epsilon, lambda_x) / 2
            energy = (of_x * by_x).sum()
            assert float((got.x[k] - by_x).norm()) <= 1e-5 * float(by_x.norm())
            if got.y is not None:
                energy = energy + (of_y * by_y).sum()
                assert float((got.y[k] - by_y).norm()) <= 1e-5 * float(by_y.norm())
            torch.testing.assert_close(got.curvature[k], energy, rtol=2e-5, atol=0)
        assert (got.y is None) == (along[1] is None)


def test_one_direction_for_all_points_moves_masses() -> None:
    """And the plan not at all, far from 0 as well."""
    x, y = cloud(140, 0) + 1e3, cloud(130, 1) + 1e3
    compute = otdd.ComputeOptions(str(DEVICE), backend="triton")
    found = otdd.sinkhorn_hessian(x, y, epsilon=0.1 * DIM, lambda_x=0.7, compute=compute)
    values = found.product(torch.full_like(x, 2.0)).values
    torch.testing.assert_close(values, torch.full_like(x, 1.4 * 2 / 140), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("debias", "copies"), [(False, 4), (True, 6)])
def test_few_copies_of_the_points_are_held(
    debias: bool, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32: packed points, images of y and the direction; of a self term three more, less it.

    Beside them the result, and for a block of a quarter of the rows what is found and made of it.
    """
    monkeypatch.setattr(float64_rows, "CHUNK_ELEMENTS_CPU", 1 << 14)
    monkeypatch.setattr(float64_rows, "CHUNK_ELEMENTS_GPU", 1 << 14)
    count, dim = 512, 256
    draw = torch.Generator().manual_seed(0)
    x, y, v = (torch.randn(count, dim, generator=draw).to(DEVICE) for _ in range(3))
    compute = otdd.ComputeOptions(str(DEVICE), backend="triton")
    options = {"options": otdd.Converged(1e-2), "cg": CGOptions(1e-3), "compute": compute}
    hessian = otdd.sinkhorn_hessian(x, y, epsilon=0.5 * dim, debias=debias, **options)
    with LiveBytes() as live:
        found = hessian.product(v)
    assert bool(found.converged)
    copy, inputs = 4 * count * dim, 3
    assert live.highest <= (inputs + copies + 1 + 2.5) * copy
