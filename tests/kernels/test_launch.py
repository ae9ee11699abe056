"""Kernels run where their tensors are, and every kernel that is launched sees to it."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.kernels import launch
from otdd_flash.kernels.launch import on_device, on_its_device

KERNELS = Path(launch.__file__).resolve().parent


def test_every_kernel_that_is_launched_runs_on_its_device() -> None:
    trees = [ast.parse(path.read_text()) for path in KERNELS.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    launched = {
        node.func.value.id
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }
    guarded = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each) == "on_its_device" for each in node.decorator_list)
    }
    # `kernels.attention.launch` is given kernels by that name.
    imports = [
        node
        for path in (Path(otdd.__file__).parent / "attention").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    given = {name.name for node in imports for name in node.names if name.asname == "kernel"}
    assert len(launched) > 30
    assert len(given) == 3
    assert launched - {"kernel"} | given == guarded


class _Kernel:
    """In place of one of Triton's: it knows which device was current at its launch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(CURRENT[-1])


CURRENT = [0]


@contextmanager
def _device(index: int) -> Any:
    CURRENT.append(index)
    yield
    CURRENT.pop()


class _Elsewhere(torch.Tensor):
    """A tensor of the second device, as far as a launch can see."""

    is_cuda = True

    def get_device(self) -> int:
        return 1


def test_the_device_of_the_first_tensor_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", _device)
    monkeypatch.setattr(launch, "several_devices", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CURRENT[-1])
    kernel = on_its_device(_Kernel())
    there = torch.zeros(1).as_subclass(_Elsewhere)
    kernel.run(3, there, grid=(1,))
    kernel.run(SimpleNamespace(base=there), grid=(1,))
    kernel.run(torch.zeros(1), there, grid=(1,))
    assert kernel.seen == [1, 1, 0]
    assert CURRENT == [0]


def test_an_epsilon_that_is_there_is_read_where_it_is() -> None:
    """A recorded launch reads the level that is written there next."""
    epsilon = torch.tensor(0.3, dtype=torch.float64)
    assert on_device(epsilon, epsilon.device) is epsilon


@pytest.mark.gpu
def test_the_second_device_is_as_good_as_the_first() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    draw = torch.Generator().manual_seed(0)
    # Small ones are solved in recorded pieces, large ones pass by pass.
    for count in (300, 9000):
        labels, found = torch.randint(0, 3, (count,), generator=draw), []
        sides = [
            otdd.LabeledSamples(
                torch.randn(count, 40, generator=draw) + shift, labels, tuple("abc")
            )
            for shift in (0.0, 0.5)
        ]
        for device in ("cuda:0", "cuda:1"):
            compute = otdd.ComputeOptions(device)
            result = otdd.dataset_distance(*sides, compute=compute)
            assert result.potentials[0].get_device() == int(device[-1])
            flow = otdd.gradient_flow(*sides, otdd.Flow(steps=1), compute=compute)
            points = sides[0].features.to(device).requires_grad_()
            otdd.sinkhorn_loss(points, sides[1].features.to(device), epsilon=1.0).backward()
            coupled, moved = float(result.class_coupling().sum()), float(points.grad.norm())
            found.append([result.value, coupled, flow.to_dict()["value"], moved])
        assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert torch.cuda.current_device() == 0
