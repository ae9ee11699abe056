"""Kernels of linear systems, against PyTorch."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.kernels.linear import cg_step, halves
from otdd_flash.kernels.points.packed_points import arrange
from otdd_flash.operators.plan import KeptPlan
from otdd_flash.solver.conjugate_gradients import Iterates, System
from otdd_flash.solver.schur import SchurSystem, SelfSystem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def system(*, own: bool) -> System:
    draw = torch.Generator().manual_seed(0)
    entries = torch.randn(50, 50, generator=draw, dtype=torch.float64).mul(2).exp().to(DEVICE)
    entries = entries + entries.T
    entries[7], entries[:, 7] = 0, 0
    return (SelfSystem if own else SchurSystem)(KeptPlan(entries / entries.sum()))


def iterates(of: System) -> Iterates:
    draw = torch.Generator().manual_seed(1)
    right = torch.randn(50, 4, generator=draw, dtype=torch.float64).to(DEVICE) / 50
    right[:, 2] = 0
    most = torch.tensor([100, 100, 100, 3], device=DEVICE)
    size = Iterates(of, right, torch.zeros(4).to(right), most).size.sqrt()
    return Iterates(of, right, torch.tensor([1e-15, 1e-2, 1e-9, 1e-9]).to(size) * size, most)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_step_is_that_in_pytorch(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions end by their goals, by their number of iterations, or never start.

    Images have a part outside the range, which is taken off.
    """
    monkeypatch.setattr(cg_step, "BLOCK", 16)
    of = system(own=own)
    one, other = iterates(of), iterates(of)
    ended = []
    for _ in range(12):
        outside = 1e-3 * of.metric.masses
        one.step(of.times(one.direction) + outside)
        # An image may have any strides.
        other.step_in_triton((of.times(other.direction) + outside).T.contiguous().T)
        ended.append(other.active.tolist())
        assert other.active.tolist() == one.active.tolist()
        assert other.iterations.tolist() == one.iterations.tolist()
        for name in ("values", "left", "size", "unknown"):
            found, expected = getattr(other, name), getattr(one, name)
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-11)
        active = one.active
        torch.testing.assert_close(
            other.direction[:, active], one.direction[:, active], rtol=1e-7, atol=1e-9
        )
    assert ended[0] == [True, True, False, True]
    assert ended[-1][:2] == [True, False]
    assert [row[3] for row in ended[:4]] == [True, True, False, False]
    assert float(other.values[7].abs().max()) == 0


@pytest.mark.slow
def test_a_step_that_rounding_makes_long_is_not_taken() -> None:
    of = system(own=False)
    for image in ("negative", "rounding"):
        found = iterates(of)
        before = found.values.clone()
        exact = of.times(found.direction)
        found._precision = 1e6 if image == "rounding" else 0.0
        found.step_in_triton(-exact if image == "negative" else exact)
        assert not bool(found.active.any())
        assert found.iterations.tolist() == [0, 0, 0, 0]
        torch.testing.assert_close(found.values, before, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_numbers_as_two_halves(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of any size, and one of zeros, keep 22 bits; classes lie apart, padding is 0."""
    monkeypatch.setattr(halves, "BLOCK", 64)
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(150, 3, generator=draw, dtype=torch.float64).to(DEVICE)
    values *= torch.tensor([1e-30, 1e25, 0.0], device=DEVICE)
    weights = torch.rand(150, generator=draw, dtype=torch.float64).to(DEVICE)
    layout = arrange(torch.arange(150, device=DEVICE) % 3, 3)
    packed, scales = halves.to_halves(
        values.T.contiguous().T, layout, weights if weighted else None
    )
    given = values * weights[:, None] if weighted else values
    assert bool((packed[~layout.filled] == 0).all())
    assert bool(packed.isfinite().all())
    found = halves.from_halves(packed.float(), scales, layout, weights)
    expected = weights[:, None] * given
    error = (found - expected).abs().amax(0)
    assert bool((error <= 2.0**-21 * given.abs().amax(0)).all())
    assert float(packed[:, 0, :2].abs().amax(0).min()) >= 2.0**12
