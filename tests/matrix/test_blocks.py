"""Costs that a function computes block by block."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable

import matrix_cases as cases
import pytest
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.operators import given_costs

STREAMED = otdd.ComputeOptions("cpu", memory_budget=0)


class Asked:
    """The Manhattan distances of two clouds, and which blocks were asked for."""

    def __init__(self, n: int, m: int, dtype: torch.dtype = torch.float64) -> None:
        draw = cases.generator(n, m)
        self.x, self.y = (cases.random(size, 3, draw).to(dtype) for size in (n, m))
        self.n, self.m = n, m
        self.largest = 0

    def block(self, rows: slice, columns: slice) -> Tensor:
        found = torch.cdist(self.x[rows], self.y[columns], p=1)
        self.largest = max(self.largest, found.numel())
        return found

    @property
    def costs(self) -> otdd.CostBlocks:
        return otdd.CostBlocks(self.n, self.m, self.block)

    @property
    def matrix(self) -> Tensor:
        return torch.cdist(self.x, self.y, p=1)


@pytest.mark.parametrize(("compute", "dtype"), [(None, torch.float64), (STREAMED, torch.float32)])
def test_is_the_matrix(
    compute: otdd.ComputeOptions | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given_costs, "BLOCK_ENTRIES_CPU", 500)
    asked = Asked(33, 70, dtype)
    found = otdd.matrix_transport(asked.costs, epsilon=0.3, compute=compute)
    expected = otdd.matrix_transport(asked.matrix, epsilon=0.3)
    assert asked.largest <= 500
    assert found.f.dtype == expected.f.dtype == dtype
    assert found.value == pytest.approx(expected.value, rel=1e-6)
    assert found.transport_cost == pytest.approx(expected.transport_cost, rel=1e-5)
    torch.testing.assert_close(found.plan(), expected.plan(), rtol=1e-4, atol=1e-8)


def test_the_budget_decides_what_is_held() -> None:
    asked, needed = Asked(33, 70), 33 * 70 * 8
    for budget, said in ((needed, "costs given"), (needed - 1, "costs asked for")):
        compute = otdd.ComputeOptions("cpu", memory_budget=budget)
        found = otdd.matrix_transport(asked.costs, epsilon=0.3, compute=compute)
        assert said in found._comparison.operator("xy").passes.backend


@pytest.mark.slow
def test_nothing_of_the_size_of_the_matrix_is_held_or_asked_for() -> None:
    """A matrix of 20 GB, of which a solve of two iterations reads a few blocks of rows."""
    n = 70_000
    x = torch.linspace(0, 1, n)
    sizes = []

    def block(rows: slice, columns: slice) -> Tensor:
        sizes.append((rows.stop - rows.start) * (columns.stop - columns.start))
        if len(sizes) > 10:
            raise RuntimeError("enough was seen")
        return (x[rows, None] - x[columns]).abs()

    with pytest.raises(
        otdd.InputError, match=r"costs\.block\(\d+:\d+, 0:70000\) raised RuntimeError"
    ):
        otdd.matrix_transport(otdd.CostBlocks(n, n, block), epsilon=0.1, compute=STREAMED)
    assert max(sizes) <= 1 << 20


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (lambda rows, columns: torch.zeros(2, 2), r"must return a dense real tensor \(1, 1\)"),
        (lambda rows, columns: 1.0, "must return a dense real tensor"),
        (lambda rows, columns: torch.zeros(1, 1) * 1j, "must return a dense real tensor"),
        (lambda rows, columns: torch.zeros(1, 1).to_sparse(), "sparse_coo"),
        (lambda rows, columns: torch.zeros(1, 1, device="meta"), "on meta"),
        (lambda rows, columns: torch.zeros(1, 1).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (
            lambda rows, columns: torch.zeros(
                len(range(9)[rows]),
                len(range(8)[columns]),
                dtype=torch.float16 if columns.stop == 1 else torch.float64,
            ),
            "returned torch.float64, and the first block was torch.float16",
        ),
        (lambda rows, columns: 1 / 0, r"costs\.block\(0:1, 0:1\) raised ZeroDivisionError"),
        (lambda rows, columns: sys.exit(3), r"costs\.block\(0:1, 0:1\) raised SystemExit"),
        (lambda rows, columns: torch.zeros(len(range(9)[rows]), len(range(8)[columns])) / 0, "nan"),
    ],
)
def test_functions_that_give_no_costs(block: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(otdd.InputError, match=message):
        otdd.matrix_transport(otdd.CostBlocks(9, 8, block), epsilon=0.1)


@pytest.mark.parametrize(
    ("change", "calls"), [(math.nan, 30), (math.inf, 8), (10.0, 30), (-1.0, 8)]
)
def test_functions_that_change_their_mind(change: float, calls: int) -> None:
    """No bounds are proven for a matrix that is another one in the next pass, and nothing hangs."""
    asked, count = Asked(9, 8), itertools.count()

    def block(rows: slice, columns: slice) -> Tensor:
        return asked.block(rows, columns) * (change if next(count) > calls else 1)

    with pytest.raises(otdd.InputError, match="returned other costs than before"):
        otdd.matrix_transport(otdd.CostBlocks(9, 8, block), epsilon=0.01, compute=STREAMED)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda block: torch.stack([block] * 5, 2)[:, :, 2],
    "transposed": lambda block: block.T.contiguous().T,
    "one column of a wide matrix": lambda block: torch.cat([block, block], 1)[:, : block.shape[1]],
    "with a gradient": lambda block: block.clone().requires_grad_(block.is_floating_point()),
    "turned": lambda block: torch.from_numpy(block.numpy()[::-1, ::-1].copy()).flip(0, 1),
}


@pytest.mark.parametrize(
    ("size", "dtype"), [((6, 1), torch.float16), ((4, 5), torch.float64), ((1, 1), torch.int32)]
)
def test_blocks_may_be_laid_out_in_any_way(size: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = (8 * torch.rand(size, generator=cases.generator(*size))).to(dtype)
    expected = otdd.matrix_transport(matrix, epsilon=4.0)
    for name, layout in LAYOUTS.items():
        blocks = otdd.CostBlocks(*size, lambda r, c, layout=layout: layout(matrix[r, c]))
        found = otdd.matrix_transport(blocks, epsilon=4.0)
        assert found.value == pytest.approx(expected.value, rel=1e-6, abs=1e-9), name
        low, high = found.bounds
        assert low - 1e-6 <= expected.value <= high + 1e-6, name


def test_blocks_that_repeat_one_number_may_share_it() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    blocks = otdd.CostBlocks(3, 1, lambda r, c: one.expand(r.stop - r.start, c.stop - c.start))
    assert otdd.matrix_transport(blocks, epsilon=1.0).value == pytest.approx(1.0, rel=1e-12)
