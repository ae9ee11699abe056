"""Passes of Sinkhorn attention as kernels, in the cases that few inputs reach."""

from __future__ import annotations

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.attention import attention, passes
from otdd_flash.attention.passes import Scores
from tests.tiers import slow

TORCH = otdd.ComputeOptions("cpu", backend="torch")
# In the interpreter, and where there is one on a GPU.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def triton(device: str) -> otdd.ComputeOptions:
    return otdd.ComputeOptions(device, backend="triton")


def drawn(
    heads: int, n: int, m: int, d: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(heads, k, d, generator=draw).to(dtype) for k in (n, m, m, n)]


@pytest.mark.parametrize("iterations", [2, *slow([150])])
@pytest.mark.parametrize("far", [passes.FAR, -1.0])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_where_potentials_move_far_in_one_head(monkeypatch, device, far, iterations):
    monkeypatch.setattr(passes, "FAR", far)
    # Three queries bid for two keys and one for the other two: potentials move by log 1.5 and log 2
    # an iteration, exp(u_t - u_c) overflows after 128, and the plan still has entries near 1.
    q, k, v, cotangent = drawn(2, 4, 4, 2, torch.float32)
    q[0] = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    k[0] = torch.tensor([[0.0, 0.0], [0.0, 0.0], [-1e4, 0.0], [-1e4, 0.0]])

    def step(dtype, compute):
        leaves = [each.to(dtype).requires_grad_() for each in (q, k, v)]
        out = otdd.sinkhorn_attention(*leaves, iterations=iterations, compute=compute)
        return torch.autograd.grad(out, leaves, cotangent.to(dtype))

    for mine, true in zip(step(q.dtype, triton(device)), step(torch.float64, TORCH), strict=True):
        assert (mine - true).abs().max() <= 1e-4 * max(1, true.abs().max())


def test_a_far_head_that_stops_early_reads_nothing_that_was_not_written(monkeypatch):
    # Of three keys one is biased by 100; the other head goes on to the last iteration.
    q, k, v, cotangent = drawn(2, 5, 3, 4, torch.float32)
    q[0], k[0] = torch.eye(4)[0], torch.tensor([[200.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    q[1] *= 6
    room = attention._room

    def unwritten(*given):
        made = room(*given)
        for each in made[:3]:
            each.fill_(torch.nan)
        return made

    monkeypatch.setattr(attention, "_room", unwritten)
    monkeypatch.setattr(passes, "FAR", 40.0)
    for compute in (triton("cpu"), TORCH):
        leaves = [each.clone().requires_grad_() for each in (q, k, v)]
        out = otdd.sinkhorn_attention(*leaves, tolerance=1e-3, max_iterations=4, compute=compute)
        for each in torch.autograd.grad(out, leaves, cotangent):
            assert each.isfinite().all()


def test_potentials_of_one_side_alone_may_move_far():
    counts = torch.full((1,), 2, dtype=torch.int32)
    scores = Scores(torch.zeros(1, 3, 2), torch.zeros(1, 4, 2), 1.0, counts, in_triton=False)
    for side, moved in ((0, 0.0), (0, 90.0), (1, 90.0)):
        potentials = torch.zeros(3, 1, 3), torch.zeros(3, 1, 4)
        potentials[side][2] = moved
        lasts = potentials[0][2], potentials[1][2]
        near = scores.earlier(potentials, lasts, potentials).near
        assert near.tolist() == [moved == 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("off", [0.0, 150.0, -150.0])
@pytest.mark.parametrize("device", DEVICES)
def test_a_half_step_by_a_guess_that_is_far_off(device, dtype, off):
    q, k, _, _ = drawn(2, 40, 50, 8, dtype)
    counts, scale = torch.ones(2, dtype=torch.int32), 8**-0.5
    there = [each.to(device) for each in (q, k)]
    scores = Scores(*there, scale, counts.to(device), in_triton=True)
    v, target = torch.randn(2, 50), torch.randn(2, 40)
    v[1, 10:] = -torch.inf
    target[0, 3] = -torch.inf
    expected, found = torch.empty_like(target), torch.empty_like(target, device=device)
    Scores(q, k, scale, counts, in_triton=False).half_step(v, target, 1, expected)
    guess = expected - target + off
    guess[0, 3] = -torch.inf
    scores.half_step(v.to(device), target.to(device), 1, found, guess.to(device))
    assert found[0, 3] == -torch.inf
    assert torch.allclose(found.cpu(), expected, rtol=0, atol=2e-5)
