"""Sinkhorn attention against a float64 loop over stored scores and its autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import otdd_flash as otdd
from otdd_flash.attention import passes
from otdd_flash.attention.operation import attend_now

BACKENDS = ("torch", "triton")
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
Points = tuple[Tensor, Tensor, Tensor]


def on(backend: str) -> otdd.ComputeOptions:
    return otdd.ComputeOptions("cpu", backend=backend)


def drawn(
    heads: int, n: int, m: int, d: int = 8, e: int = 6, dtype: torch.dtype = torch.float32
) -> Points:
    draw = torch.Generator().manual_seed(n + m)
    shapes = (heads, n, d), (heads, m, d), (heads, m, e)
    return tuple(torch.randn(shape, generator=draw).to(dtype) for shape in shapes)


def with_gradients(run: Callable[..., Tensor], points: Points, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients by q, k and v, for a fixed cotangent of the points' own type."""
    leaves = [each.to(dtype).requires_grad_() for each in points]
    out = run(*leaves)
    draw = torch.Generator().manual_seed(7)
    cotangent = torch.randn(out.shape, generator=draw).to(points[0].dtype).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def assert_as_good_as_pytorch(points: Points, iterations: int, backend: str, **more: Any) -> None:
    """Errors of output and gradients are at most twice those of the loop in the same type."""

    def loop(*given: Tensor) -> Tensor:
        return reference.sinkhorn_attention(*given, iterations, **more)

    def ours(*given: Tensor) -> Tensor:
        options = {"iterations": iterations, "compute": on(backend)}
        return otdd.sinkhorn_attention(*given, **options, **more)

    dtype = points[0].dtype
    exact = with_gradients(loop, points, torch.float64)
    rounded = with_gradients(loop, points, dtype)
    for mine, theirs, true in zip(with_gradients(ours, points, dtype), rounded, exact, strict=True):
        assert mine.dtype == dtype
        # Slopes are differences of products with values; few of them may be exact by luck.
        most = 2 * (theirs - true).abs().max() + 24 * UNIT[dtype] * max(1, true.abs().max())
        assert (mine - true).abs().max() <= most


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 3), (3, 1), (33, 3), (33, 128)])
def test_output_and_gradients(n: int, m: int, iterations: int, backend: str) -> None:
    assert_as_good_as_pytorch(drawn(2, n, m), iterations, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "m", "d"), [(128, 128, 64), (1000, 130, 20), (140, 1000, 256)])
