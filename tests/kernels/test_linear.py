"""Kernels of linear systems, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from otdd_flash.kernels.linear import cg_start, cg_step, halves, onward, row_sums
from otdd_flash.kernels.points.packed_points import arrange
from otdd_flash.operators.plan import KeptPlan, Products
from otdd_flash.operators.triton_plans import HeldPlan
from otdd_flash.solver.conjugate_gradients import Iterates, Limits, Near, System, inverse
from otdd_flash.solver.conjugate_gradients_kernels import KernelIterates
from otdd_flash.solver.low_rank import LowRank
from otdd_flash.solver.schur import CGOptions, SchurSystem, SelfSystem, Solver

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


LIMITS = Limits(1e-9, 30)
STATE = (
    "values",
    "left",
    "size",
    "now",
    "target",
    "taken",
    "pending",
    "missed",
    "iterations",
    "active",
)
MOVING = ("correction", "residual", "direction", "square", "energy", "unknown")


def entries() -> Tensor:
    """A symmetric plan with a point that has no mass."""
    draw = torch.Generator().manual_seed(0)
    found = torch.randn(50, 50, generator=draw, dtype=torch.float64).exp()
    found = found + found.T
    found[7], found[:, 7] = 0, 0
    return (found / found.sum()).to(DEVICE)


def held(plan: Tensor) -> HeldPlan:
    """It in float16, rows and columns in blocks of two classes."""
    layout = arrange(torch.arange(50, device=DEVICE) % 2, 2)
    masses = plan.sum(1)
    packed = torch.zeros((layout.size, layout.size), dtype=torch.float64, device=DEVICE)
    conditional = plan * 1024 * inverse(masses)[:, None]
    packed[layout.position[:, None], layout.position] = conditional
    found = HeldPlan.of(packed.half(), 2.0**-10, masses, (layout, layout))
    assert found is not None
    return found


def system(of: Products, *, own: bool, damping: float = 0.0) -> System:
    return (SelfSystem if own else SchurSystem)(of, damping)


def preconditioned(of: System, count: int) -> LowRank:
    draw = torch.Generator().manual_seed(2)
    vectors = torch.randn(50, count, generator=draw, dtype=torch.float64).to(DEVICE)
    return LowRank(of.metric.scale * vectors / 5)


def right_sides() -> Tensor:
    """Some that are not in the range, and one of zeros; of any strides."""
    draw = torch.Generator().manual_seed(1)
    right = torch.randn(4, 50, generator=draw, dtype=torch.float64).to(DEVICE) / 50
    right[2] = 0
    return right.T


def agree(kernels: KernelIterates, reference: Iterates) -> None:
    """What is known, and where iterations are in directions that go on."""
    for name in STATE:
        found, expected = getattr(kernels, name), getattr(reference, name)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-11)
    on = reference.active
    for name in MOVING:
        found, expected = getattr(kernels, name)[..., on], getattr(reference, name)[..., on]
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "packed", "damping", "vectors"),
    [(False, True, 0.1, 0), (False, False, 0.0, 3), (True, True, 0.0, 0), (False, True, 0.0, 3)],
)
def test_iterations_in_kernels_are_those_in_pytorch(
    own: bool, packed: bool, damping: float, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the right-hand side on to corrections, and with another system at the end.

    A correction that makes a residual larger is not taken, and none follows one that took as many
    iterations as there may be.
    """
    for module in (cg_start, cg_step, onward):
        monkeypatch.setattr(module, "BLOCK", 16)
    plan = entries()
    exact = system(KeptPlan(plan), own=own, damping=damping)
    near = system(held(plan) if packed else KeptPlan(plan.float().double()), own=own)
    assert (near.layout is not None) == packed
    preconditioner = preconditioned(exact, vectors) if vectors else None
    found = KernelIterates(exact.metric, LIMITS, (50, 4))
    expected = Iterates(exact.metric, LIMITS)
    both = found, expected
    for used in (near, exact):
        for each in both:
            if used is near:
                each.begin(right_sides(), Near(near, preconditioner))
            else:
                each.resume(Near(exact, preconditioner, 3))
        agree(*both)
        assert used is exact or found.pending.tolist() == [True, True, False, True]
        for steps in (2, 3, 1):
            for _ in range(steps):
                for each in both:
                    each.step()
                agree(*both)
            if steps == 1:
                for each in both:
                    each.correction[0, 0] += 1e3
            for each in both:
                each.correct(exact)
            agree(*both)
    assert found.pending.tolist()[::2] == [False, False]
    assert float(found.values[7].abs().max()) == 0
    assert float(found.now.max()) < 1e-3 * float(found.size.max())


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_correction_by_packed_products_is_that_in_pytorch(own: bool) -> None:
    """Its image goes from the products into the residual, of a solution that is there already."""
    of = system(held(entries()), own=own, damping=0.1)
    found, expected = KernelIterates(of.metric, LIMITS, (50, 4)), Iterates(of.metric, LIMITS)
    for each in (found, expected):
        each.begin(right_sides(), Near(of))
        for _ in range(2):
            each.step()
            each.correct(of)
        torch.testing.assert_close(each.now[2], torch.zeros_like(each.now[2]))
    for name in ("values", "left", "now", "pending"):
        tensors = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(*tensors, rtol=1e-5, atol=1e-9)
    exact = right_sides() - of.times(found.values)
    assert float(of.metric.size(of.metric.in_range(exact) - found.left).max()) < 1e-5
    assert float(found.now.max()) < 0.5 * float(found.size.max())


