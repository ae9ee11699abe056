"""Gradients through optimal plans, against the pseudo-inverse and unrolled autograd."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.batched.adjoint import LIMITS, adjoint

TYPES = [torch.float32, torch.float64]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def plans(count: int, n: int, m: int, spread: float = 2.0) -> Tensor:
    return (spread * drawn(count, n, m)).softmax(2) / n


def gradient(logits: Tensor, cotangents: Tensor, iterations: int) -> Tensor:
    leaf = logits.clone().requires_grad_()
    balanced = reference.balanced_matrices(leaf, iterations)
    return torch.autograd.grad((balanced * cotangents).sum(), leaf)[0]


def dense(p: Tensor, g: Tensor, *sides: Tensor) -> Tensor:
    alone = [tuple(side[k] for side in sides) or None for k in range(len(p))]
    return torch.stack([reference.adjoint(p[k], g[k], alone[k])[0] for k in range(len(p))])


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 2), (7, 3), (5, 5), (33, 70)])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_pseudo_inverse(shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, m = shape
    p, g = plans(5, n, m).to(dtype), drawn(5, n, m, seed=1).to(dtype)
    p[1, 0], p[2, :, 0], p[3] = 0, 0, 0
    s, t = drawn(5, n, seed=2).to(dtype), drawn(5, m, seed=3).to(dtype)
    # What belongs to no mass has no cotangent, and both sides have the same sum.
    s, t = s * (p.sum(2) > 0), t * (p.sum(1) > 0)
    t -= p.sum(1) * ((t.sum(1) - s.sum(1)) / p.sum((1, 2)).clamp_min(1e-30))[:, None]
    found = adjoint(p, g, s, t)
    unit = torch.finfo(dtype).eps
    expected = dense(p.double(), g.double(), s.double(), t.double())
    # A residual is as much of the right-hand side, and is divided by an eigenvalue's root.
    error = (found.weighted - expected).abs().max()
    assert float(error) <= 10 * LIMITS[dtype].tolerance * float(expected.abs().max())
    # The system itself, whose solutions differ by a constant.
    u, v, p, g = (part.double() for part in (found.rows, found.columns, p, g))
    left = (p * (g - u[:, :, None] - v[:, None])).sum(2) + s
    right = (p * (g - u[:, :, None] - v[:, None])).sum(1) + t
    most = float((p * g).abs().sum((1, 2)).max() + s.abs().max() + t.abs().max())
    for residual in (left, right):
        assert float(residual.abs().max()) <= (30 * unit + LIMITS[dtype].tolerance) * most


@pytest.mark.parametrize(("spread", "iterations", "most"), [(4.0, 5, 0.4), (8.0, 20, 0.6)])
def test_early_stops_keep_their_own_sums(spread: float, iterations: int, most: float) -> None:
    """Nearer to the gradient of the solution than the loop's own, and than with sums of 1."""
    draw = torch.Generator().manual_seed(0)
    logits = spread * torch.rand(64, 4, 4, generator=draw, dtype=torch.float64)
    g = drawn(64, 4, 4, seed=1)
    exact = dense(reference.balanced_matrices(logits, 2000), g)
    early = reference.balanced_matrices(logits, iterations)
    ones = torch.ones(4, dtype=torch.float64)
    with_ones = [reference.adjoint(early[k], g[k], sums=(ones, ones))[0] for k in range(64)]

    def off(found: Tensor) -> float:
        return float((found - exact).abs().max())

    implicit, unrolled = off(adjoint(early, g).weighted), off(gradient(logits, g, iterations))
    assert implicit <= most * unrolled
    assert implicit <= off(torch.stack(with_ones)) / 50


