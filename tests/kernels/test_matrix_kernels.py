"""Kernels over a cost matrix in memory."""

from __future__ import annotations

import math

import mpmath
import pytest
import reference
import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.matrix import sums as matrix_sums_module
from otdd_flash.kernels.matrix.facts import Place, is_aligned, matrix_row_facts
from otdd_flash.kernels.matrix.half_step import matrix_half_step
from otdd_flash.kernels.matrix.sums import exact_power_of_two, matrix_sums

pytestmark = pytest.mark.usefixtures("poisoned")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = torch.tensor(0.05, dtype=torch.float64, device=DEVICE)


@pytest.mark.slow
def test_a_stride_between_rows_is_taken_and_nothing_else_read() -> None:
    """Nor potentials of points without mass."""
    draw = torch.Generator().manual_seed(103)
    costs = (3 * torch.rand(33, 70, generator=draw) - 1).to(DEVICE)
    costs[torch.rand(33, 70, generator=draw).to(DEVICE) < 0.2] = math.inf
    wide = torch.full((33, 90), math.nan, device=DEVICE)
    wide[:, 5:75] = costs
    a, b = (torch.full((k,), 1 / k, device=DEVICE).double() for k in costs.shape)
    a[11], b[23] = 0, 0
    f, g = (torch.where(side > 0, 0.0, math.nan) for side in (a, b))
    still = torch.zeros_like(a), torch.zeros_like(b)

    def all_found(matrix: Tensor) -> list[Tensor]:
        place = Place.of(matrix)
        return [
            matrix_half_step(matrix, b.log(), g.float(), EPSILON),
            matrix_half_step(matrix, a.log(), f.float(), EPSILON, columns=True),
            *matrix_sums(place, still, (a, b), EPSILON, -700.0),
            *matrix_row_facts(place, len(matrix), b),
        ]

    for one, two in zip(all_found(wide[:, 5:75]), all_found(costs), strict=True):
        assert not bool(one.isnan().any())
        assert torch.equal(one, two)


def test_small_epsilon_costs_no_digits() -> None:
    """Errors are those of a rounded score, at any epsilon, as the largest logit is taken away."""
    draw = torch.Generator().manual_seed(2)
    costs = torch.rand(8, 300, generator=draw).to(DEVICE)
    b = torch.full((300,), 1 / 300, dtype=torch.float64, device=DEVICE)
    g = torch.rand(300, generator=draw).to(DEVICE)
    for epsilon in (1e-2, 1e-7):
        level = torch.tensor(epsilon, dtype=torch.float64, device=DEVICE)
        found = matrix_half_step(costs, b.log(), g, level)
        expected = reference.softmin_rows(costs.double(), b, g, epsilon)
        assert float((found.double() - expected).abs().max()) <= 4 * 2.0**-24


def test_one_over_epsilon_is_not_rounded() -> None:
    """A single score is its own softmin, exactly; a scale of 24 bits alone would move some."""
    zero, one = torch.zeros(1, 1, device=DEVICE), torch.ones(1, device=DEVICE)
    for level in torch.logspace(-6, -3, 12, dtype=torch.float64, device=DEVICE):
        assert float(matrix_half_step(zero, one.double().log(), one, level)) == -1, float(level)


@triton.jit
def powers_kernel(exponents_ptr, out_ptr, count, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    exponents = tl.load(exponents_ptr + o, mask=o < count, other=0.0)
    tl.store(out_ptr + o, exact_power_of_two(exponents), mask=o < count)


def powers(exponents: Tensor) -> Tensor:
    found = torch.empty_like(exponents, device=DEVICE)
    block = triton.next_power_of_2(len(exponents))
    powers_kernel[(1,)](exponents.to(DEVICE), found, len(exponents), BLOCK=block)
    return found.cpu()


def test_powers_of_two_are_known_to_two_units() -> None:
    draw = torch.Generator().manual_seed(0)
    spread = torch.rand(400, generator=draw, dtype=torch.float64)
    exponents = torch.cat(
        (spread - 0.5, 2040 * spread - 1020, torch.tensor([0.5, -0.5, 1.5, -1022, 1023]).double())
    )
    with mpmath.workdps(40):
        for exponent, found in zip(exponents.tolist(), powers(exponents).tolist(), strict=True):
            assert abs(mpmath.mpf(found) / mpmath.power(2, exponent) - 1) <= 2.0**-52
    large = torch.tensor([1024.0, 5000.0, 1e300], dtype=torch.float64)
    assert powers(large).tolist() == [math.inf] * 3


def test_a_matrix_is_aligned_if_its_address_and_its_rows_are() -> None:
    wide = torch.zeros(4, 24, dtype=torch.float32, device=DEVICE)
    assert wide.data_ptr() % 16 == 0
    assert is_aligned(wide)
    assert is_aligned(wide[:, 4:20])
    assert is_aligned(wide.half()[:, :16])
    # A first entry, rows that end, and rows that start between.
    assert not is_aligned(wide[:, 1:21])
    assert not is_aligned(wide[:, :22])
    assert not is_aligned(torch.zeros(4, 18, device=DEVICE)[:, :16])


@pytest.mark.parametrize(("m", "lanes"), [(3, 4), (1000, 1024), (1 << 22, 2048)])
def test_tiles_of_sums_are_no_wider_than_the_columns_nor_than_a_program_holds(
    m: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, int]] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            return lambda *_, LANES, **__: launched.append((grid[0], LANES))

    monkeypatch.setattr(matrix_sums_module, "matrix_sums_kernel", Noted())
    place = Place(torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.float32, aligned=True)
    of_rows, of_columns = (torch.zeros(k, device=DEVICE).double() for k in (2, m))
    matrix_sums(place, (of_rows, of_columns), (of_rows, of_columns), EPSILON, -700.0)
    assert launched == [(triton.cdiv(m, lanes), lanes)]
