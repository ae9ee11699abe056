"""Solves of a matrix in kernels against the same in PyTorch, in the interpreter or on a GPU."""

from __future__ import annotations

import math

import matrix_cases as cases
import pytest
import torch

import otdd_flash as otdd

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = otdd.ComputeOptions(str(DEVICE), "triton")
EPSILON = 0.5


@pytest.mark.parametrize("entry", [math.nan, -math.inf])
def test_bad_entries_are_found_by_the_kernel(entry: float) -> None:
    costs = cases.random(33, 70, cases.generator(3)).float().to(DEVICE)
    costs[30, 65] = entry
    with pytest.raises(otdd.InputError, match=r"costs\[30, 65\] is"):
        otdd.matrix_transport(costs, epsilon=EPSILON, compute=TRITON)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "m"), [(256, 256), (3000, 2000), (12_000, 12_000)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_on_a_gpu_it_is_the_solution_in_double_precision(
    n: int, m: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(n)
    costs = torch.rand(n, m, generator=draw).to("cuda", dtype)
    found = otdd.matrix_transport(costs, epsilon=0.05)
    assert found._comparison.operator("xy").passes.backend == "triton, costs given"
    double = otdd.ComputeOptions("cuda", precision="double")
    exact = otdd.matrix_transport(costs, epsilon=0.05, compute=double)
    assert found.converged
    assert found.bounds[0] <= exact.bounds[1]
    assert found.bounds[1] >= exact.bounds[0]
    assert found.value == pytest.approx(exact.value, rel=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_memory_is_that_of_vectors() -> None:
    n = 16_384
    costs = torch.rand(n, n, device="cuda")
    otdd.matrix_transport(costs[:512, :512].contiguous(), epsilon=0.05)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    otdd.matrix_transport(costs, epsilon=0.01)
    assert torch.cuda.max_memory_allocated() - before <= 200 * 2 * n + (64 << 20)