@pytest.mark.slow
def test_right_sides_of_nothing_end_at_once() -> None:
    of = system(held(entries()), own=True)
    found = Solver(of, of, CGOptions()).solve(torch.zeros_like(right_sides()))
    assert bool(found.converged.all())
    assert found.iterations.tolist() == [0, 0, 0, 0]
    assert float(found.values.abs().max()) == 0


@pytest.mark.slow
def test_directions_end_at_their_goals_and_numbers_of_iterations() -> None:
    of = system(held(entries()), own=False)
    for limits in (Limits(1e-2, 30), Limits(1e-9, 3)):
        found, expected = KernelIterates(of.metric, limits, (50, 4)), Iterates(of.metric, limits)
        for each in (found, expected):
            each.begin(right_sides(), Near(of))
            while bool(each.active.any()):
                each.step()
        assert found.iterations.tolist() == expected.iterations.tolist()
        assert 0 < int(found.iterations.max()) <= limits.iterations
        assert int(found.iterations[2]) == 0
        torch.testing.assert_close(found.correction, expected.correction, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["not positive", "rounding"])
def test_a_step_that_is_not_to_be_trusted_is_not_taken(reason: str) -> None:
    of = system(held(entries()), own=False)
    found = KernelIterates(of.metric, LIMITS, (50, 4))
    if reason == "rounding":
        of.precision = 1e6
    else:
        of._scaled_masses = -of.metric.masses
    found.begin(right_sides(), Near(of))
    found.step()
    assert not bool(found.active.any())
    assert found.iterations.tolist() == [0, 0, 0, 0]
    assert float(found.correction.abs().max()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_products_go_on_as_halves(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by way of float64 numbers in the points' own order; of any strides between rows."""
    for module in (halves, onward):
        monkeypatch.setattr(module, "BLOCK", 64)
    draw = torch.Generator().manual_seed(0)
    layout = arrange(torch.arange(150, device=DEVICE) % 3, 3)
    found = torch.randn(layout.size, parts, 8, generator=draw).to(DEVICE)[..., :3]
    found *= torch.tensor([1e-20, 1e15, 0.0], device=DEVICE)
    scales = torch.tensor([4.0, 2.0**-80, 1.0], dtype=torch.float64, device=DEVICE)
    weights = torch.rand(150, generator=draw, dtype=torch.float64).to(DEVICE)
    products = halves.Unmerged.of(found)
    packed, now = onward.onward(products, scales, layout.spread(weights, 0.0))
    expected = halves.to_halves(halves.from_halves(products, scales, layout, weights), layout)
    assert torch.equal(now, expected[1])
    torch.testing.assert_close(packed.sum(1), expected[0].sum(1), rtol=2.0**-10, atol=0)
    difference = packed.double().sum(1) - expected[0].double().sum(1)
    assert float(difference.abs().max()) <= 2.0**-7
    assert bool((packed[~layout.filled] == 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_slots_are_added_up_where_they_are_read(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rows but the first block; columns beyond those that count go on as 0."""
    for module in (halves, onward, row_sums):
        monkeypatch.setattr(module, "BLOCK", 64)
    draw = torch.Generator().manual_seed(0)
    layout = arrange(torch.arange(150, device=DEVICE) % 3, 3)
    whole, slots = 128, 3
    split = layout.size - whole
    values = torch.randn(layout.size + 2 * split, parts, 8, generator=draw).to(DEVICE)
    products = halves.Unmerged(values, whole, split, slots)
    of_all = values.double().sum(1)
    expected = of_all[: layout.size].clone()
    for k in (1, 2):
        first = layout.size + (k - 1) * split
        expected[whole:] += of_all[first : first + split]
    torch.testing.assert_close(products.merged().double().sum(1), expected, rtol=1e-5, atol=1e-5)
    scales = torch.tensor([4.0, 0.5, 1.0], dtype=torch.float64, device=DEVICE)
    weights = torch.rand(150, generator=draw, dtype=torch.float64).to(DEVICE)
    found = halves.from_halves(products, scales, layout, weights)
    by_point = weights[:, None] * expected[layout.position, :3] / scales
    torch.testing.assert_close(found, by_point, rtol=1e-12, atol=1e-14)
    packed, now = onward.onward(products, scales, layout.spread(weights, 0.0))
    assert len(now) == 3
    assert bool((packed[..., 3:] == 0).all())
    found = halves.from_halves(
        halves.Unmerged.of(packed.float()), now, layout, torch.ones_like(weights)
    )
    torch.testing.assert_close(found, by_point, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_sums_are_in_range_where_there_is_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sums, "BLOCK", 64)
    layout = arrange(torch.arange(150, device=DEVICE) % 3, 3)
    masses = torch.rand(150, dtype=torch.float64, device=DEVICE) + 0.5
    masses[140] = 0
    sums = torch.full((layout.size, 1, 1), 8.0, device=DEVICE)
    sums[layout.position[140]] = 1e6
    sums[~layout.filled] = torch.nan
    for unit, value, fits in (
        (0.25, None, True), (4.0, None, True), (4.5, None, False), (2.0**-9, None, False),
        (0.25, 1e3, False), (0.25, torch.nan, False), (0.25, torch.inf, False), (0.25, 100.0, True),
    ):  # fmt: skip
        given = sums.clone()
        if value is not None:
            given[layout.position[149]] = value
        found, within = row_sums.row_sums(halves.Unmerged.of(given), layout, masses, unit)
        assert within == fits, (unit, value)
        expected = masses * unit * given[layout.position, 0, 0]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_numbers_as_two_halves(
    weighted: bool, adjacent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of any size, and one of zeros, keep 22 bits; classes lie apart, padding is 0."""
    monkeypatch.setattr(halves, "BLOCK", 64)
    monkeypatch.setattr(halves, "MANY_COLUMNS", 1)
    monkeypatch.setattr(halves, "ADJACENT", 2)
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(150, 3, generator=draw, dtype=torch.float64).to(DEVICE)
    values *= torch.tensor([1e-30, 1e25, 0.0], device=DEVICE)
    weights = torch.rand(150, generator=draw, dtype=torch.float64).to(DEVICE)
    layout = arrange(torch.arange(150, device=DEVICE) % 3, 3)
    strided = values if adjacent else values.T.contiguous().T
    packed, scales = halves.to_halves(strided, layout, weights if weighted else None, multiple=8)
    assert packed.shape[2] == 8
    assert bool((packed[..., 3:] == 0).all())
    packed = packed[..., :3]
    given = values * weights[:, None] if weighted else values
    assert bool((packed[~layout.filled] == 0).all())
    assert bool(packed.isfinite().all())
    found = halves.from_halves(halves.Unmerged.of(packed.float()), scales, layout, weights)
    expected = weights[:, None] * given
    error = (found - expected).abs().amax(0)
    assert bool((error <= 2.0**-21 * given.abs().amax(0)).all())
    assert float(packed[:, 0, :2].abs().amax(0).min()) >= 2.0**12
