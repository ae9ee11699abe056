"""Hessian products against dense pseudo-inverses, differences of gradients and closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from derivative_cases import (
    DEVICE,
    EARLY,
    EPSILON,
    EXACT,
    WAYS,
    DenseHessian,
    close,
    clouds,
    drawn,
    labelled,
    masses,
    of_both,
    on_the_device,
    quiet,
    solve_by,
)
from pairwise import pairwise
from refusals import naming
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import CGOptions, Converged, InputError, NotConvergedWarning
from otdd_flash.derivatives import curvature, plan_points, plan_system
from otdd_flash.errors import ConvergenceError
from otdd_flash.operators import triton_plans
from otdd_flash.operators.torch_operator import TorchOperator

X, Y = clouds(12, 9)
V, W = drawn(12, 3, seed=4), drawn(9, 3, seed=5)
# Products are those of the potentials that there are.
ROUGH = Converged(tolerance=1e-4)


def hessian(*given: Any, **settings: Any) -> otdd.SinkhornHessian:
    return quiet(otdd.sinkhorn_hessian, *(given or (X, Y)), **{"options": ROUGH, **settings})


@pytest.mark.slow(after=12)
@pairwise(
    way=WAYS,
    shape=[(1, 1), (20, 20), (33, 21), (21, 33)],
    unbalanced=[(None, None), (0.3, 0.3), (50.0, 50.0), (0.2, None), (None, 2.0), (0.3, 20.0)],
    options=[ROUGH, EARLY],
    debias=[True, False],
    labels=[True, False],
    zeros=[True, False],
    lambda_x=[0.5, 1.0],
    count=[1, 7],
    moments=[plan_points.MOST_MOMENTS, 0],
)
def test_products_are_those_of_the_dense_inverse(
    way: str,
    shape: tuple[int, int],
    unbalanced: tuple[float | None, float | None],
    options: Converged,
    debias: bool,
    labels: bool,
    zeros: bool,
    lambda_x: float,
    count: int,
    moments: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of x alone and of both clouds, also of plans that were stopped early."""
    cg = solve_by(way, monkeypatch)
    monkeypatch.setattr(plan_points, "MOST_MOMENTS", moments)
    (n, m), (x, y) = shape, clouds(*shape)
    a, b = masses(n, 0, zeros=zeros), masses(m, 1, zeros=zeros)
    cost = {"lambda_x": lambda_x, "unbalanced": unbalanced}
    cost |= labelled(n, m) if labels else {}
    # Self terms have one penalty for both of their sides.
    settings = {"debias": debias and unbalanced[0] == unbalanced[1], "options": options, "cg": cg}
    found = quiet(otdd.sinkhorn_hessian, x, y, a, b, **settings, **cost)
    exact = DenseHessian(found.divergence.terms, x, y, a, b, **cost)
    v, w = drawn(count, n, 3, seed=4), drawn(count, m, 3, seed=5)
    got, joint = found.product(v), of_both(found, cg)(v, w)
    assert bool(got.converged.all())
    assert way != "decomposed" or int(got.iterations.max() + joint.iterations.max()) == 0
    for k in range(count):
        by_x, _, energy = exact.along(v[k])
        size = 1e-3 + float(by_x.abs().max())
        close(got.values[k], by_x, 1e-9 * size)
        close(got.curvature[k], energy, 1e-9 * float(v[k].norm()) * size)
        by_x, by_y, energy = exact.along(v[k], w[k])
        size = 1e-3 + float(by_x.abs().max()) + float(by_y.abs().max())
        close(joint.x[k], by_x, 1e-9 * size)
        close(joint.y[k], by_y, 1e-9 * size)
        close(joint.curvature[k], energy, 1e-8 * float(v[k].norm()) * size)


