"""Plans that are made of small clouds alone, and how little a backward pass then asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from derivative_cases import DEVICE, EPSILON, clouds, drawn, quiet
from live_bytes import peak
from operation_counts import Calls
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.derivatives import plan_points, plan_system
from otdd_flash.derivatives.plan_system import CGOptions, dense_plan
from otdd_flash.operators import comparison
from otdd_flash.operators.base import StoredPlan
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.schedules import Converged


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="counts what a CPU allocates")
def test_a_plan_takes_no_more_than_was_counted() -> None:
    """Where points are many times as large as it."""
    (n, m), dim = (40, 30), 2000
    given = Comparison.between(drawn(n, dim).float(), drawn(m, dim).float(), EPSILON)
    f, g = torch.zeros(n, dtype=torch.float64), torch.zeros(m, dtype=torch.float64)
    entries, points = 8 * n * m, 12 * (n + m) * dim
    highest = peak(lambda: dense_plan(given, "xy", f, g), torch.device(DEVICE))
    # Vectors of either side, and of the dimension.
    assert points <= highest <= points + 2 * entries + 64 * (n + m + dim)


@pytest.mark.parametrize("short", [True, False])
def test_a_plan_that_memory_or_a_budget_does_not_hold_is_not_made(
    short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = drawn(40, 3).float(), drawn(30, 3).float()
    f, g = torch.zeros(40, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
    needed = 8 * 40 * 30 + 12 * (40 + 30) * 3
    budget = {"memory_budget": needed - short}
    given = Comparison.between(x, y, EPSILON, compute=ComputeOptions("cpu", **budget))
    assert (dense_plan(given, "xy", f, g) is None) == short
    given = Comparison.between(x, y, EPSILON)
    monkeypatch.setattr(plan_system, "holds", lambda *_: not short)
    assert (dense_plan(given, "xy", f, g) is None) == short


def test_no_operator_is_built_for_points_of_a_small_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("an operator takes longer than the plan")

    monkeypatch.setattr(comparison, "build_operator", never)
    given = Comparison.between(drawn(40, 3).float(), drawn(30, 3).float(), EPSILON)
    potentials = (torch.zeros(size, dtype=torch.float64, device=DEVICE) for size in (40, 30))
    found = plan_points.plan_points(given, "xy", tuple(potentials))
    assert isinstance(found.plan, StoredPlan)


@pytest.mark.parametrize(
    ("function", "most", "backend"),
    [
        ("sinkhorn_potentials", 160, "torch"),
        ("transport_map", 190, "torch"),
        pytest.param("transport_map", 190, "triton", marks=pytest.mark.slow),
    ],
)
def test_a_backward_pass_asks_for_little(
    function: str, most: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator is built, and nothing repeats; the gradient is that of many points' way."""
    x, y = (points.float().to(DEVICE) for points in clouds(300, 300, 20))
    x.requires_grad_()
    compute = ComputeOptions(DEVICE, backend=backend, precision="high")
    settings = {"epsilon": 2.0, "options": Converged(1e-3), "compute": compute}
    result = quiet(getattr(otdd, function), x, y, cg=CGOptions(), **settings)
    result = result if isinstance(result, Tensor) else result[0]
    cotangent = drawn(*result.shape).to(result)
    with Calls() as calls:
        (found,) = torch.autograd.grad(result, x, cotangent, retain_graph=True)
    assert calls.by_name.total() <= most
    assert calls.by_name["_local_scalar_dense"] <= 2
    monkeypatch.setattr(plan_system, "MOST_POINTS", 0)
    (expected,) = torch.autograd.grad(result, x, cotangent)
    assert float((found - expected).norm() / expected.norm()) <= 1e-4
