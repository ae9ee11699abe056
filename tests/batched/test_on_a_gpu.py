"""Kernels of small matrices on a GPU, against the same in float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import otdd_flash as otdd

pytestmark = pytest.mark.gpu

UNIT = 2.0**-24


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 63, 1000])
@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize("n", [2, 3, 4, 8, 16, 33, 64, 128])
def test_matrices_and_their_gradients(n: int, spread: float, count: int) -> None:
    count = min(count, 2**20 // n**2)
    logits, cotangents = spread * drawn(count, n, n), drawn(count, n, n, seed=1)

    def both(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
        leaf = logits.to(device, dtype).requires_grad_()
        found = otdd.doubly_stochastic(leaf)
        (gradient,) = torch.autograd.grad(found, leaf, cotangents.to(device, dtype))
        return found.detach().cpu().double(), gradient.cpu().double()

    (mine, gradient), (true, slope) = both(torch.float32, "cuda"), both(torch.float64, "cpu")
    extent = logits.amax((1, 2), keepdim=True) - logits.amin((1, 2), keepdim=True)
    near = (mine - true).abs() <= 16 * UNIT * (1 + extent.double()) * true
    assert (near | (true < 2.0**-126)).all()
    wide = 1 + float(extent.max())
    assert (gradient - slope).abs().max() <= 64 * UNIT * wide * slope.abs().max() + 2.0**-126


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (16, 16), (64, 33), (128, 128)])
def test_plans_and_their_gradients(shape: tuple[int, int], gradient: str) -> None:
    n, m = shape
    costs = drawn(20, n, m).abs()
    sizes = torch.tensor([[n, m], [max(1, n - 1), max(1, m // 2)]] * 10)
    epsilon = torch.linspace(0.2, 1, 20)

    def both(dtype: torch.dtype, device: str) -> list[Tensor]:
        leaf = costs.to(device, dtype).requires_grad_()
        found = otdd.sinkhorn_plans(
            leaf, epsilon=epsilon.to(device, dtype), sizes=sizes.to(device), gradient=gradient,
            tolerance=1e-5,
        )  # fmt: skip
        (slope,) = torch.autograd.grad(
            (found.plans * leaf.detach()).sum() + found.value.sum(), leaf
        )
        assert found.converged.all()
        return [part.detach().cpu().double() for part in (found.plans, found.f, found.g, slope)]

    for mine, true in zip(both(torch.float32, "cuda"), both(torch.float64, "cpu"), strict=True):
        assert torch.allclose(mine, true, rtol=1e-3, atol=2e-5 * float(true.abs().max()))


@pytest.mark.parametrize("n", [4, 16])
def test_graphs_are_captured(n: int) -> None:
    logits = drawn(100, n, n).cuda().requires_grad_()

    def step() -> Tensor:
        found = otdd.doubly_stochastic(logits)
        return torch.autograd.grad(found, logits, torch.ones_like(found))[0]

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("n", [4, 64])
def test_memory_is_the_input_and_the_output(n: int) -> None:
    logits = drawn(2**22 // n**2, n, n).cuda().requires_grad_()
    otdd.doubly_stochastic(logits).sum().backward()
    logits.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = otdd.doubly_stochastic(logits)
    assert torch.cuda.max_memory_allocated() - before <= logits.nbytes + 2**21
    found.sum().backward()
    # Result, cotangent and gradient.
    assert torch.cuda.max_memory_allocated() - before <= 3 * logits.nbytes + 2**21


def test_offsets_beyond_32_bits() -> None:
    count = 2**27 + 3
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("20 GiB of memory are not free")
    logits = torch.zeros(count, 4, 4, dtype=torch.float16, device="cuda")
    logits[-100:] = drawn(100, 4, 4).half().cuda()
    found = otdd.doubly_stochastic(logits, gradient="none")
    assert torch.equal(found[-100:], otdd.doubly_stochastic(logits[-100:], gradient="none"))
    assert (found[:100] == 0.25).all()
