"""Kernels over a cost matrix in memory."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from tiers import slow
from torch import Tensor

from otdd_flash.kernels.matrix import half_step
from otdd_flash.kernels.matrix.facts import matrix_row_facts
from otdd_flash.kernels.matrix.half_step import matrix_half_step, parts_of
from otdd_flash.kernels.matrix.place import Place
from otdd_flash.kernels.matrix.sums import matrix_sums
from otdd_flash.kernels.segments.softmin import segmented_softmin
from otdd_flash.operators.kernel_vectors import whole_layout

pytestmark = pytest.mark.usefixtures("poisoned")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(1, 1), (33, 70), *slow([(7, 2100), (260, 63), (40, 4100)])]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
EPSILON = torch.tensor(0.05, dtype=torch.float64, device=DEVICE)


def case(n: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Costs with forbidden pairs, and masses with a zero."""
    draw = torch.Generator().manual_seed(n + m)
    costs = (3 * torch.rand(n, m, generator=draw) - 1).to(dtype)
    if min(n, m) > 1:
        costs[torch.rand(n, m, generator=draw) < 0.2] = math.inf
    masses = [torch.rand(size, generator=draw).double() + 0.1 for size in (n, m)]
    for side in masses:
        if len(side) > 2:
            side[len(side) // 3] = 0
    a, b = (side / side.sum() for side in masses)
    return costs.to(DEVICE), a.to(DEVICE), b.to(DEVICE)


@pytest.mark.parametrize("size", SIZES)
def test_one_program_reads_whole_lines(size: tuple[int, int]) -> None:
    costs, a, b = case(*size, torch.float32)
    draw = torch.Generator().manual_seed(1)
    f, g = (torch.randn(k, generator=draw).to(DEVICE) for k in size)
    # Not read where there is no mass.
    g = torch.where(b > 0, g, math.nan)
    f = torch.where(a > 0, f, math.nan)
    for found, matrix, masses, potential in (
        (
            matrix_half_step(costs, b.log(), g, EPSILON, programs=1),
            *(costs, b, g),
        ),
        (
            matrix_half_step(costs, a.log(), f, EPSILON, columns=True, programs=1),
            *(costs.T, a, f),
        ),
    ):
        there = masses > 0
        inner = matrix[:, there].double()
        expected = reference.softmin_rows(inner, masses[there], potential[there], float(EPSILON))
        nothing = expected == math.inf
        assert bool((found[nothing] > 1e20).all())
        wrong = (found.double() - expected)[~nothing].abs()
        # Of a score, whose size is below 8, and of the result.
        assert float(wrong.max()) <= 4 * 8 * 2.0**-24


def test_a_stride_between_rows_is_taken_and_nothing_else_read() -> None:
    costs, a, b = case(33, 70, torch.float32)
    wide = torch.full((33, 90), math.nan, device=DEVICE)
    wide[:, 5:75] = costs
    inner = wide[:, 5:75]
    g = torch.zeros(70, device=DEVICE)
    f = torch.zeros(33, device=DEVICE)
    assert torch.equal(
        matrix_half_step(inner, b.log(), g, EPSILON), matrix_half_step(costs, b.log(), g, EPSILON)
    )
    for one, two in zip(
        matrix_sums(Place.of(inner), (f.double(), g.double()), (a, b), EPSILON, -700.0),
        matrix_sums(Place.of(costs), (f.double(), g.double()), (a, b), EPSILON, -700.0),
        strict=True,
    ):
        assert torch.equal(one, two)
    for one, two in zip(
        matrix_row_facts(Place.of(inner), len(inner), b),
        matrix_row_facts(Place.of(costs), len(costs), b),
        strict=True,
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("size", SIZES)
def test_facts_are_those_of_finite_entries(size: tuple[int, int]) -> None:
    costs, _, b = case(*size, DTYPES[sum(size) % 3])
    facts = matrix_row_facts(Place.of(costs), len(costs), b)
    whole = costs.double()
    finite, counted = whole.isfinite(), whole.isfinite() & (b > 0)
    torch.testing.assert_close(
        facts.lowest.double(), whole.where(counted, math.inf).amin(1), rtol=0, atol=0
    )
    torch.testing.assert_close(
        facts.highest.double(), whole.where(counted, -math.inf).amax(1), rtol=0, atol=0
    )
    torch.testing.assert_close(
        facts.extreme.double(), whole.where(finite, 0).abs().amax(1), rtol=0, atol=0
    )
    torch.testing.assert_close(facts.products, whole.where(finite, 0) @ b, rtol=1e-13, atol=1e-15)
    assert torch.equal(facts.flags, torch.where(finite.all(1), 0, 2).int())


@pytest.mark.parametrize(("entry", "flag"), [(math.nan, 1), (-math.inf, 1), (math.inf, 2)])
def test_an_entry_that_is_no_cost_is_flagged(entry: float, flag: int) -> None:
    costs = torch.zeros(33, 700, device=DEVICE)
    costs[5, 650] = entry
    flags = matrix_row_facts(
        Place.of(costs), len(costs), torch.full((700,), 1 / 700, device=DEVICE).double()
    ).flags
    assert flags.tolist() == [flag if row == 5 else 0 for row in range(33)]


def test_parts_are_whole_blocks_and_never_empty() -> None:
    for length in (1, 7, 8, 9, 1000, 8192):
        for wanted in (1, 2, 33, 10_000):
            parts, size = parts_of(length, 8, wanted)
            assert size % 8 == 0
            assert (parts - 1) * size < length <= parts * size
            assert parts <= wanted


@pytest.mark.slow
def test_sums_of_lines_are_taken_by_the_engine() -> None:
    """Merged by `segmented_softmin`, in as many parts as `line_parts` says."""
    costs, a, b = case(33, 2100, torch.float32)
    for columns, masses in ((False, b), (True, a)):
        potential = torch.zeros(len(masses), device=DEVICE)
        given = costs, masses.log(), potential, EPSILON
        parts, _ = half_step.line_parts((33, 2100), columns=columns)
        sums = half_step.matrix_sums_of_lines(*given, columns=columns)
        size = 2100 if columns else 33
        assert len(sums.highest) == parts * size
        layout = whole_layout(size, len(masses), DEVICE, parts)
        found = torch.zeros(size, device=DEVICE)
        active = torch.ones(1, dtype=torch.bool, device=DEVICE)
        own = b if columns else a
        segmented_softmin(sums, own, layout.blocks, layout.table, active, EPSILON.reshape(1), found)
        expected = matrix_half_step(*given, columns=columns)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


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
