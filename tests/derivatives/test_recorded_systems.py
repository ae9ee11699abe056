"""Linear systems in Triton that are solved one after another, recorded on a GPU."""

from __future__ import annotations

import pytest
import reference
import torch
from labelled_costs import cost_between, dense_labelled_cost
from torch import Tensor

from otdd_flash.derivatives import plan_system
from otdd_flash.derivatives.plan_system import CGOptions, PlanSystem, Solution
from otdd_flash.engine import conjugate_gradients_kernels
from otdd_flash.engine.conjugate_gradients import Limits, Near
from otdd_flash.engine.conjugate_gradients_kernels import KernelIterates
from otdd_flash.operators import triton_plans
from otdd_flash.operators.triton_operator import KernelOperator

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIONS = CGOptions(1e-4)


@pytest.fixture(params=["held", "fused"], autouse=True)
def _held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the plan in float16 is held, or evaluated anew."""
    monkeypatch.setattr(triton_plans, "KEPT_BYTES", 0)
    monkeypatch.setattr(triton_plans, "FEW_COORDINATES", 0)
    if request.param == "fused":
        monkeypatch.setattr(triton_plans, "holds", lambda *_: False)


def solver(n: int, m: int, *, own: bool) -> PlanSystem:
    """Of a plan whose rows sum to about their masses; labelled points."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, 5, generator=draw).to(DEVICE) for size in (n, m))
    one, other = (torch.arange(size, device=DEVICE) % 2 for size in (n, m))
    if own:
        y, other = x, one
    costs = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64, device=DEVICE)
    cost = cost_between(x, y, labels_x=one, labels_y=other, class_costs=costs)
    dense = dense_labelled_cost(cost)
    g = torch.zeros_like(cost.b)
    for _ in range(30):
        f = reference.softmin_rows(dense, cost.b, g, 1.0)
        updated = reference.softmin_rows(dense.T, cost.a, f, 1.0)
        g = (f + updated) / 2 if own else updated
    plan = KernelOperator(cost, "high").plan(g if own else f, None if own else g, 1.0).prepared
    return PlanSystem(plan, OPTIONS, plan.quick, symmetric=own)


def right_sides(m: int, count: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(m, count, generator=draw, dtype=torch.float64) / m).to(DEVICE)


def agree(found: Solution, expected: Solution) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_step_leaves_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a recorded one must, on which the host has no more say."""
    near = solver(40, 30, own=False)._rounded
    iterates = KernelIterates(near.metric, Limits(1e-9, 100), (30, 2))
    iterates.begin(right_sides(30, 2, 1), Near(near))
    iterates.step()

    def refuse(tensor: Tensor) -> None:
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patched:
        for name in ("__float__", "__bool__", "item", "tolist"):
            patched.setattr(torch.Tensor, name, refuse)
        iterates.step()
    assert iterates.iterations.tolist() == [2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("count", "patience"), [(1, 2), (7, 2), (7, plan_system.PATIENCE)])
def test_recorded_solves_are_those_that_are_not(
    own: bool, count: int, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, on whichever stream; a later solve replays what an earlier one recorded.

    Preconditioned or not.
    """
    monkeypatch.setattr(plan_system, "PATIENCE", patience)
    (n, m) = (900, 900 if own else 700)
    recorded, plain = solver(n, m, own=own), solver(n, m, own=own)
    for seed in range(6):
        right = right_sides(m, count, seed)
        found = recorded.solve(right)
        with monkeypatch.context() as patched:
            patched.setattr(conjugate_gradients_kernels, "RECORDED_ROWS", 0)
            agree(found, plain.solve(right))
    iterates = recorded._iterates
    assert isinstance(iterates, KernelIterates)
    graphs = [key for key, repeated in iterates._repeated.items() if repeated._graph is not None]
    assert graphs[0][1] == (not own and patience == 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        elsewhere = recorded.solve(right)
    torch.cuda.current_stream().wait_stream(stream)
    agree(elsewhere, found)