@pytest.mark.slow
def test_both_passes_of_autograd() -> None:
    """Of functions of the points, and of the loss."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = otdd.sinkhorn_loss(x.exp(), y, epsilon=EPSILON, options=EXACT, **labelled(3, 2))
        return (2 * loss).square()

    x, y = (points.requires_grad_() for points in clouds(3, 2, 2))
    assert torch.autograd.gradgradcheck(function, (x, y))


def test_autograd_gives_the_products() -> None:
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    loss = otdd.sinkhorn_loss(x, y, epsilon=EPSILON, options=ROUGH)
    gradients = torch.autograd.grad(loss, (x, y), create_graph=True)
    found = torch.autograd.grad(gradients, (x, y), (V, W))
    known = hessian()
    joint = of_both(known)(V[None], W[None])
    torch.testing.assert_close(found, (joint.x[0], joint.y[0]), rtol=1e-8, atol=1e-10)
    # Of y standing still, by autograd's own function.
    _, alone = torch.autograd.functional.vhp(
        lambda x: otdd.sinkhorn_loss(x, Y, epsilon=EPSILON, options=ROUGH), X, V
    )
    torch.testing.assert_close(alone, known.product(V).values, rtol=1e-8, atol=1e-10)


def test_half_and_integer_points() -> None:
    x, y, v = X.half(), Y.half(), V.half()
    found = hessian(x, y, cg=CGOptions())
    values = found.product(v).values
    assert found.gradient.dtype == values.dtype == torch.float16
    exact = hessian(x.double(), y.double()).product(v.double()).values
    torch.testing.assert_close(values.double(), exact, rtol=2e-3, atol=2e-3)
    whole = (3 * X).abs().to(torch.uint8)
    one, other = (hessian(x, Y.float(), debias=False) for x in (whole, whole.float()))
    assert torch.equal(one.gradient, other.gradient)


@pytest.mark.slow
def test_the_origin_changes_nothing() -> None:
    expected = hessian(options=EXACT).product(V).values
    far = hessian(X + 1e4, Y + 1e4, options=EXACT).product(V).values
    torch.testing.assert_close(far, expected, rtol=1e-6, atol=1e-9)


def test_a_cloud_and_itself_are_at_a_minimum() -> None:
    """The divergence of a cloud from itself is 0, and nowhere less."""
    x = drawn(8, 2)
    found = hessian(x, x.clone())
    assert found.divergence.identical
    assert float(found.gradient.abs().max()) <= 1e-12
    matrix = found.product(torch.eye(16).double().view(16, 8, 2)).values.view(16, 16)
    close(matrix, matrix.T, 1e-12)
    assert float(torch.linalg.eigvalsh(matrix).min()) >= -1e-12


@pytest.mark.parametrize("way", ["iterations", "decomposed"])
def test_damped_products_are_symmetric_too(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what constants are taken to does not change."""
    solve_by(way, monkeypatch)
    a, v = masses(12, 0), drawn(3, 12, 3, seed=4) + 1
    v[2] = 1
    found = hessian(X, Y, a, cg=CGOptions(1e-12, damping=0.1)).product(v)
    matrix = torch.einsum("kni,lni->kl", v, found.values)
    close(matrix, matrix.T, 1e-11)
    close(matrix.diagonal(), found.curvature, 1e-11)
    close(found.values[2], a[:, None].expand(12, 3), 1e-13)


def test_damped_products_of_both_clouds_move_each_as_a_whole_as_without() -> None:
    """Derivatives of x sum to how far its mean moves from that of y, and those of y to the rest."""
    damped = CGOptions(1e-12, damping=0.1)
    v, w = V + 1, W - 2
    joint = of_both(hessian(X, Y, options=EXACT), damped)(v[None], w[None])
    shift = v.mean(0) - w.mean(0)
    close(joint.x[0].sum(0), shift, 1e-12)
    close(joint.y[0].sum(0), -shift, 1e-12)


@pytest.mark.usefixtures("iterations_alone")
def test_a_curvature_without_debiasing_is_a_lower_bound() -> None:
    """However early the linear system is left."""
    exact = hessian(debias=False).product(V).curvature
    early = hessian(debias=False, cg=CGOptions(1e-12, max_iterations=2))
    with pytest.warns(
        NotConvergedWarning, match=r"; raise cg.tolerance or cg.max_iterations$"
    ) as caught:
        found = early.product(V)
    assert caught[0].filename == __file__
    assert (bool(found.converged), int(found.iterations)) == (False, 2)
    assert float(found.curvature) <= float(exact) + 1e-12


@pytest.mark.usefixtures("iterations_alone")
def test_a_missed_tolerance_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = Converged(1e-4, require_convergence=True)
    with pytest.raises(ConvergenceError, match=r"^conjugate gradients left a relative residual"):
        hessian(options=strict, cg=CGOptions(1e-12, 1)).product(V)
    # With a way out that those who call for a loss have, which takes no `cg`.
    monkeypatch.setattr("otdd_flash.derivatives.hessian.TIGHT", 1e-100)
    x = X.clone().requires_grad_()
    loss = otdd.sinkhorn_loss(x, Y, epsilon=EPSILON)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.warns(NotConvergedWarning, match=r"; otdd.sinkhorn_hessian takes a larger cg"):
        torch.autograd.grad(gradient, x, V)


