"""Doubly stochastic matrices against a float64 loop in the log domain and its autograd."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from torch import Tensor

import otdd_flash as otdd

BACKENDS = ("torch", "triton")
# Sizes and iterations that are slow in the interpreter.
WHOLE = [(3, 100), (4, 100), (16, 20), (16, 100), (33, 20), (64, 5), (100, 5), (128, 5)]
UNIT = 2.0**-24
# What an entry of E that is lost may amount to, next to scalings of 2^30.
LOST = 2.0**-66


def on(backend: str) -> otdd.ComputeOptions:
    return otdd.ComputeOptions("cpu", backend=backend)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=dtype)


def kinds(count: int, n: int) -> dict[str, Tensor]:
    """Logits over their temperature, of many kinds."""
    normal = drawn(count, n, n)
    forbidden = normal.clone()
    forbidden[:, torch.arange(n), torch.arange(n).roll(1)] = -math.inf if n > 1 else 0.0
    return {
        "uniform": 4 * normal.sigmoid(),
        "normal": normal,
        "times 10": 10 * normal,
        "times 100": 100 * normal,
        "wide": (1e4 * normal).clamp(-1e4, 1e4),
        "assignment": 100 * torch.randint(10, normal.shape).float(),
        "constant": torch.full_like(normal, 3.0),
        "far": normal + 1e4,
        "one forbidden": forbidden,
    }


def bound(logits: Tensor) -> Tensor:
    """What the relative error may be (B, 1, 1), by the range of the logits."""
    finite = torch.where(logits.isfinite(), logits, logits.new_zeros(()))
    lowest = torch.where(logits.isfinite(), logits, math.inf).amin((1, 2), keepdim=True)
    highest = torch.where(logits.isfinite(), logits, -math.inf).amax((1, 2), keepdim=True)
    assert finite.isfinite().all()
    return 16 * UNIT * (1 + (highest - lowest).double())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("n", "iterations"),
    [(1, 1), (2, 5), (3, 5), (4, 1), (4, 20), (5, 5)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in WHOLE],
)
def test_a_float64_loop_in_the_log_domain(n: int, iterations: int, backend: str) -> None:
    for name, logits in kinds(2 if n > 5 else 7, n).items():
        found = otdd.doubly_stochastic(logits, iterations=iterations, compute=on(backend))
        expected = reference.balanced_matrices(logits.double(), iterations)
        error = (found.double() - expected).abs() - LOST
        assert (error <= bound(logits) * expected).all(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype, backend: str) -> None:
    logits = (3 * drawn(9, 4, 4)).to(dtype)
    found = otdd.doubly_stochastic(logits, compute=on(backend))
    assert found.dtype == dtype
    expected = reference.balanced_matrices(logits.double(), 20)
    # Two units of the last place of the type, and what float32 may be off; subnormals are coarser.
    places = 2 * torch.finfo(dtype).eps
    allowed = bound(logits) * (dtype != torch.float64) + places * (
        1 if dtype != torch.float64 else 16
    )
    assert ((found.double() - expected).abs() <= allowed * expected + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("n", "spread", "iterations"),
    [(2, 1, 5), (3, 10, 20), (4, 1, 20), (4, 100, 20), (16, 10, 7)],
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
    errors = [
        [(found.double() - true).abs().max() for found, true in zip(given, exact, strict=True)]
        for given in (gradients(torch.float32, ours), gradients(torch.float32, plain))
    ]
    for error, plain_error, true in zip(*errors, exact, strict=True):
        # The gradient by temperature is a sum of products of logits that cancel.
        largest = true.abs().max() if true.ndim else (logits.abs() * exact[0].abs()).sum()
        assert error <= 2 * plain_error + 8 * UNIT * largest
    for mine, true in zip(gradients(torch.float64, ours), exact, strict=True):
        assert torch.allclose(mine, true, rtol=1e-9, atol=1e-12 * float(spread * n))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_a_tolerance_stops_each_matrix_by_itself(gradient: str, backend: str) -> None:
    logits = torch.stack((drawn(3, 3), 4 * drawn(3, 3), torch.zeros(3, 3))).double()
    cotangents = drawn(3, 3, 3, seed=1).double()
    tolerances = 1e-3, 1e-11
    for tolerance in tolerances:
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
        if gradient == "unrolled" or tolerance < 1e-10:
            assert torch.allclose(mine, torch.stack(expected), atol=1e-9)
        if gradient == "implicit":
            assert mine.sum(1).abs().max() < 1e-10
            assert mine.sum(2).abs().max() < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [3, 4, 6])
def test_a_matrix_gets_the_same_bits_among_any_others(n: int, backend: str) -> None:
    # One of them is done again in the log domain.
    logits = drawn(63, n, n)
    logits[5] *= 1000
    logits.requires_grad_()
    found = otdd.doubly_stochastic(logits, compute=on(backend))
    cotangents = drawn(63, n, n, seed=2)
    (gradient,) = torch.autograd.grad(found, logits, cotangents)
    for part in (slice(0, 1), slice(4, 7), slice(62, 63)):
        leaf = logits[part].detach().requires_grad_()
        alone = otdd.doubly_stochastic(leaf, compute=on(backend))
        assert torch.equal(alone, found[part])
        assert torch.equal(torch.autograd.grad(alone, leaf, cotangents[part])[0], gradient[part])


@pytest.mark.parametrize("backend", BACKENDS)
def test_underflow_that_matters_is_done_in_logs(backend: str) -> None:
    """Both large entries are in one row; scalings move by 2^200 until the other has its own."""
    logits = torch.tensor([[[0.0, -1.0, -300.0], [-150.0, -400.0, -2.0], [-310.0, -140.0, -280.0]]])
    for n, given in ((3, logits), (4, torch.nn.functional.pad(logits, (0, 1, 0, 1), value=-200.0))):
        found = otdd.doubly_stochastic(given, iterations=60, compute=on(backend))
        expected = reference.balanced_matrices(given.double(), 60)
        error = (found.double() - expected).abs() - LOST
        assert (error <= bound(given) * expected).all(), n


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_leading_dimensions_and_nothing(backend: str) -> None:
    logits = drawn(2, 6, 4, 5)[..., 1:].mT.mT
    want = otdd.doubly_stochastic(logits.contiguous(), compute=on(backend))
    assert torch.equal(otdd.doubly_stochastic(logits, compute=on(backend)), want)
    turned = otdd.doubly_stochastic(logits.mT[0], compute=on(backend))
    assert torch.equal(
        turned, otdd.doubly_stochastic(logits.mT[0].contiguous(), compute=on(backend))
    )
    assert otdd.doubly_stochastic(logits[0, 0], compute=on(backend)).shape == (4, 4)
    empty = torch.empty(0, 4, 4, requires_grad=True)
    found = otdd.doubly_stochastic(empty, compute=on(backend))
    assert found.shape == (0, 4, 4)
    assert torch.autograd.grad(found.sum(), empty)[0].shape == (0, 4, 4)


def test_what_leaves_the_balanced_matrix_alone() -> None:
    logits, order = drawn(5, 6, 6), torch.tensor([3, 0, 5, 1, 2, 4])
    found = otdd.doubly_stochastic(logits, tolerance=1e-6)
    shifted = logits + drawn(5, 6, 1, seed=1) + drawn(5, 1, 6, seed=2)
    assert torch.allclose(otdd.doubly_stochastic(shifted, tolerance=1e-6), found, atol=1e-5)
    moved = otdd.doubly_stochastic(logits[:, order][..., order], tolerance=1e-6)
    assert torch.allclose(moved, found[:, order][..., order], atol=1e-6)
    turned = otdd.doubly_stochastic(logits.mT, tolerance=1e-6)
    assert torch.allclose(turned.mT, found, atol=1e-5)


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


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize("iterations", [1, 3])
def test_kernels_give_nan_for_a_bad_matrix_alone(iterations: int, n: int, backend: str) -> None:
    from otdd_flash.batched.balance import balance

    logits = drawn(5, n, n)
    logits[1, 2], logits[2, :, 1], logits[3, 0, 0] = -math.inf, -math.inf, math.nan
    scale = torch.ones((), dtype=torch.float64)
    found, *_ = balance(
        logits, scale, None, None, None, iterations, None, False, False, "none", backend == "triton"
    )
    assert found.isnan().sum((1, 2)).tolist() == [0, n * n, n * n, n * n, 0]


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_a_second_derivative_is_refused(gradient: str) -> None:
    leaf = drawn(2, 3, 3).requires_grad_()
    found = otdd.doubly_stochastic(leaf, gradient=gradient)
    (first,) = torch.autograd.grad(found.square().sum(), leaf, create_graph=True)
    with pytest.raises(otdd.InputError, match="taken once"):
        torch.autograd.grad(first.sum(), leaf)


def test_no_gradient_is_kept_where_none_is_asked_for() -> None:
    found = otdd.doubly_stochastic(drawn(2, 3, 3).requires_grad_(), gradient="none")
    assert not found.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_compiled_and_in_autocast(gradient: str) -> None:
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


def test_the_operations_fit_their_fakes() -> None:
    from otdd_flash.batched.balance import balance

    one = torch.ones((), dtype=torch.float64)
    for potentials, tolerance in ((False, None), (True, 1e-3)):
        a = torch.full((3,), 1 / 3) if potentials else None
        given = drawn(4, 3, 3), one, a, a, None, 5, tolerance, potentials, potentials
        for gradient in ("unrolled", "implicit"):
            arguments = (drawn(4, 3, 3).requires_grad_(), *given[1:], gradient, False)
            torch.library.opcheck(
                balance,
                arguments,
                test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
            )