def test_output_and_gradients_of_many(n: int, m: int, d: int, backend: str) -> None:
    assert_as_good_as_pytorch(drawn(2, n, m, d, 48), 3, backend)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    # Triton's interpreter has no products of bfloat16.
    [(torch.float16, "torch"), (torch.bfloat16, "torch"), (torch.float16, "triton")],
)
def test_half_types(dtype: torch.dtype, backend: str) -> None:
    assert_as_good_as_pytorch(drawn(2, 40, 33, dtype=dtype), 2, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("iterations", [0, 2])
def test_a_mask_of_keys(iterations: int, backend: str) -> None:
    points, mask = drawn(3, 33, 20), torch.zeros(3, 20, dtype=torch.bool)
    mask[1, 0] = mask[2, 7:] = True
    assert_as_good_as_pytorch(points, iterations, backend, key_mask=mask)
    options = {"iterations": iterations, "compute": on(backend)}
    found = otdd.sinkhorn_attention(*points, key_mask=mask, **options)
    q, k, v = (each[2:] for each in points)
    alone = otdd.sinkhorn_attention(q, k[:, :7], v[:, :7], **options)
    assert torch.allclose(found[2:], alone, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_of_the_first_block(backend: str) -> None:
    """Where no key so far has a part there is no largest score."""
    points, mask = drawn(1, 5, 300), torch.arange(300)[None] < 290
    assert_as_good_as_pytorch(points, 1, backend, key_mask=mask)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("iterations", [0, 3])
def test_scores_of_a_thousand(iterations: int, backend: str) -> None:
    """Plans of different iterations have hardly an entry in common."""
    q, k, v = drawn(2, 33, 40)
    scale = 1000 / float((q @ k.mT).abs().max())
    assert_as_good_as_pytorch((q, k, v), iterations, backend, scale=scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_iteration_is_softmax_attention(backend: str) -> None:
    q, k, v = (each.unflatten(0, (2, 3)) for each in drawn(6, 33, 20))
    found = otdd.sinkhorn_attention(q, k, v, iterations=0, compute=on(backend))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_rows_and_columns(backend: str) -> None:
    q, k, _ = drawn(2, 33, 20)
    values = torch.eye(20).expand(2, -1, -1)
    options = {"tolerance": 1e-4, "compute": on(backend)}
    plans = otdd.sinkhorn_attention(q, k, values, **options)
    assert (plans.sum(2) - 1).abs().max() <= 1e-6
    assert (plans.sum(1) * 20 / 33 - 1).abs().max() <= 1.01e-4
    assert (otdd.sinkhorn_attention(q, k, values).sum(1) * 20 / 33 - 1).abs().max() > 2e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_keys_and_their_order(backend: str) -> None:
    q, k, v = drawn(2, 33, 20)
    same = otdd.sinkhorn_attention(q, k[:, :1].expand_as(k), v, compute=on(backend))
    assert torch.allclose(same, v.mean(1, keepdim=True).expand_as(same), atol=1e-6)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    found = otdd.sinkhorn_attention(q, k, v, compute=on(backend))
    other = otdd.sinkhorn_attention(q, k[:, order], v[:, order], compute=on(backend))
    assert torch.allclose(found, other, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_stops_by_itself(backend: str) -> None:
    q, k, v = (each.double() if backend == "torch" else each for each in drawn(3, 20, 30))
    q[0] *= 3
    in_triton, scale = backend == "triton", 8**-0.5
    counts = attend_now(q, k, v, None, scale, 100, 1e-3, True, in_triton)[3].tolist()
    assert counts[0] > max(counts[1:])

    def ours(*given: Tensor) -> Tensor:
        return otdd.sinkhorn_attention(*given, tolerance=1e-3, compute=on(backend))

    def loop(*given: Tensor) -> Tensor:
        parts = zip(counts, *given, strict=True)
        return torch.stack([reference.sinkhorn_attention(*of, made) for made, *of in parts])

    found = with_gradients(ours, (q, k, v), q.dtype)
    for mine, true in zip(found, with_gradients(loop, (q, k, v), torch.float64), strict=True):
        assert torch.allclose(mine.double(), true, atol=1e-5 if in_triton else 1e-12)
    # One of them was the first to have these sums.
    columns = reference.sinkhorn_attention(q[:1], k[:1], torch.eye(30)[None].to(q), counts[0] - 1)
    assert (columns.sum(1) * 30 / 20 - 1).abs().max() > 1e-3
    most = otdd.sinkhorn_attention(q, k, v, tolerance=1e-9, max_iterations=2, compute=on(backend))
    given = otdd.sinkhorn_attention(q, k, v, iterations=2, compute=on(backend))
    assert torch.allclose(most, given, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_implicit_gradient_is_that_of_the_limit(backend: str) -> None:
    points = drawn(2, 12, 17)
    mask = torch.zeros(2, 17, dtype=torch.bool)
    mask[1, 3:6] = True

    def limit(*given: Tensor) -> Tensor:
        return reference.sinkhorn_attention(*given, 60, key_mask=mask)

    def ours(*given: Tensor) -> Tensor:
        options = {"iterations": 25, "gradient": "implicit", "compute": on(backend)}
        return otdd.sinkhorn_attention(*given, key_mask=mask, **options)

    exact = with_gradients(limit, points, torch.float64)
    for mine, true in zip(with_gradients(ours, points, torch.float32), exact, strict=True):
        assert torch.allclose(mine.double(), true, atol=2e-5)
    if backend == "torch":
        for mine, true in zip(with_gradients(ours, points, torch.float64), exact, strict=True):
            assert torch.allclose(mine, true, atol=1e-9)


def test_a_system_that_is_not_solved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otdd_flash.attention.operation.STEPS", 1)
    q, k, v = (each.requires_grad_() for each in drawn(1, 12, 17))
    found = otdd.sinkhorn_attention(q, k, v, iterations=25, gradient="implicit")
    with pytest.warns(otdd.NotConvergedWarning, match=r"relative residual of \d\.\de"):
        found.square().sum().backward()


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that an operation made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.untyped_storage().nbytes() // each.itemsize)
        return made


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_nothing_has_the_size_of_the_scores(gradient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "BLOCK_SCORES", 4000)
    points, iterations, kept = drawn(2, 300, 400), 3, []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor
    )

    def run(*given: Tensor) -> Tensor:
        return otdd.sinkhorn_attention(*given, iterations=iterations, gradient=gradient)

    with Largest() as largest, hooks:
        mine = with_gradients(run, points, torch.float32)
    assert largest.numbers <= 8000
    slots = iterations + 1 if gradient == "unrolled" else 1
    ends = 2 * (300 * (8 + 6) + 400 * (8 + 6)) + 2
    assert sum(kept) <= ends + 2 * slots * (300 + 400)
    monkeypatch.undo()
    for one, other in zip(mine, with_gradients(run, points, torch.float32), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_finite_in_float16(backend: str) -> None:
    points = tuple((1000 * each.sign()).half() for each in drawn(1, 33, 20, 16))
    run = on(backend)
    found = with_gradients(
        lambda *given: otdd.sinkhorn_attention(*given, compute=run), points, torch.float16
    )
    assert found[0].isfinite().all()
    assert found[0].abs().max() <= 1000


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_a_second_derivative_is_refused(gradient: str) -> None:
    q, k, v = (each.requires_grad_() for each in drawn(1, 4, 5))
    found = otdd.sinkhorn_attention(q, k, v, gradient=gradient, iterations=20)
    (first,) = torch.autograd.grad(found.square().sum(), q, create_graph=True)
    with pytest.raises(otdd.InputError, match="taken once"):
        torch.autograd.grad(first.sum(), q)


def test_leading_dimensions_strides_and_nothing() -> None:
    q, k, v = (each.unflatten(0, (2, 3)) for each in drawn(6, 5, 4))
    found = otdd.sinkhorn_attention(q, k, v)
    for b in range(2):
        alone = otdd.sinkhorn_attention(q[b].mT.contiguous().mT, k[b], v[b])
        assert torch.allclose(found[b], alone, atol=1e-6)
    assert otdd.sinkhorn_attention(q[0, 0], k[0, 0], v[0, 0]).shape == (5, 6)
    mask = torch.tensor([[[False, True, True, False]]])
    masked = otdd.sinkhorn_attention(q, k, v, key_mask=mask)
    fewer = otdd.sinkhorn_attention(q, k[..., ::3, :], v[..., ::3, :])
    assert torch.allclose(masked, fewer, atol=1e-6)
    empty = q[:0].requires_grad_()
    found = otdd.sinkhorn_attention(empty, k[:0], v[:0])
    assert found.shape == (0, 3, 5, 6)
    assert torch.autograd.grad(found.sum(), empty)[0].shape == empty.shape
    assert not otdd.sinkhorn_attention(q.requires_grad_(), k, v, gradient="none").requires_grad


Q, K, V = drawn(2, 4, 5)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((Q, K[:1], V), {}, r"shapes \(..., n, d\), .* got \(2, 4, 8\), \(1, 5, 8\), \(2"),
        ((Q, K[..., :7], V), {}, r"shapes \(..., n, d\)"),
        ((Q, K, V[:, :4]), {}, r"shapes \(..., n, d\)"),
        ((Q, K.half(), V), {}, "of one type, float16, .* torch.float16 on cpu .*convert"),
        ((Q.int(), K.int(), V.int()), {}, "of one type, float16"),
        ((Q[:, :0], K, V), {}, "with d and e of 1 to 256, got"),
        ((Q, K, V.repeat(1, 1, 50)), {}, "with d and e of 1 to 256, got"),
        ((Q, K, V), {"iterations": -1}, "iterations must be"),
        ((Q, K, V), {"tolerance": 0.0}, "tolerance must be positive"),
        ((Q, K, V), {"scale": math.nan}, "scale must be"),
        ((Q, K, V), {"gradient": "exact"}, "unknown gradient 'exact'; choose"),
        ((Q, K, V), {"key_mask": torch.zeros(2, 4).bool()}, r"bool of shape \(..., 5\), got"),
        ((Q, K, V), {"key_mask": torch.zeros(3, 5).bool()}, r"bool of shape \(..., 5\), got"),
        ((Q, K, V), {"key_mask": torch.zeros(2, 5)}, r"bool of shape \(..., 5\), got"),
        ((Q, K, V), {"key_mask": torch.ones(5).bool()}, "leaves out all keys of a head"),
    ],
)
def test_what_is_refused(given: Points, options: dict[str, Any], message: str) -> None:
    with pytest.raises(otdd.InputError, match=message):
        otdd.sinkhorn_attention(*given, **options)


def test_in_autocast() -> None:
    points = drawn(2, 12, 9)
    with torch.autocast("cpu", torch.bfloat16):
        found = otdd.sinkhorn_attention(*points)
    assert found.dtype == torch.bfloat16
    rounded = otdd.sinkhorn_attention(*(each.bfloat16() for each in points))
    assert torch.equal(found, rounded)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tolerance": 1e-3}, {"gradient": "implicit"}])
def test_compiled(options: dict[str, Any]) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return otdd.sinkhorn_attention(2 * q, k, v, **options).square()

    points = drawn(2, 12, 9)
    plain = with_gradients(layer, points, torch.float32)
    compiled = with_gradients(torch.compile(layer, fullgraph=True), points, torch.float32)
    for one, other in zip(plain, compiled, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
