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


@pytest.mark.parametrize("far", [passes.FAR, -1.0])
@pytest.mark.parametrize("iterations", [2, 5])
def test_gradients_where_potentials_move_far_in_one_head(monkeypatch, far, iterations):
    monkeypatch.setattr(passes, "FAR", far)
    one = drawn(1, 20, 30, 8, torch.float32, seed=8)
    q, k, v, cotangent = (torch.cat((each, each)) for each in one)
    q[1] *= 400
    mask = torch.zeros(2, 30, dtype=torch.bool)
    mask[0, 25:] = True
    options = {"iterations": iterations, "key_mask": mask}

    def step(dtype, compute):
        leaves = [each.to(dtype).requires_grad_() for each in (q, k, v)]
        out = otdd.sinkhorn_attention(*leaves, **options, compute=compute)
        return torch.autograd.grad(out, leaves, cotangent.to(dtype))

    exact = step(torch.float64, TORCH)
    for mine, other, true in zip(step(q.dtype, TRITON), step(q.dtype, TORCH), exact, strict=True):
        for head in range(2):
            off = (other[head] - true[head]).abs().max()
            assert (mine[head] - true[head]).abs().max() <= 4 * off + 1e-5


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
