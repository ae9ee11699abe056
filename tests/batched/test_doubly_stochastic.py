"""Doubly stochastic matrices against a float64 loop in the log domain and its autograd."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from operation_counts import OperationCounts
from torch import Tensor

import otdd_flash as otdd

BACKENDS = ("torch", "triton")
UNIT = 2.0**-24
# The smallest number of float32 that has all its places.
TINY = 2.0**-126


def on(backend: str) -> otdd.ComputeOptions:
    return otdd.ComputeOptions("cpu", backend=backend)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=dtype)


def slow(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.slow)


def kinds(count: int, n: int) -> dict[str, Tensor]:
    """Logits over their temperature, of many kinds."""
    normal = drawn(count, n, n)
    forbidden = normal.clone()
    below = torch.ones(n, n).tril(-1).bool()
    forbidden[:, torch.arange(n), torch.arange(n).roll(1)] = -math.inf if n > 1 else 0.0
    return {
        "uniform": 4 * normal.sigmoid(),
        "normal": normal,
        "times 10": 10 * normal,
        "times 100": 100 * normal,
        "wide": (1e4 * normal).clamp(-1e4, 1e4),
        "assignment": 100 * (10 * drawn(count, n, n, seed=3).sigmoid()).floor(),
        "constant": torch.full_like(normal, 3.0),
        "far": normal + 1e4,
        "one forbidden": forbidden,
        # Entries that are lost at first and come back, as scalings of blocks drift apart.
        "triangular": torch.where(below, -100 + 20 * normal, normal),
        "one high column": 200 * normal + 400 * torch.eye(n)[0],
    }


def bound(logits: Tensor) -> Tensor:
    """What the relative error may be (B, 1, 1), by the range of the logits."""
    lowest = torch.where(logits.isfinite(), logits, math.inf).amin((1, 2), keepdim=True)
    highest = torch.where(logits.isfinite(), logits, -math.inf).amax((1, 2), keepdim=True)
    return 16 * UNIT * (1 + (highest - lowest).double())


def within_bound(found: Tensor, expected: Tensor, logits: Tensor) -> Tensor:
    """Of which matrices all entries that float32 has all places of are so near, and others tiny."""
    near = (found.double() - expected).abs() <= bound(logits) * expected
    return (near | ((expected < TINY) & (found <= 1.1 * TINY))).all((1, 2))


@pytest.mark.parametrize(
    ("n", "count", "iterations", "backend"),
    [
        *((n, 7, iterations, "torch") for n, iterations in ((1, 1), (2, 5), (4, 100), (5, 20))),
        (4, 1, 8, "triton"),
        (5, 1, 4, "triton"),
        slow(128, 2, 5, "torch"),
        slow(2, 3, 5, "triton"),
        slow(3, 3, 40, "triton"),
        slow(4, 3, 1, "triton"),
        slow(8, 3, 1, "triton"),
        slow(16, 1, 20, "triton"),
        slow(128, 1, 3, "triton"),
    ],
)
def test_a_float64_loop_in_the_log_domain(
    n: int, count: int, iterations: int, backend: str
) -> None:
    of_each = kinds(count, n)
    logits = torch.cat(list(of_each.values()))
    found = otdd.doubly_stochastic(logits, iterations=iterations, compute=on(backend))
    expected = reference.balanced_matrices(logits.double(), iterations)
    within = within_bound(found, expected, logits).reshape(-1, count).all(1).tolist()
    assert [name for name, near in zip(of_each, within, strict=True) if not near] == []
    # Wide logits are not rounded in every iteration, and the last one makes the columns.
    assert (found.sum(1) - 1).abs().max() <= max(8, n) * UNIT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "n", "spread"),
    [(torch.float16, 4, 3.0), (torch.bfloat16, 5, 30.0), (torch.float64, 4, 30.0)],
)
def test_other_types(dtype: torch.dtype, n: int, spread: float, backend: str) -> None:
    logits = (spread * drawn(8, n, n)).to(dtype)
    found = otdd.doubly_stochastic(logits, iterations=5, compute=on(backend))
    assert found.dtype == dtype
    expected = reference.balanced_matrices(logits.double(), 5)
    if dtype == torch.float64:
        assert torch.allclose(found, expected, rtol=32 * torch.finfo(dtype).eps * (1 + spread))
        return
    # Two units of the last place of the type, and what float32 may be off; subnormals are coarser.
    allowed = bound(logits) + 2 * torch.finfo(dtype).eps
    assert ((found.double() - expected).abs() <= allowed * expected + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("gradient", "most"), [("unrolled", 201), ("implicit", 201), ("none", 0)])
def test_what_is_kept_for_a_gradient(gradient: str, most: int, backend: str) -> None:
    """The logits, or the matrices, and numbers that do not grow with the batch."""
    kept: list[int] = []
    logits = drawn(8, 5, 5).requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor
    )
    with hooks:
        found = otdd.doubly_stochastic(logits, iterations=1, gradient=gradient, compute=on(backend))
    assert sum(kept) <= most
    assert found.requires_grad == (gradient != "none")


@pytest.mark.parametrize(
    ("n", "spread", "iterations", "backend"),
    [
        *(
            (*case, "torch")
            for case in ((2, 1, 5), (3, 10, 20), (4, 100, 20), (4, 1000, 100), (16, 10, 7))
        ),
        slow(3, 10, 5, "triton"),
        slow(4, 100, 9, "triton"),
        # Segments of iterations that are made again: the last in part, and whole.
        slow(16, 10, 7, "triton"),
        slow(5, 10, 4, "triton"),
    ],
)
def test_unrolled_gradients_are_those_of_the_loop(
    n: int, spread: float, iterations: int, backend: str
) -> None:
    logits, cotangents = spread * drawn(6, n, n), drawn(6, n, n, seed=1)

    def gradients(dtype: torch.dtype, run) -> tuple[Tensor, ...]:
        leaves = logits.to(dtype).requires_grad_(), torch.tensor(0.8, dtype=dtype).requires_grad_()
        return torch.autograd.grad((run(*leaves) * cotangents.to(dtype)).sum(), leaves)

    def plain(x: Tensor, temperature: Tensor) -> Tensor:
        return reference.balanced_matrices(x / temperature, iterations)

    def ours(x: Tensor, temperature: Tensor) -> Tensor:
        return otdd.doubly_stochastic(
            x, iterations=iterations, temperature=temperature, compute=on(backend)
        )

    exact = gradients(torch.float64, plain)
    single, by_autograd = gradients(torch.float32, ours), gradients(torch.float32, plain)
    for mine, rounded, true in zip(single, by_autograd, exact, strict=True):
        # The gradient by temperature is a sum of products of logits that cancel.
        largest = true.abs().max() if true.ndim else (logits.abs() * exact[0].abs()).sum()
        most = 2 * (rounded.double() - true).abs().max() + 8 * UNIT * largest
        assert (mine.double() - true).abs().max() <= most
    for mine, true in zip(gradients(torch.float64, ours), exact, strict=True):
        assert torch.allclose(mine, true, rtol=1e-9, atol=1e-12 * float(spread * n))


@pytest.mark.parametrize("backend", ["torch", slow("triton")])
def test_gradients_where_scalings_leave_the_range_of_float32(backend: str) -> None:
    """All rows but one have one column alone, so that every iteration multiplies scalings by 9."""
    logits, cotangents = drawn(3, 4, 4), drawn(3, 4, 4, seed=1)
    logits[:, :-1, 1:] -= 100
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = otdd.doubly_stochastic(leaf, iterations=20, compute=on(backend))
    (mine,) = torch.autograd.grad(found, leaf, cotangents)
    expected = reference.balanced_matrices(exact, 20)
    (true,) = torch.autograd.grad(expected, exact, cotangents.double())
    assert (mine - true).abs().max() <= 1e-3 * true.abs().max()


@pytest.mark.parametrize(
    ("gradient", "tolerance", "backend"),
    [
        ("unrolled", 1e-3, "torch"),
        ("implicit", 1e-11, "torch"),
        slow("unrolled", 1e-3, "triton"),
        slow("implicit", 1e-11, "triton"),
    ],
)
def test_a_tolerance_stops_each_matrix_by_itself(
    gradient: str, tolerance: float, backend: str
) -> None:
    logits = torch.stack((drawn(3, 3), 4 * drawn(3, 3), torch.zeros(3, 3))).double()
    cotangents = drawn(3, 3, 3, seed=1).double()
    leaf = logits.clone().requires_grad_()
    found = otdd.doubly_stochastic(
        leaf, tolerance=tolerance, gradient=gradient, compute=on(backend)
    )
    assert ((found.sum(-1) - 1).abs().amax(-1) <= tolerance).all()
    (mine,) = torch.autograd.grad((found * cotangents).sum(), leaf)
    expected = []
    for one, cotangent in zip(logits, cotangents, strict=True):
        made = 1
        while (reference.balanced_matrices(one, made).sum(-1) - 1).abs().max() > tolerance:
            made += 1
        x = one.clone().requires_grad_()
        balanced = reference.balanced_matrices(x, made)
        expected.append(torch.autograd.grad((balanced * cotangent).sum(), x)[0])
    # Implicit is the gradient of the limit.
    assert torch.allclose(mine, torch.stack(expected), atol=1e-9)
    if gradient == "implicit":
        assert mine.sum(1).abs().max() < 1e-10
        assert mine.sum(2).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("n", "gradient", "backend"),
    [
        *((n, "unrolled", "torch") for n in (3, 6, 16)),
        (16, "implicit", "torch"),
        slow(4, "unrolled", "triton"),
        slow(6, "unrolled", "triton"),
    ],
)
def test_a_matrix_gets_the_same_bits_among_any_others(n: int, gradient: str, backend: str) -> None:
    # One of them is done again in the log domain. On a CPU few matrices lie in another order.
    logits = drawn(33, n, n)
    logits[5] *= 1000
    logits.requires_grad_()
    iterations = 20 if backend == "torch" else 3
    options = {"iterations": iterations, "gradient": gradient, "compute": on(backend)}
    found = otdd.doubly_stochastic(logits, **options)
    cotangents = drawn(33, n, n, seed=2)
    (slopes,) = torch.autograd.grad(found, logits, cotangents)
    for part in (slice(0, 1), slice(4, 7), slice(32, 33)):
        leaf = logits[part].detach().requires_grad_()
        alone = otdd.doubly_stochastic(leaf, **options)
        assert torch.equal(alone, found[part])
        assert torch.equal(torch.autograd.grad(alone, leaf, cotangents[part])[0], slopes[part])


@pytest.mark.parametrize(("iterations", "forward", "backward"), [(1, 27, 47), (20, 179, 515)])
def test_how_many_operations_small_matrices_take(
    iterations: int, forward: int, backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation on so few numbers is a call, and calls are the time that they take."""
    logits, cotangents = drawn(256, 4, 4).requires_grad_(), drawn(256, 4, 4, seed=1)
    with OperationCounts(monkeypatch) as counts:
        found = otdd.doubly_stochastic(logits, iterations=iterations)
    assert counts.operations <= forward
    with OperationCounts(monkeypatch) as counts:
        torch.autograd.grad(found, logits, cotangents)
    assert counts.operations <= backward


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_leading_dimensions_and_nothing(backend: str) -> None:
    options = {"iterations": 3, "compute": on(backend)}
    logits = drawn(2, 3, 4, 5)[..., 1:].mT.mT
    for given in (logits, logits.mT[0]):
        want = otdd.doubly_stochastic(given.contiguous(), **options)
        assert torch.equal(otdd.doubly_stochastic(given, **options), want)
    assert otdd.doubly_stochastic(logits[0, 0], **options).shape == (4, 4)
    empty = torch.empty(0, 4, 4, requires_grad=True)
    found = otdd.doubly_stochastic(empty, **options)
    assert found.shape == (0, 4, 4)
    assert torch.autograd.grad(found.sum(), empty)[0].shape == (0, 4, 4)


