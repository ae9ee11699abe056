"""Gradients through small plans in one launch, against PyTorch's and float64."""

from __future__ import annotations

import pytest
import reference
import torch
from tiers import slow
from torch import Tensor

from otdd_flash.batched.adjoint import LIMITS, Adjoint, adjoint, plan_gradient

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPED = [
    *(((3, 7), torch.float32), ((4, 4), torch.bfloat16), ((16, 2), torch.float64)),
    *(((1, 1), torch.float16), ((33, 33), torch.bfloat16), ((128, 128), torch.float32)),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(DEVICE)


def inputs(count: int, n: int, m: int, spread: float = 1.0) -> list[Tensor]:
    """Plans, their cotangents, and those of rows and columns."""
    p = reference.balanced_matrices(spread * drawn(count, n, m), 100)
    return [p, drawn(count, n, m, seed=1), drawn(count, n, seed=2), drawn(count, m, seed=3)]


def off(one: Adjoint, other: Adjoint) -> float:
    largest = float(other.weighted.abs().max()) + 1e-30
    return float((one.weighted.double() - other.weighted.double()).abs().max()) / largest


@pytest.mark.slow(after=3)
@pytest.mark.parametrize(("shape", "dtype"), TYPED)
def test_types_and_shapes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    given = inputs(5, *shape)
    p, g, s, t = (part.to(dtype) for part in given)
    found = adjoint(p, g, s, t, in_triton=True)
    computed = torch.promote_types(dtype, torch.float32)
    assert found.weighted.dtype == dtype
    assert found.rows.dtype == found.columns.dtype == computed
    exact = adjoint(p.double(), g.double(), s.double(), t.double(), in_triton=False)
    # Of rows of 1 to 128 entries, at eigenvalues far from 0.
    units = 50 * torch.finfo(computed).eps + torch.finfo(dtype).eps
    assert off(found, exact) <= LIMITS[computed].tolerance + units
    # One constant is free.
    shift = (found.columns - exact.columns).mean(1, keepdim=True)
    close = (
        {"rtol": 1e-4, "atol": 1e-4} if computed == torch.float32 else {"rtol": 0, "atol": 1e-10}
    )
    torch.testing.assert_close(found.columns.double() - shift, exact.columns, **close)
    torch.testing.assert_close(found.rows.double() + shift, exact.rows, **close)
    alone = plan_gradient(p, g, in_triton=True)
    assert torch.equal(alone, adjoint(p, g, in_triton=True).weighted)


@pytest.mark.parametrize("shape", [(63, 4, 4), *slow([(3, 33, 20)])])
def test_a_batch_is_its_members(shape: tuple[int, int, int]) -> None:
    given, count = [part.float() for part in inputs(*shape, 3.0)], shape[0]
    together = adjoint(*given, in_triton=True)
    for k in {0, count // 2, count - 1}:
        alone = adjoint(*(part[k : k + 1] for part in given), in_triton=True)
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one[0], many[k])
    moved = adjoint(*(part.roll(1, 0) for part in given), in_triton=True)
    for one, many in zip(moved, together, strict=True):
        assert torch.equal(one, many.roll(1, 0))


@pytest.mark.parametrize("factor", [1e-30, 1e25])
def test_squares_that_leave_float32(factor: float) -> None:
    p, g = (part.float() for part in inputs(3, 4, 4)[:2])
    for in_triton in (False, True):
        one = adjoint(p, g, in_triton=in_triton).weighted * factor
        other = adjoint(p, g * factor, in_triton=in_triton).weighted
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6 * factor)
