"""Sinkhorn attention against a float64 loop over stored scores and its autograd."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from attention_errors import allowed
from live_bytes import LargestTensor
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.attention import passes
from otdd_flash.attention.attention import attend, attend_now

BACKENDS = ("torch", "triton")
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


def assert_as_good_as_pytorch(
    points: Points, iterations: int, backend: str, size: float = 1.0, **more: Any
) -> None:
    """Errors of output and gradients are at most twice those of the loop in the same type.

    `size` is that of queries and keys.
    """

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
        most = allowed((theirs - true).abs().max(), true, dtype, size)
        assert (mine - true).abs().max() <= most


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 3), (3, 1), (33, 3), (33, 128)])
def test_output_and_gradients(n: int, m: int, iterations: int, backend: str) -> None:
    assert_as_good_as_pytorch(drawn(2, n, m), iterations, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "m", "d"), [(128, 128, 64), (333, 130, 20), (140, 333, 256)])
def test_output_and_gradients_of_many(n: int, m: int, d: int, backend: str) -> None:
    assert_as_good_as_pytorch(drawn(2, n, m, d, 48), 3, backend)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    # Triton's interpreter has no products of bfloat16.
    [(torch.float16, "torch"), (torch.bfloat16, "torch"), (torch.float16, "triton")],
)
def test_half_types(dtype: torch.dtype, backend: str) -> None:
    assert_as_good_as_pytorch(drawn(2, 40, 33, dtype=dtype), 2, backend)


def test_what_is_rounded_cancels() -> None:
    """Of values with a mean, a gradient is a small difference of products with a plan."""
    q, k, v = drawn(2, 40, 33, dtype=torch.float16)
    points = q, k, v + 100
    exact, *both = (
        with_gradients(
            lambda *given, to=to: otdd.sinkhorn_attention(*given, compute=on(to)), points, dtype
        )
        for to, dtype in (("torch", torch.float64), ("torch", q.dtype), ("triton", q.dtype))
    )
    theirs, mine = (
        [float((one - true).abs().max()) for one, true in zip(each, exact, strict=True)]
        for each in both
    )
    # PyTorch passes do not round the plan.
    assert all(one <= 1.7 * other for one, other in zip(mine[1:3], theirs[1:3], strict=True))


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
def test_scores_and_entries_of_a_thousand(iterations: int, backend: str) -> None:
    """Plans of different iterations have hardly an entry in common."""
    q, k, v = drawn(2, 33, 40)
    scale = 1000 / float((q @ k.mT).abs().max())
    assert_as_good_as_pytorch((q, k, v), iterations, backend, scale=scale)
    assert_as_good_as_pytorch((1000 * q.sign(), 1000 * k.sign(), v), iterations, backend, size=1e3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_keys_and_their_order(backend: str) -> None:
    q, k, v = drawn(2, 33, 20)
    same = otdd.sinkhorn_attention(q, k[:, :1].expand_as(k), v, compute=on(backend))
    assert torch.allclose(same, v.mean(1, keepdim=True).expand_as(same), atol=1e-6)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    found = otdd.sinkhorn_attention(q, k, v, compute=on(backend))
    other = otdd.sinkhorn_attention(q, k[:, order], v[:, order], compute=on(backend))
    assert torch.allclose(found, other, atol=1e-6)


@pytest.mark.slow(after=6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("most", "masked"), [(4, True), (100, True), (2, False), (100, False)])
def test_a_head_stops_by_itself(most: int, masked: bool, backend: str) -> None:
    """With few iterations, too, which a kernel adds up without a loop."""
    in_triton, tolerance = backend == "triton", 0.02
    dtype, near = (torch.float32, 1e-5) if in_triton else (torch.float64, 1e-12)
    q, k, v = (each.to(dtype) for each in drawn(3, 20, 30))
    q[0] *= 3
    # Which needs no iteration.
    q[2] *= 1e-3
    out = torch.zeros(3, 30, dtype=torch.bool)
    out[:, 4] = out[1, 7:20] = masked
    mask = out if masked else None
    stops = tolerance, True, True, in_triton
    counts = attend_now(q, k, v, mask, 8**-0.5, most, *stops)[3].tolist()
    assert counts[2] == 0 < counts[1] <= counts[0] <= most
    # Each made the first iteration that ends with these sums, or all of them.
    for h in range(3):
        q_, k_, target = q[h : h + 1], k[h : h + 1, ~out[h]], 20 / int((~out[h]).sum())
        values = torch.eye(k_.shape[1])[None].to(dtype)
        for made in range(most + 1):
            sums = reference.sinkhorn_attention(q_, k_, values, made).sum(1) / target
            if (sums - 1).abs().max() <= tolerance:
                break
        assert made == counts[h]

    def ours(*given: Tensor) -> Tensor:
        options = {"tolerance": tolerance, "max_iterations": most, "key_mask": mask}
        return otdd.sinkhorn_attention(*given, **options, compute=on(backend))

    def loop(*given: Tensor) -> Tensor:
        parts = zip(counts, *given, out, strict=True)
        return torch.stack(
            [reference.sinkhorn_attention(*of, made, key_mask=left) for made, *of, left in parts]
        )

    exact = with_gradients(loop, (q, k, v), torch.float64)
    for mine, true in zip(with_gradients(ours, (q, k, v), dtype), exact, strict=True):
        assert torch.allclose(mine.double(), true, atol=near)


@pytest.mark.slow(after=1)
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
    monkeypatch.setattr("otdd_flash.attention.attention.CG_STEPS", 1)
    q, k, v = (each.requires_grad_() for each in drawn(1, 12, 17))
    found = otdd.sinkhorn_attention(q, k, v, iterations=25, gradient="implicit")
    with pytest.warns(otdd.NotConvergedWarning, match=r"relative residual of \d\.\de"):
        found.square().sum().backward()


@pytest.mark.parametrize(("iterations", "warned"), [(2, True), (40, False)])
def test_iterations_that_have_not_converged_are_told(iterations: int, warned: bool) -> None:
    q, k, v = (each.requires_grad_() for each in drawn(2, 12, 17))
    mask = torch.arange(17) > 14
    options = {"gradient": "implicit", "iterations": iterations, "key_mask": mask}
    found = otdd.sinkhorn_attention(q, k, v, **options).square().sum()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found.backward()
    told = [str(each.message) for each in caught]
    assert bool(told) == warned, told
    assert all("column sums are off by 0." in each for each in told)


def test_a_nearly_singular_system() -> None:
    """Parts of a plan with hardly a weight between them: rounding grows along the null vector."""
    draw = torch.Generator().manual_seed(0)
    shapes = (24, 12, 4), (24, 9, 4), (24, 9, 3)
    points = tuple(torch.randn(shape, generator=draw) for shape in shapes)

    def ours(*given: Tensor) -> Tensor:
        options = {"scale": 10.0, "iterations": 500, "gradient": "implicit"}
        return otdd.sinkhorn_attention(*given, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = with_gradients(ours, points, torch.float32)
    for mine, true in zip(found, with_gradients(ours, points, torch.float64), strict=True):
        assert (mine - true).abs().max() <= 1e-3 * true.abs().max()


def test_a_head_whose_system_is_solved_waits() -> None:
    q, k, v = (each.requires_grad_() for each in drawn(2, 12, 17))
    out = otdd.sinkhorn_attention(q, k, v, gradient="implicit", iterations=30)
    for each in torch.autograd.grad(out[1].square().sum(), (q, k, v)):
        assert not each[0].any()
        assert each.isfinite().all()


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_passes_that_nobody_needs_are_not_made(
    gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("gradient", "plan_product"):
        made = getattr(passes.Scores, name)
        monkeypatch.setattr(
            passes.Scores,
            name,
            lambda *given, name=name, made=made: (calls.append(name), made(*given))[1],
        )
    points = drawn(2, 12, 9)
    for needed, made in (((0,), 1), ((1,), 1), ((2,), 0), ((0, 2), 1), ((0, 1, 2), 2)):
        leaves = [each.detach().requires_grad_(i in needed) for i, each in enumerate(points)]
        out = otdd.sinkhorn_attention(*leaves, iterations=3, gradient=gradient)
        calls.clear()
        out.square().sum().backward()
        assert calls.count("gradient") == made
        assert (calls.count("plan_product") == 1) == (needed == (2,))
        assert [each.grad is not None for each in leaves] == [i in needed for i in range(3)]


def test_vectors_are_kept_where_a_gradient_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []

    def watched(*given: Any) -> tuple[Tensor, ...]:
        found = attend(*given)
        kept.append(len(found[1]) > 1)
        return found

    monkeypatch.setattr("otdd_flash.attention.attention.attend", watched)
    q, k, v = drawn(2, 12, 9)
    with torch.no_grad():
        otdd.sinkhorn_attention(q.clone().requires_grad_(), k, v)
    otdd.sinkhorn_attention(q, k, v)
    otdd.sinkhorn_attention(q, k, v.clone().requires_grad_())
    q.requires_grad_()
    otdd.sinkhorn_attention(q, k, v, gradient="none")
    otdd.sinkhorn_attention(q, k, v, gradient="implicit")
    assert not any(kept)
    otdd.sinkhorn_attention(q, k, v)
    assert kept[-1]


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_nothing_has_the_size_of_the_scores(gradient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "BLOCK_SCORES", 4000)
    points, iterations, kept = drawn(2, 300, 400), 3, []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor
    )

    def run(*given: Tensor) -> Tensor:
        # Its sums are in the vectors.
        mask = torch.arange(400) == 7
        options = {"iterations": iterations, "gradient": gradient, "key_mask": mask}
        return otdd.sinkhorn_attention(*given, **options)

    with LargestTensor() as largest, hooks:
        mine = with_gradients(run, points, torch.float32)
    assert largest.numbers <= 8000
    slots = iterations + 1 if gradient == "unrolled" else 1
    ends = 2 * (300 * (8 + 6) + 400 * (8 + 6)) + 2
    assert sum(kept) == ends + 2 * slots * (300 + 400)
    monkeypatch.undo()
    for one, other in zip(mine, with_gradients(run, points, torch.float32), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_finite_in_float16(backend: str) -> None:
    q, k, v = drawn(1, 33, 20, 16)
    points = tuple(each.half() for each in (1000 * q.sign(), 1000 * k.sign(), v))
    run = on(backend)
    found = with_gradients(
        lambda *given: otdd.sinkhorn_attention(*given, compute=run), points, torch.float16
    )
    assert all(each.isfinite().all() for each in found)
    assert found[0].abs().max() <= v.abs().max()
    # Of ties: most weights are 0 or equal.
    assert found[1].any()


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
MASK = r"bool of shape \(2, 5\), or of leading dimensions that broadcast to that, got"


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((Q, K[:1], V), {}, r"equal leading .* got shapes \(2, 4, 8\), \(1, 5, 8\), .* expand"),
        ((Q, K[..., :7], V), {}, r"shapes \(..., n, d\), .* got \(2, 4, 8\), \(2, 5, 7\), \(2"),
        ((Q, K, V[:, :4]), {}, r"shapes \(..., n, d\)"),
        ((Q[0, 0], K, V), {}, r"shapes \(..., n, d\)"),
        ((Q, K.half(), V), {}, "of one type, float16, .* torch.float16 on cpu .*convert"),
        ((Q.int(), K.int(), V.int()), {}, "of one type, float16"),
        ((Q[:, :0], K, V), {}, "with n and m at least 1, and d and e of 1 to 256, got"),
        ((Q, K, V[..., :0]), {}, "d and e of 1 to 256, got"),
        ((Q, K, V.repeat(1, 1, 50)), {}, "d and e of 1 to 256, got"),
        ((Q, K, V), {"iterations": -1}, "iterations must be"),
        ((Q, K, V), {"tolerance": 0.0}, "tolerance must be positive"),
        ((Q, K, V), {"scale": math.nan}, "scale must be"),
        ((Q, K, V), {"gradient": "exact"}, "unknown gradient 'exact'; choose"),
        ((Q, K, V), {"key_mask": torch.zeros(2, 4).bool()}, MASK + r" torch.bool of .*\(2, 4\)"),
        ((Q, K, V), {"key_mask": torch.zeros(3, 5).bool()}, MASK + r" torch.bool of .*\(3, 5\)"),
        ((Q, K, V), {"key_mask": torch.zeros(1, 1, 5).bool()}, MASK),
        ((Q, K, V), {"key_mask": torch.tensor(True)}, MASK),
        ((Q, K, V), {"key_mask": torch.zeros(2, 5)}, MASK + " torch.float32"),
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
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(otdd.InputError, match=r"got torch.float64 on cpu, torch.float32 on cpu and"),
    ):
        otdd.sinkhorn_attention(points[0].double(), *points[1:])


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_backward_in_autocast(gradient: str) -> None:
    """Passes of a backward pass are not cast, wherever it is called."""

    def gradients(cast: bool) -> tuple[Tensor, ...]:
        leaves = [each.requires_grad_() for each in drawn(2, 12, 9)]
        out = otdd.sinkhorn_attention(*leaves, gradient=gradient, iterations=20)
        cotangent = torch.ones_like(out)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return torch.autograd.grad(out, leaves, cotangent)

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(one, other)
