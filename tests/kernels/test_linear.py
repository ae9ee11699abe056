"""Kernels of linear systems, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from otdd_flash.derivatives.plan_system import LowRank, PlanMatrix
from otdd_flash.engine.conjugate_gradients import Iterates, Limits, Near, System, inverse
from otdd_flash.engine.conjugate_gradients_kernels import KernelIterates
from otdd_flash.kernels.linear import cg_start, cg_step, halves
from otdd_flash.kernels.passes.block_products import add_halves
from otdd_flash.kernels.points.packed_points import arrange
from otdd_flash.operators.base import Products, StoredPlan
from otdd_flash.operators.triton_plans import HeldPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


LIMITS = Limits(1e-9, 30)
STATE = ("values", "left", "size", "now", "target")
STATE += ("taken", "pending", "missed", "iterations", "active")
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
    return PlanMatrix(of, damping, symmetric=own)


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
    [(False, True, 0.1, 0), (False, False, 0.0, 3), (True, True, 0.0, 0)],
)
def test_iterations_in_kernels_are_those_in_pytorch(
    own: bool, packed: bool, damping: float, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the right-hand side on to corrections, and with another system at the end.

    A correction that makes a residual larger is not taken, and none follows one that took as many
    iterations as there may be.
    """
    for module in (cg_start, cg_step, halves):
        monkeypatch.setattr(module, "BLOCK", 16)
    plan = entries()
    exact = system(StoredPlan(plan), own=own, damping=damping)
    near = system(held(plan) if packed else StoredPlan(plan.float().double()), own=own)
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
@pytest.mark.parametrize("parts", [1, 2])
def test_slots_are_added_up_where_they_are_read(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rows but the first block; columns beyond those that count go on as 0."""
    for name in ("BLOCK", "SUMMED_AT_ONCE"):
        monkeypatch.setattr(halves, name, 64)
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
    sums, fits = halves.row_sums(products, layout, weights)
    torch.testing.assert_close(sums, weights * expected[layout.position, 0], rtol=1e-12, atol=0)
    assert not fits
    packed, now = halves.onward(products, scales, layout.spread(weights, 0.0))
    assert len(now) == 3
    assert bool((packed[..., 3:] == 0).all())
    found = halves.from_halves(
        halves.Unmerged.of(packed.float()), now, layout, torch.ones_like(weights)
    )
    torch.testing.assert_close(found, by_point, rtol=1e-5, atol=1e-6)


def test_all_parts_of_a_block_and_of_columns_are_multiplied_but_both_low_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    entries = torch.rand(5, 40, generator=draw, dtype=torch.float64).to(DEVICE)
    values = torch.randn(40, 8, generator=draw, dtype=torch.float64).to(DEVICE)
    block, (high, low) = (
        torch.stack((whole.half(), (whole - whole.half().double()).half()))
        for whole in (entries, values)
    )
    found = torch.full((5, 8), torch.nan, device=DEVICE)
    for columns in (slice(0, 16), slice(16, 40)):
        add_halves(block[:, :, columns].contiguous(), (high, low), columns, found)
    most = entries @ values.abs()
    assert float(((found.double() - entries @ values).abs() / most).max()) <= 2.0**-20