@pytest.mark.parametrize(
    ("kind", "way"), [(torch.float32, "streamed"), (torch.float64, "iterations")]
)
def test_points_that_are_matched_one_to_one(
    kind: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix is 0 but for rounding, and so is what it is to be solved for: that is no miss."""
    solve_by(way, monkeypatch)
    x, v, noise = (drawn(30, 50, seed=seed).to(kind) for seed in range(3))
    found = otdd.sinkhorn_hessian(x, x + 1e-3 * noise, epsilon=0.5, debias=False)
    product = found.product(torch.stack((v, torch.ones_like(v))))
    assert bool(product.converged.all())
    # Every point keeps its match: only the gradient's own 2 L r x moves.
    assert float((product.values[0] - v / 30).norm() / (v / 30).norm()) <= 1e-4


@pytest.mark.parametrize("decomposed", [False, True])
def test_all_points_of_a_side_are_equal(decomposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only constants are asked of the system, and rounding of what is left of them."""
    monkeypatch.setattr(plan_system, "MOST_POINTS", 100 if decomposed else 0)
    draw = torch.Generator().manual_seed(20)
    x, y, v = torch.randn(20, 3, generator=draw), torch.full((19, 3), 0.3), drawn(20, 3).float()
    product = otdd.sinkhorn_hessian(x, y, epsilon=0.5, debias=False).product(v)
    assert bool(product.converged.all())
    torch.testing.assert_close(product.values, v / 20, rtol=1e-5, atol=1e-8)


@pytest.mark.usefixtures("iterations_alone")
@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("backend", "unbalanced", "held", "most"),
    [
        ("torch", (None, None), True, 2e-5),
        ("triton", (None, None), True, 5e-5),
        *(
            ("triton", unbalanced, held, 5e-5)
            for unbalanced in [(0.5, 0.5), (0.3, None), (1e3, 1e3), (None, 0.05)]
            for held in (True, False)
        ),
    ],
)
def test_points_in_float32(
    backend: str,
    unbalanced: tuple[float | None, float | None],
    held: bool,
    most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounded points iterate, those themselves tell the residual.

    In kernels with a plan in float16 that is held, or evaluated anew; of relaxed marginals with
    directions of both clouds.
    """
    monkeypatch.setattr(triton_plans, "KEPT_BYTES", 0)
    monkeypatch.setattr(triton_plans, "FEW_COORDINATES", 0)
    if not held:
        monkeypatch.setattr(triton_plans, "holds", lambda *_: False)
    x, y, v, w = (
        part.float().to(DEVICE)
        for part in (*clouds(40, 33), drawn(40, 3, seed=4), drawn(33, 3, seed=5))
    )
    options = on_the_device(labelled(40, 33)) if backend == "triton" else {}
    compute, debias = otdd.ComputeOptions(DEVICE, backend=backend), unbalanced[0] == unbalanced[1]
    options |= {"unbalanced": unbalanced}
    settings = {"epsilon": EPSILON, "compute": compute, "debias": debias}
    found = otdd.sinkhorn_hessian(x, y, **settings, **options)
    exact = DenseHessian(found.divergence.terms, x, y, **options)
    if unbalanced == (None, None):
        alone = found.product(torch.stack((v, v.flip(0))))
        assert alone.values.dtype == torch.float32
        assert bool(alone.converged.all())
        for k, along in enumerate((v, v.flip(0))):
            expected, _, energy = exact.along(along)
            assert float((alone.values[k] - expected).norm() / expected.norm()) <= most
            off = abs(float(alone.curvature[k] - energy))
            assert off <= 5e-5 * float(along.norm() * expected.norm())
        return
    joint, (by_x, by_y, energy) = of_both(found, CGOptions())(v[None], w[None]), exact.along(v, w)
    assert bool(joint.converged.all())
    for values, expected in ((joint.x[0], by_x), (joint.y[0], by_y)):
        assert float((values - expected).norm() / expected.norm()) <= most
    assert abs(float(joint.curvature[0] - energy)) <= 1e-4 * abs(float(energy))


SHAPES = r"^v must be a tensor \(12, 3\), or \(s, 12, 3\) of s >= 1 directions, "
REFUSED = [
    (V[:11], SHAPES + r"got Tensor of shape \(11, 3\)$"),
    ([1.0], SHAPES + r"got list of 1 items$"),
    (torch.zeros(0, 12, 3).double(), SHAPES + "got none$"),
    (V.float(), "^v must be torch.float64 on cpu as the gradient, got torch.float32 on cpu$"),
    (V.to_sparse(), r"^v must be dense, got torch.sparse_coo; give it as .to_dense\(\)$"),
    (V / 0, r"^v holds NaN or infinite values$"),
    ({"tolerance": 1.0}, r"^cg.tolerance must lie in \(0, 1\), got 1.0$"),
    ({"tolerance": 0.0}, r"^cg.tolerance must lie in \(0, 1\), got 0.0$"),
    ({"max_iterations": 0}, r"^cg.max_iterations must be at least 1, got 0$"),
    ({"damping": -0.1}, r"^cg.damping must be finite and not negative, got -0.1$"),
]


def test_refusals() -> None:
    found = hessian()
    for given, message in REFUSED:
        with naming(message), pytest.raises(InputError, match=message):
            CGOptions(**given) if isinstance(given, dict) else found.product(given)


def test_memory_that_runs_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_system, "MOST_POINTS", 0)
    monkeypatch.setattr(TorchOperator, "plan_entries", lambda *_: torch.empty(1 << 50))
    with pytest.raises(InputError, match=r"^out of memory on cpu: .* free, and .* need at least"):
        hessian().product(V)


def test_many_directions_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    found, v = hessian(), drawn(5, 12, 3)
    whole = found.product(v)
    monkeypatch.setattr(curvature, "ELEMENTS", 5 * 2 * 12 * 3 // 3)
    parts = found.product(v)
    torch.testing.assert_close(parts.values, whole.values, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(parts.curvature, whole.curvature, rtol=1e-10, atol=1e-12)
