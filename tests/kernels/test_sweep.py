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

from otdd_flash.kernels.epsilon import LN_2
from otdd_flash.kernels.matrix import sweep
from otdd_flash.kernels.matrix.place import Place, is_aligned
from otdd_flash.kernels.matrix.sweep import Shape, matrix_sweep, row_weights, sweep_shape
from otdd_flash.kernels.matrix.swept_columns import fill_absent

pytestmark = pytest.mark.usefixtures("poisoned")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SIZED = [
    *(((1, 1), torch.float32), ((33, 70), torch.float16), ((200, 3), torch.bfloat16)),
    *(((130, 260), torch.float32), ((1, 300), torch.float16), ((7, 2100), torch.bfloat16)),
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
    largest: float = 3.0,
    closed: bool = False,
    zero: bool = True,
) -> Case:
    """Costs of either sign, and masses, one of a side 0."""
    draw = torch.Generator().manual_seed(n + m)
    costs = (largest * (torch.rand(n, m, generator=draw) - 0.3)).to(dtype)
    if closed and min(n, m) > 1:
        costs[torch.rand(n, m, generator=draw) < 0.2] = math.inf
    masses = [torch.rand(size, generator=draw).double() + 0.1 for size in (n, m)]
    for side in masses:
        if zero and len(side) > 2:
            side[len(side) // 3] = 0
    a, b = (side / side.sum() for side in masses)
    g = torch.where(b > 0, 0.1 * largest * torch.randn(m, generator=draw), math.nan)
    return Case(*(part.to(DEVICE) for part in (costs, a, b, g)))


def swept(
    given: Case,
    epsilon: float,
    *,
    costs: Tensor | None = None,
    active: bool = True,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """T(g) and T'(T(g)), float64."""
    matrix = given.costs if costs is None else costs
    level = torch.full((1,), epsilon, dtype=torch.float64, device=DEVICE)
    few = sweep_shape((len(given.a), len(given.b)), matrix.dtype, DEVICE)._replace(programs=8)
    f, sums = matrix_sweep(
        Place.of(matrix),
        (given.a.log(), given.b.log()),
        row_weights(given.a),
        given.g,
        level,
        torch.full((1,), active, device=DEVICE),
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


@pytest.mark.slow(after=3)
@pytest.mark.parametrize(("size", "dtype"), SIZED)
def test_both_are_softmins(size: tuple[int, int], dtype: torch.dtype) -> None:
    given = case(*size, dtype, closed=True)
    check(given, 0.05, swept(given, 0.05))


@pytest.mark.parametrize(("epsilon", "largest"), [(1.0, 1.0), (1e-2, 1000.0), (1e-4, 1000.0)])
def test_no_epsilon_costs_digits(epsilon: float, largest: float) -> None:
    """At 1e-4 and 1,000 most columns are far from any row, and are summed once more."""
    given = case(33, 70, largest=largest)
    check(given, epsilon, swept(given, epsilon))


@pytest.mark.parametrize("dearer", [4, 4.5, 50])
def test_columns_that_rows_lose_are_summed_once_more(dearer: float) -> None:
    """One column is dearer than others, by more than float32 has exponents for or has digits."""
    given = case(40, 70, zero=False)
    given.costs[:, 7] += dearer
    f, updated = swept(given, 0.05)
    check(given, 0.05, (f, updated))
    assert float(updated[7]) > 0.8 * dearer


@pytest.mark.parametrize(("rows", "programs"), [(1, 500), (2, 1), (8, 3)])
def test_rows_and_programs_change_roundings_alone(rows: int, programs: int) -> None:
    given = case(33, 70)
    check(given, 0.05, swept(given, 0.05, shape=Shape(rows, 4, 2, programs)))


def test_a_stride_between_rows_is_taken_and_nothing_else_read() -> None:
    given = case(33, 70)
    wide = torch.full((33, 91), math.nan, device=DEVICE)
    wide[:, 5:75] = given.costs
    inner = wide[:, 5:75]
    assert not is_aligned(inner)
    for one, two in zip(swept(given, 0.05), swept(given, 0.05, costs=inner), strict=True):
        assert torch.equal(one, two)


def test_places_are_aligned_where_loads_of_many_entries_may_be() -> None:
    whole = torch.zeros(6, 16, dtype=torch.float16, device=DEVICE)
    assert is_aligned(whole)
    assert is_aligned(whole[:, 8:])
    assert not is_aligned(whole[:, 1:])
    assert not is_aligned(torch.zeros(6, 12, dtype=torch.float16, device=DEVICE))
    assert is_aligned(torch.zeros(6, 12, device=DEVICE))


@pytest.mark.parametrize("absent", [[], [3, 64, 69]])
def test_columns_without_mass_are_filled_in_alone(absent: list[int]) -> None:
    given = case(40, 70, closed=True, zero=False)
    b = given.b.clone()
    b[absent] = 0
    f = torch.randn(40, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    level = torch.full((1,), 0.05, dtype=torch.float64, device=DEVICE)
    found = torch.full((70,), 7.0, device=DEVICE)
    fill_absent(Place.of(given.costs), (given.a.log(), b.log()), f, level, found)
    expected = reference.softmin_rows(given.costs.double().T, given.a, f.double(), 0.05)
    torch.testing.assert_close(found[absent].double(), expected[absent], rtol=1e-6, atol=1e-6)
    assert bool((found[b > 0] == 7).all())


def test_nothing_is_done_where_nothing_is_active() -> None:
    given = case(33, 70)
    f, updated = swept(given, 0.05, active=False)
    assert bool(f.isnan().all())
    assert bool(updated.isnan().all())


@pytest.mark.parametrize(
    ("n", "rows", "warps", "stages"),
    [(16_384, 1, 16, 3), (8192, 2, 16, 3), (4096, 2, 8, 3), (1024, 8, 8, 1), (512, 4, 4, 1)],
)
def test_shapes_are_those_that_were_measured_to_be_the_fastest(
    n: int, rows: int, warps: int, stages: int
) -> None:
    """Of square matrices in float32, on an H200."""
    found = sweep_shape((n, n), torch.float32, torch.device("cpu"))
    assert found == Shape(rows, warps, stages, 132)


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
@pytest.mark.parametrize(("n", "m"), [(1000, 1000), (4097, 8191), (9000, 16_384)])
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
