"""Sinkhorn attention on a GPU, against PyTorch's loop in float64 and its own attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import attention_errors
import pytest
import reference
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

import otdd_flash as otdd

pytestmark = pytest.mark.gpu


def drawn(heads: int, n: int, m: int, d: int, e: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(n + m)
    shapes = (heads, n, d), (heads, m, d), (heads, m, e), (heads, n, e)
    return [torch.randn(shape, generator=draw).to("cuda", dtype) for shape in shapes]


def step(run: Any, given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    *points, cotangent = (each.to(dtype) for each in given)
    leaves = [each.detach().requires_grad_() for each in points]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def fused_attention(mask: Tensor) -> Any:
    """PyTorch's own softmax attention without the keys of a mask, by the kernel that has masks."""

    def attended(*points: Tensor) -> Tensor:
        allowed = ~mask[None, :, None].expand(1, -1, points[0].shape[1], -1)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            # It takes widths in eights.
            padded = [pad(each[None], (0, -each.shape[2] % 8)) for each in points]
            scale = points[0].shape[2] ** -0.5
            out = scaled_dot_product_attention(*padded, attn_mask=allowed, scale=scale)
        return out[0, ..., : points[2].shape[2]]

    return attended


def softmax_gradients(given: list[Tensor], mask: Tensor) -> list[Tensor]:
    """Its output and gradients in float64."""
    loop = partial(reference.sinkhorn_attention, iterations=0, key_mask=mask)
    return step(loop, given, torch.float64)


def errors(found: list[Tensor], true: list[Tensor]) -> list[Tensor]:
    return [(one - other).abs().max() for one, other in zip(found, true, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize(
    ("n", "m", "d", "e"),
    [
        *((1, 1, 1, 1), (3, 33, 8, 20), (128, 128, 64, 64), (1000, 777, 64, 64)),
        *((300, 500, 96, 128), (1000, 128, 256, 256), (33, 1000, 16, 256)),
    ],
)
def test_output_and_gradients(
    n: int, m: int, d: int, e: int, iterations: int, dtype: torch.dtype
) -> None:
    given, mask = drawn(3, n, m, d, e, dtype), torch.zeros(3, m, dtype=torch.bool, device="cuda")
    mask[1, 1:] = True

    def loop(*points: Tensor) -> Tensor:
        return reference.sinkhorn_attention(*points, iterations, key_mask=mask)

    def ours(*points: Tensor) -> Tensor:
        return otdd.sinkhorn_attention(*points, iterations=iterations, key_mask=mask)

    exact, theirs = step(loop, given, torch.float64), step(loop, given, dtype)
    # A fused backward has <G, O> of its rounded output, which a loop over stored weights has not:
    # in a head of one key, where every plan is 1 and gradients vanish, that is all of the error.
    fused = errors(step(fused_attention(mask), given, dtype), softmax_gradients(given, mask))
    for mine, rounded, true, other in zip(
        step(ours, given, dtype), theirs, exact, fused, strict=True
    ):
        off = max((rounded - true).abs().max(), other)
        assert (mine - true).abs().max() <= attention_errors.allowed(off, true, dtype)


@pytest.mark.parametrize("options", [{}, {"tolerance": 1e-3}, {"gradient": "implicit"}])
def test_the_processor_finds_the_same(options: dict[str, Any]) -> None:
    given = drawn(4, 200, 150, 32, 32, torch.float32)
    given[0][0] *= 3

    def ours(*points: Tensor) -> Tensor:
        return otdd.sinkhorn_attention(*points, **{"iterations": 20} | options)

    there = step(ours, [each.cpu() for each in given], torch.float64)
    for mine, true in zip(step(ours, given, torch.float32), there, strict=True):
        assert torch.allclose(mine.cpu().double(), true, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"tolerance": 1e-3}, {"gradient": "implicit"}])
def test_graphs_are_captured(options: dict[str, Any]) -> None:
    given = drawn(4, 300, 200, 64, 64, torch.float16)
    leaves = [each.requires_grad_() for each in given[:3]]

    def run() -> tuple[Tensor, ...]:
        out = otdd.sinkhorn_attention(*leaves, **options)
        return out, *torch.autograd.grad(out, leaves, given[3])

    # As PyTorch asks: warm-ups run on a stream of their own, and leave no graph of autograd behind.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [each.detach() for each in run()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(captured, expected, strict=True):
        assert torch.equal(one, other)


def test_a_head_without_keys_is_nan_and_no_other() -> None:
    q, k, v, _ = drawn(3, 40, 50, 16, 16, torch.float16)
    mask = torch.zeros(3, 50, dtype=torch.bool, device="cuda")
    mask[1] = True
    found = otdd.sinkhorn_attention(q, k, v, key_mask=mask)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_linear_in_the_length(backward: bool) -> None:
    given, peaks = drawn(2, 32_768, 32_768, 64, 64, torch.float16), []
    for n in (16_384, 32_768):
        leaves = [each[:, :n].contiguous().requires_grad_(backward) for each in given[:3]]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = otdd.sinkhorn_attention(*leaves)
        if backward:
            out.backward(given[3][:, :n])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # 1 GiB would be a sixteenth of the scores in float32.
    assert peaks[1] <= 2.2 * peaks[0] + 2**21
    assert peaks[1] <= 2**28
