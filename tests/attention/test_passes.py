"""Passes of Sinkhorn attention as kernels, in the cases that few inputs reach."""

from __future__ import annotations

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.attention import passes
from otdd_flash.attention.passes import Scores

TRITON, TORCH = (otdd.ComputeOptions("cpu", backend=backend) for backend in ("triton", "torch"))


def drawn(
    heads: int, n: int, m: int, d: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(heads, k, d, generator=draw).to(dtype) for k in (n, m, m, n)]


@pytest.mark.parametrize("iterations", [2, 150])
@pytest.mark.parametrize("far", [passes.FAR, -1.0])
def test_gradients_where_potentials_move_far_in_one_head(monkeypatch, far, iterations):
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

    for mine, true in zip(step(q.dtype, TRITON), step(torch.float64, TORCH), strict=True):
        assert (mine - true).abs().max() <= 1e-4 * max(1, true.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("off", [0.0, 150.0, -150.0])
def test_a_half_step_by_a_guess_that_is_far_off(dtype, off):
    q, k, _, _ = drawn(2, 40, 50, 8, dtype)
    counts, scale = torch.ones(2, dtype=torch.int32), 8**-0.5
    scores = Scores(q, k, scale, counts, in_triton=True)
    v, target = torch.randn(2, 50), torch.randn(2, 40)
    v[1, 10:] = -torch.inf
    target[0, 3] = -torch.inf
    expected, found = torch.empty_like(target), torch.empty_like(target)
    Scores(q, k, scale, counts, in_triton=False).half_step(v, target, 1, expected)
    guess = expected - target + off
    guess[0, 3] = -torch.inf
    scores.half_step(v, target, 1, found, guess)
    assert found[0, 3] == -torch.inf
    assert torch.allclose(found, expected, rtol=0, atol=2e-5)