@pytest.mark.parametrize(
    ("logits", "options", "message"),
    [
        (torch.zeros(2, 3), {}, r"square, .* got shape \(2, 3\); otdd.sinkhorn_plans"),
        (torch.zeros(129, 129), {}, "129 x 129 each, and a batch takes up to 128"),
        (torch.zeros(3, 3, dtype=torch.int64), {}, "float16, .* got torch.int64; convert"),
        (torch.zeros(3), {}, r"a row and a column each, got shape \(3,\)"),
        (torch.zeros(3, 3), {"iterations": 0}, "iterations must be at least 1, got 0"),
        (torch.zeros(3, 3), {"iterations": 2, "tolerance": 1e-3}, "exclude each other"),
        (torch.zeros(3, 3), {"temperature": 0.0}, "temperature must be positive"),
        (torch.zeros(3, 3), {"temperature": 1e-39}, "temperature=1e-39 is out of the range of"),
        (torch.zeros(3, 3), {"temperature": 1e39}, "or give float64 logits"),
        (torch.zeros(3, 3), {"temperature": torch.tensor(-1.0)}, "positive and finite, got -1"),
        (torch.zeros(3, 3), {"temperature": torch.ones(2)}, r"0-dim tensor, got shape \(2,\)"),
        (torch.tensor([[0.0, math.nan], [0.0, 0.0]]), {}, "must not be NaN or .inf"),
        (torch.tensor([[0.0, math.inf], [0.0, 0.0]]), {}, "must not be NaN or .inf"),
        (torch.tensor([[-math.inf, -math.inf], [0.0, 0.0]]), {}, "all pairs of a row"),
        (torch.tensor([[-math.inf, 0.0], [-math.inf, 0.0]]), {}, "all pairs of a row or of a col"),
        (
            torch.zeros(3, 3, requires_grad=True),
            {"iterations": 20_000},
            'too many .* up to 16384; take gradient="implicit"',
        ),
    ],
)
def test_what_is_refused(logits: Tensor, options: dict[str, object], message: str) -> None:
    with pytest.raises(otdd.InputError, match=message):
        otdd.doubly_stochastic(logits, **options)


