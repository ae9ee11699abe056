"""`MatrixKernelOperator` against the same matrix in PyTorch, in the interpreter or on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import matrix_cases as cases
import pytest
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.operators.matrix import MatrixOperator
from otdd_flash.operators.matrix_kernel import MatrixKernelOperator, kernel_facts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = otdd.ComputeOptions(str(DEVICE), "triton")
EPSILON = 0.1

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda costs: costs,
    "columns": lambda costs: costs.T.contiguous().T,
    "steps": lambda costs: costs.repeat_interleave(2, 1)[:, ::2],
}


def operators(
    size: tuple[int, int], layout: str, dtype: torch.dtype, *, closed: bool = False
) -> tuple[MatrixOperator, MatrixKernelOperator]:
    draw = cases.generator(*size)
    costs = cases.random(*size, draw).to(dtype)
    if closed:
        costs[torch.rand(size, generator=draw) < 0.2] = math.inf
    masses = [cases.masses(k, draw, zero=True).to(DEVICE) for k in size]
    tiles = MatrixOperator(LAYOUTS[layout](costs.to(DEVICE)), *masses)
    return tiles, MatrixKernelOperator(tiles)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_are_those_of_the_matrix(layout: str, dtype: torch.dtype, closed: bool) -> None:
    tiles, kernels = operators((33, 70), layout, dtype, closed=closed)
    f, g = (torch.randn(k, device=DEVICE) * 0.1 for k in (33, 70))
    near = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(
        kernels.softmin_rows(g, EPSILON), tiles.softmin_rows(g, EPSILON), **near
    )
    torch.testing.assert_close(
        kernels.softmin_columns(f, EPSILON), tiles.softmin_columns(f, EPSILON), **near
    )
    one, two = kernels.marginals(f, g, EPSILON), tiles.marginals(f, g, EPSILON)
    for key in ("rows", "columns", "row_errors", "column_errors"):
        torch.testing.assert_close(getattr(one, key), getattr(two, key), rtol=1e-12, atol=1e-30)
    assert one[4:] == two[4:]
    torch.testing.assert_close(kernels.expected_costs(tiles.b), tiles.expected_costs(tiles.b))
    facts = kernel_facts(tiles.source, tiles.a, tiles.b)
    assert facts.range == tiles.facts.range
    assert facts.mean == pytest.approx(tiles.facts.mean, rel=1e-12)
    assert facts.extreme == tiles.facts.extreme
    assert facts.forbidden is closed
    carried = tiles.source.matrix.double()[tiles.a > 0][:, tiles.b > 0]
    x, y = facts.magnitudes
    sizes = x[tiles.a > 0, None] + y[tiles.b > 0]
    assert bool((carried.abs() <= sizes)[carried < math.inf].all())


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.1, 0.005])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_solves_are_those_of_the_matrix(layout: str, epsilon: float) -> None:
    draw = cases.generator(1)
    costs = LAYOUTS[layout](cases.random(33, 70, draw).float().to(DEVICE))
    a, b = (cases.masses(k, draw, zero=True) for k in (33, 70))
    options = otdd.Converged(max_iterations=200)
    one = otdd.matrix_transport(costs, a, b, epsilon=epsilon, compute=TRITON, options=options)
    two = otdd.matrix_transport(costs.cpu(), a, b, epsilon=epsilon, compute="cpu")
    assert one.converged
    assert one._problem.operator.execution.backend == "triton, costs given"
    assert one.bounds[0] <= two.bounds[1]
    assert one.bounds[1] >= two.bounds[0]
    assert float((one.plan().cpu() - two.plan()).abs().sum()) < 3e-3
    assert one.value == pytest.approx(two.value, abs=1e-3 * epsilon)


@pytest.mark.slow
def test_forbidden_pairs_and_divergences() -> None:
    draw = cases.generator(2)
    costs = cases.random(17, 12, draw).float().to(DEVICE)
    own = [part + part.T for part in (cases.random(k, k, draw).float() for k in (17, 12))]
    one, two = (
        otdd.matrix_loss(
            costs.to(place), epsilon=EPSILON, self_costs=[part.to(place) for part in own],
            compute=compute,
        )
        for place, compute in ((DEVICE, TRITON), ("cpu", "cpu"))
    )  # fmt: skip
    assert float(one) == pytest.approx(float(two), abs=1e-4)
    costs[torch.rand(17, 12, generator=draw) < 0.3] = math.inf
    found = otdd.matrix_transport(costs, epsilon=EPSILON, compute=TRITON)
    same = otdd.matrix_transport(costs.cpu(), epsilon=EPSILON, compute="cpu")
    assert found.bounds[1] == pytest.approx(same.bounds[1], abs=1e-4)
    assert float(found.plan()[costs == math.inf].max()) == 0


@pytest.mark.parametrize("entry", [math.nan, -math.inf])
def test_bad_entries_are_found_by_the_kernel(entry: float) -> None:
    costs = cases.random(33, 70, cases.generator(3)).float().to(DEVICE)
    costs[30, 65] = entry
    with pytest.raises(otdd.InputError, match=r"costs\[30, 65\] is"):
        otdd.matrix_transport(costs, epsilon=EPSILON, compute=TRITON)


def test_functions_are_for_pytorch() -> None:
    costs = otdd.CostBlocks(9, 8, lambda rows, columns: torch.zeros(9, 8)[rows, columns])
    asked = otdd.ComputeOptions(str(DEVICE), "triton", memory_budget=0)
    with pytest.raises(otdd.InputError, match="backend=triton reads costs that are held"):
        otdd.matrix_transport(costs, epsilon=EPSILON, compute=asked)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "m"), [(256, 256), (3000, 2000), (12_000, 12_000)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_on_a_gpu_it_is_the_solution_in_double_precision(
    n: int, m: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(n)
    costs = torch.rand(n, m, generator=draw).to("cuda", dtype)
    found = otdd.matrix_transport(costs, epsilon=0.05)
    assert found._problem.operator.execution.backend == "triton, costs given"
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