@pytest.mark.parametrize("dtype", TYPES)
def test_unrolled_autograd_at_convergence(dtype: torch.dtype) -> None:
    logits, g = 4 * drawn(20, 6, 6).sigmoid(), drawn(20, 6, 6, seed=1)
    exact = gradient(logits, g, 60)
    found = adjoint(reference.balanced_matrices(logits, 60).to(dtype), g.to(dtype)).weighted
    assert float((found - exact).abs().max()) <= 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 4), torch.float64), ((3, 7), torch.float32), ((33, 20), torch.float64)],
)
def test_a_batch_is_its_members(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [part.to(dtype) for part in (plans(70, *shape, 5.0), drawn(70, *shape, seed=1))]
    given += [drawn(70, size, seed=2).to(dtype) for size in shape]
    together = adjoint(*given)
    for k in (0, 37, 69):
        alone = adjoint(*(part[k : k + 1] for part in given))
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one[0], many[k])
    monkeypatch.setattr("otdd_flash.batched.adjoint.ENTRIES_AT_ONCE", 30 * shape[0] * shape[1])
    for one, other in zip(adjoint(*given), together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_has_no_gradient(dtype: torch.dtype) -> None:
    """Constants, sums of rows and columns, and permutations, which small changes leave alone."""
    p, unit = plans(6, 5, 5).to(dtype), torch.finfo(dtype).eps
    u, v = drawn(6, 5, seed=1).to(dtype), drawn(6, 5, seed=2).to(dtype)
    for g in (torch.full_like(p, 3.0), u[:, :, None] + v[:, None]):
        assert float(adjoint(p, g).weighted.abs().max()) <= 50 * unit
    permutations = torch.eye(5, dtype=dtype)[torch.stack([torch.randperm(5) for _ in range(6)])]
    found = adjoint(permutations, drawn(6, 5, 5).to(dtype))
    assert float(found.weighted.abs().max()) <= 10 * unit
    assert all(bool(part.isfinite().all()) for part in found)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("coupling", [0.0, 1e-30, 1e-9])
def test_blocks(coupling: float, dtype: torch.dtype) -> None:
    """Decomposable, or nearly: the gradient of each block."""
    p, g = torch.full((8, 7, 7), coupling, dtype=dtype), drawn(8, 7, 7, seed=1).to(dtype)
    blocks = slice(0, 3), slice(3, 7)
    for block in blocks:
        p[:, block, block] = plans(8, 7, 7)[:, block, block].to(dtype)
    found = adjoint(p, g).weighted
    for block in blocks:
        alone = dense(p[:, block, block].double(), g[:, block, block].double())
        error = (found[:, block, block] - alone).abs().max()
        assert float(error) <= 100 * torch.finfo(dtype).eps + 100 * coupling
    assert float(found[:, :3, 3:].abs().max()) <= 100 * coupling


def test_curvature_of_rounding_size() -> None:
    """A direction of curvature lambda moves entries of P of its size, by its root at the most."""
    draw = torch.Generator().manual_seed(3)
    p = reference.balanced_matrices(30 * torch.randn(128, 4, 4, generator=draw), 200)
    g = torch.randn(128, 4, 4, generator=draw)
    found, largest = adjoint(p, g), float(g.abs().max())
    error = (found.weighted - dense(p.double(), g.double())).abs().max()
    assert float(error) <= (8 * torch.finfo(torch.float32).eps / 2) ** 0.5 * largest
    assert float(found.columns.abs().max()) <= 10 * largest


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_cotangents_that_are_not_finite(value: float) -> None:
    p, g = plans(3, 4, 5), drawn(3, 4, 5, seed=1)
    spoilt = g.clone()
    spoilt[1, 2, 3] = value
    found, clean = adjoint(p, spoilt), adjoint(p, g)
    for one, other in zip(found, clean, strict=True):
        assert bool(one[1].isnan().all())
        assert torch.equal(one[[0, 2]], other[[0, 2]])
    assert all(bool(part.isnan().all()) for part in adjoint(p[1:2], spoilt[1:2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_widened_first(dtype: torch.dtype) -> None:
    p, g = plans(3, 4, 5).to(dtype), drawn(3, 4, 5, seed=1).to(dtype)
    found, wide = adjoint(p, g), adjoint(p.float(), g.float())
    assert found.rows.dtype == found.columns.dtype == torch.float32
    assert torch.equal(found.weighted, wide.weighted.to(dtype))
    assert torch.equal(found.rows, wide.rows)


@pytest.mark.parametrize("shape", [(0, 4, 4), (3, 1, 1)])
def test_smallest_batches(shape: tuple[int, int, int]) -> None:
    found = adjoint(torch.ones(shape), torch.ones(shape))
    assert found.weighted.shape == shape
    assert not found.weighted.any()


def test_sums_that_are_tiny() -> None:
    """1 / r overflows."""
    p, g = plans(3, 4, 5).float(), drawn(3, 4, 5, seed=1).float()
    p[:, 1] *= 1e-39
    assert all(bool(part.isfinite().all()) for part in adjoint(p, g))
