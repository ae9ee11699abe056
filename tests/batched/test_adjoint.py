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


def dense(p: Tensor, g: Tensor, *sides: Tensor) -> Tensor:
    alone = [tuple(side[k] for side in sides) or None for k in range(len(p))]
    return torch.stack([reference.adjoint(p[k], g[k], alone[k])[0] for k in range(len(p))])


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (5, 5), (33, 70)])
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


def test_early_stops_keep_their_own_sums() -> None:
    """Nearer to the gradient of the solution than the loop's own, and than with sums of 1."""
    spread, iterations, most = 8.0, 20, 0.6
    draw = torch.Generator().manual_seed(0)
    logits = spread * torch.rand(64, 4, 4, generator=draw, dtype=torch.float64)
    g = drawn(64, 4, 4, seed=1)
    exact = dense(reference.balanced_matrices(logits, 2000), g)
    early = reference.balanced_matrices(logits, iterations)
    ones = torch.ones(4, dtype=torch.float64)
    with_ones = [reference.adjoint(early[k], g[k], sums=(ones, ones))[0] for k in range(64)]

    def off(found: Tensor) -> float:
        return float((found - exact).abs().max())

    leaf = logits.clone().requires_grad_()
    balanced = reference.balanced_matrices(leaf, iterations)
    unrolled = off(torch.autograd.grad((balanced * g).sum(), leaf)[0])
    implicit = off(adjoint(early, g).weighted)
    assert implicit <= most * unrolled
    assert implicit <= off(torch.stack(with_ones)) / 50


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


def test_sums_that_are_tiny() -> None:
    """1 / r overflows."""
    p, g = plans(3, 4, 5).float(), drawn(3, 4, 5, seed=1).float()
    p[:, 1] *= 1e-39
    assert all(bool(part.isfinite().all()) for part in adjoint(p, g))