@pytest.mark.parametrize(
    ("n", "temperature"),
    [
        (4, -1.0),
        *(slow(n, temperature) for n in (2, 3, 5) for temperature in (-1.0, math.inf)),
        *(slow(4, temperature) for temperature in (-math.inf, 0.0, math.inf, math.nan)),
    ],
)
def test_a_temperature_without_a_meaning_makes_matrices_and_gradients_nan(
    n: int, temperature: float
) -> None:
    """A kernel never waits for a GPU to check it."""
    leaves = drawn(3, n, n).requires_grad_(), torch.tensor(temperature).requires_grad_()
    found = otdd.doubly_stochastic(
        leaves[0], iterations=3, temperature=leaves[1], compute=on("triton")
    )
    assert found.isnan().all()
    for gradient in torch.autograd.grad(found, leaves, drawn(3, n, n, seed=1)):
        assert gradient.isnan().all()


@pytest.mark.slow
def test_tolerances_in_a_graph() -> None:
    logits = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(1))
    run = torch.compile(otdd.doubly_stochastic, fullgraph=True, backend="aot_eager")
    for tolerance in (0.1, 1e-3, 1e-5):
        expected = otdd.doubly_stochastic(logits, tolerance=tolerance, compute="cpu")
        assert torch.equal(run(logits, tolerance=tolerance, compute="cpu"), expected)


@pytest.mark.slow
def test_compiled_and_in_autocast() -> None:
    gradient = "implicit"

    def layer(x: Tensor, temperature: Tensor) -> Tensor:
        return otdd.doubly_stochastic(2 * x, temperature=temperature, gradient=gradient) @ x

    leaves = drawn(7, 4, 4).requires_grad_(), torch.tensor(0.7, requires_grad=True)
    plain = layer(*leaves)
    compiled = torch.compile(layer, fullgraph=True)(*leaves)
    assert torch.allclose(plain, compiled)
    gradients = [torch.autograd.grad(one.square().sum(), leaves) for one in (plain, compiled)]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert otdd.doubly_stochastic(leaves[0], gradient=gradient).dtype == torch.float32
