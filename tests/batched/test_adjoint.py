"""Gradients through optimal plans, against the pseudo-inverse and unrolled autograd."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.batched.adjoint import LIMITS, adjoint, plan_gradient

SHAPES = [(1, 1), (1, 4), (2, 2), (3, 7), (7, 3), (5, 5), (9, 11), (33, 70)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def plans(count: int, n: int, m: int, spread: float = 2.0) -> Tensor:
    return (spread * drawn(count, n, m)).softmax(2) / n


def balanced(logits: Tensor, iterations: int) -> Tensor:
    """Matrices whose columns sum to 1, and rows after many iterations; autograd unrolls them."""
    v = torch.zeros_like(logits[..., 0, :])
    for _ in range(iterations):
        u = -(logits + v[..., None, :]).logsumexp(-1)
        v = -(logits + u[..., None]).logsumexp(-2)
    return (logits + u[..., None] + v[..., None, :]).exp()


def gradient(logits: Tensor, cotangents: Tensor, iterations: int) -> Tensor:
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad((balanced(leaf, iterations) * cotangents).sum(), leaf)[0]


def dense(p: Tensor, g: Tensor, *sides: Tensor) -> Tensor:
    alone = [tuple(side[k] for side in sides) or None for k in range(len(p))]
    return torch.stack([reference.adjoint(p[k], g[k], alone[k])[0] for k in range(len(p))])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
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


@pytest.mark.parametrize(
    ("n", "spread", "iterations", "most"), [(4, 4.0, 5, 0.4), (4, 8.0, 20, 0.6)]
)
def test_early_stops_keep_their_own_sums(
    n: int, spread: float, iterations: int, most: float
) -> None:
    """Nearer to the gradient of the solution than the loop's own, and than with sums of 1."""
    draw = torch.Generator().manual_seed(0)
    logits = spread * torch.rand(64, n, n, generator=draw, dtype=torch.float64)
    g = drawn(64, n, n, seed=1)
    exact = gradient(logits, g, 5000)
    early = balanced(logits, iterations)
    ones = torch.ones(n, dtype=torch.float64)
    with_ones = [reference.adjoint(early[k], g[k], sums=(ones, ones))[0] for k in range(64)]

    def off(found: Tensor) -> float:
        return float((found - exact).abs().max())

    implicit, unrolled = off(adjoint(early, g).weighted), off(gradient(logits, g, iterations))
    assert implicit <= most * unrolled
    assert implicit <= off(torch.stack(with_ones)) / 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unrolled_autograd_at_convergence(dtype: torch.dtype) -> None:
    logits, g = 4 * drawn(20, 6, 6).sigmoid(), drawn(20, 6, 6, seed=1)
    exact = gradient(logits, g, 200)
    found = adjoint(balanced(logits, 200).to(dtype), g.to(dtype)).weighted
    assert float((found - exact).abs().max()) <= 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (33, 20)])
def test_a_batch_is_its_members(shape: tuple[int, int], dtype: torch.dtype) -> None:
    given = [part.to(dtype) for part in (plans(70, *shape, 5.0), drawn(70, *shape, seed=1))]
    given += [drawn(70, size, seed=2).to(dtype) for size in shape]
    together = adjoint(*given)
    for k in (0, 1, 37, 69):
        alone = adjoint(*(part[k : k + 1] for part in given))
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one[0], many[k])


def test_chunks_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    given = plans(10, 4, 3), drawn(10, 4, 3, seed=1), drawn(10, 4, seed=2), drawn(10, 3, seed=3)
    together = adjoint(*given)
    monkeypatch.setattr("otdd_flash.batched.adjoint.ENTRIES_AT_ONCE", 36)
    for one, other in zip(adjoint(*given), together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("in_triton", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_has_no_gradient(dtype: torch.dtype, in_triton: bool) -> None:
    """Constants, sums of rows and columns, and permutations, which small changes leave alone."""
    p, unit = plans(6, 5, 5).to(dtype), torch.finfo(dtype).eps
    u, v = drawn(6, 5, seed=1).to(dtype), drawn(6, 5, seed=2).to(dtype)
    for g in (torch.full_like(p, 3.0), u[:, :, None] + v[:, None]):
        assert float(adjoint(p, g, in_triton=in_triton).weighted.abs().max()) <= 50 * unit
    permutations = torch.eye(5, dtype=dtype)[torch.stack([torch.randperm(5) for _ in range(6)])]
    found = adjoint(permutations, drawn(6, 5, 5).to(dtype), in_triton=in_triton)
    assert float(found.weighted.abs().max()) <= 10 * unit
    assert all(bool(part.isfinite().all()) for part in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
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


@pytest.mark.parametrize("in_triton", [False, True])
def test_curvature_of_rounding_size(in_triton: bool) -> None:
    """A direction of curvature lambda moves entries of P of its size, by its root at the most."""
    draw = torch.Generator().manual_seed(3)
    p = balanced(30 * torch.randn(256, 4, 4, generator=draw), 200)
    g = torch.randn(256, 4, 4, generator=draw)
    found, largest = adjoint(p, g, in_triton=in_triton), float(g.abs().max())
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


class Implicit(torch.autograd.Function):
    """Balanced matrices with the gradient of the solution."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.plans = balanced(logits, 50)
        return ctx.plans

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor) -> Tensor:
        return plan_gradient(ctx.plans, cotangents)


@pytest.mark.slow
def test_a_layer_learns_alike() -> None:
    """To sort four numbers, by 4 x 4 matrices of a linear map."""
    points = drawn(64, 4)
    losses = []
    for layer in (Implicit.apply, lambda logits: balanced(logits, 50)):
        weights = (drawn(4, 16, seed=1) / 4).requires_grad_()
        optimizer = torch.optim.SGD([weights], 0.3)
        for _ in range(30):
            matrices = layer((points @ weights).reshape(-1, 4, 4))
            moved = (matrices @ points[:, :, None])[..., 0]
            loss = (moved - points.sort(1).values).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] <= 0.6
    assert abs(losses[0] - losses[1]) <= 1e-6 * losses[1]
