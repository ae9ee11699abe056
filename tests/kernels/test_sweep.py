"""Both half-steps by one read of a cost matrix, against dense formulas in float64."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import pytest
import reference
import torch
import triton
from torch import Tensor

from otdd_flash.kernels.launch import LN_2
from otdd_flash.kernels.matrix import sweep
from otdd_flash.kernels.matrix.facts import Place
from otdd_flash.kernels.matrix.sweep import Shape, matrix_sweep, row_weights, sweep_shape

pytestmark = pytest.mark.usefixtures("poisoned")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SIZED = [
    *(((33, 70), torch.float16), ((1, 1), torch.float32), ((200, 3), torch.bfloat16)),
    ((7, 2100), torch.float32),
]
UNIT = 2.0**-24


class Case(NamedTuple):
    """Costs of one type, masses, a potential of columns and its largest term."""

    costs: Tensor
    a: Tensor
    b: Tensor
    g: Tensor

    @property
    def size(self) -> float:
        """What a score is below in absolute value, about."""
        return float(
            self.costs[self.costs < math.inf].abs().max() + self.g.nan_to_num(0).abs().max()
        )


def case(
    n: int,
    m: int,
    dtype: torch.dtype = torch.float32,
    *,
    closed: bool = False,
    zero: bool = True,
) -> Case:
    """Costs of either sign, and masses, one of a side 0."""
    draw = torch.Generator().manual_seed(n + m)
    costs = (3 * (torch.rand(n, m, generator=draw) - 0.3)).to(dtype)
    if closed and min(n, m) > 1:
        costs[torch.rand(n, m, generator=draw) < 0.2] = math.inf
    masses = [torch.rand(size, generator=draw).double() + 0.1 for size in (n, m)]
    for side in masses:
        if zero and len(side) > 2:
            side[len(side) // 3] = 0
    a, b = (side / side.sum() for side in masses)
    g = torch.where(b > 0, 0.3 * torch.randn(m, generator=draw), math.nan)
    return Case(*(part.to(DEVICE) for part in (costs, a, b, g)))


def swept(given: Case, epsilon: float, shape: Shape | None = None) -> tuple[Tensor, Tensor]:
    """T(g) and T'(T(g)), float64."""
    matrix = given.costs
    level = torch.full((1,), epsilon, dtype=torch.float64, device=DEVICE)
    few = sweep_shape((len(given.a), len(given.b)), matrix.dtype, DEVICE)._replace(programs=8)
    f, sums = matrix_sweep(
        Place.of(matrix),
        (given.a.log(), given.b.log()),
        row_weights(given.a),
        given.g,
        level,
        torch.ones(1, dtype=torch.bool, device=DEVICE),
        shape or few,
    )
    updated = -epsilon * LN_2.value * (sums.highest.double() + sums.sums.log2())
    return f.double(), updated


def check(given: Case, epsilon: float, found: tuple[Tensor, Tensor], units: float = 4.0) -> None:
    """Errors are those of rounded scores, and of sums of exponentials."""
    costs, (f, updated) = given.costs.double(), found
    rows, columns = given.a > 0, given.b > 0
    expected = reference.softmin_rows(
        costs[:, columns], given.b[columns], given.g[columns].double(), epsilon
    )
    nothing = expected == math.inf
    assert bool((f[nothing] > 1e20 * epsilon).all())
    size = given.size + float(expected[~nothing].abs().max()) + 30 * epsilon
    assert float((f - expected)[~nothing].abs().max()) <= units * UNIT * size
    back = reference.softmin_rows(costs[rows].T, given.a[rows], f[rows], epsilon)
    reached = columns & (back < math.inf)
    assert float((updated - back)[reached].abs().max()) <= units * UNIT * size
    assert bool((updated[~columns] == 0).all())


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("size", "dtype"), SIZED)
def test_both_are_softmins(size: tuple[int, int], dtype: torch.dtype) -> None:
    given = case(*size, dtype, closed=True)
    check(given, 0.05, swept(given, 0.05))


@pytest.mark.parametrize("dearer", [4.5, 50])
def test_columns_that_rows_lose_are_summed_once_more(dearer: float) -> None:
    """One column is dearer than others, by more than float32 has exponents for or has digits."""
    given = case(40, 70, zero=False)
    given.costs[:, 7] += dearer
    f, updated = swept(given, 0.05)
    check(given, 0.05, (f, updated))
    assert float(updated[7]) > 0.8 * dearer


@pytest.mark.parametrize("shared", [101_376, 166_912, 232_448])
def test_any_shape_fits_registers_and_shared_memory(
    shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "SHARED", shared)
    sizes = [1, 7, 64, 500, 1024, 3000, 8192, 16_384]
    for n, m, dtype in product([*sizes, 1_000_000], sizes, DTYPES):
        rows, warps, stages, _ = sweep_shape.__wrapped__((n, m), dtype, torch.device("cpu"))
        entries = rows * triton.next_power_of_2(m)
        assert entries <= 32 * 32 * warps
        assert 4 <= warps <= 16
        assert (stages - 1) * entries * dtype.itemsize <= shared - 1024
        assert stages in (1, 2, 3)
        assert rows < 2 * max(1, -(-n // 132))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m"), [(4097, 8191), (9000, 16_384)])
def test_on_a_gpu(n: int, m: int, dtype: torch.dtype) -> None:
    given = case(n, m, dtype, closed=True)
    found = swept(given, 0.01, shape=sweep_shape((n, m), dtype, DEVICE))
    check(given, 0.01, found, units=8.0)
    again = swept(given, 0.01, shape=sweep_shape((n, m), dtype, DEVICE))
    for one, two in zip(found, again, strict=True):
        assert torch.equal(one, two)


@pytest.mark.gpu
def test_offsets_exceed_two_to_the_31() -> None:
    n, m = 140_000, 16_384
    costs = torch.rand(n, m, dtype=torch.float16, device="cuda")
    half = torch.full((n,), 1 / n, dtype=torch.float64, device="cuda")
    b = torch.full((m,), 1 / m, dtype=torch.float64, device="cuda")
    given = Case(costs, half, b, torch.zeros(m, device="cuda"))
    f, _ = swept(given, 0.05, shape=sweep_shape((n, m), torch.float16, DEVICE))
    last = slice(n - 5, n)
    expected = reference.softmin_rows(costs[last].double(), b, given.g.double(), 0.05)
    torch.testing.assert_close(f[last], expected, rtol=1e-5, atol=1e-6)
