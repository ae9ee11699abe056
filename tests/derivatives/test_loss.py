"""The divergence as a loss: what autograd gets, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from derivative_cases import CLASSES, EARLY, EPSILON, clouds, labelled, masses
from pairwise import pairwise
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.derivatives.gradient import DivergenceGradient
from otdd_flash.errors import InputError, NotConvergedWarning

EXACT = otdd.Converged(tolerance=1e-10)


def cloud(n: int, seed: int, shift: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn + shift).to(dtype)


def table(classes: int = 4) -> Tensor:
    drawn = torch.rand(classes, classes, generator=torch.Generator().manual_seed(9)).double()
    return drawn + drawn.T


def leaf(value: Tensor) -> Tensor:
    return value.clone().requires_grad_()


LABELS: dict[str, Any] = {"labels_x": torch.arange(9) % 2, "labels_y": torch.arange(7) % 2}


@pytest.mark.slow(after=5)
@pairwise(
    shape=[(13, 9), (1, 7), (9, 13)],
    options=[EARLY, otdd.Converged(1e-6)],
    labels=[True, False],
    zeros=[True, False],
    debias=[True, False],
    ground=["sqeuclidean", "cosine"],
)
def test_gradients_are_those_of_the_dense_dual(
    shape: tuple[int, int],
    options: otdd.Converged,
    labels: bool,
    zeros: bool,
    debias: bool,
    ground: str,
) -> None:
    """At the potentials that there are: of plans with neither the masses nor the mass 1 as well.

    Points without mass have their best potential, so that arriving mass is counted at its cost.
    """
    given = dict(zip(("x", "y"), clouds(*shape), strict=True))
    given |= {"a": masses(shape[0], 3, zeros=zeros), "b": masses(shape[1], 4, zeros=zeros)}
    given |= {"lambda_x": torch.tensor(0.6, dtype=torch.float64)}
    fixed = labelled(*shape) if labels else {}
    if labels:
        given |= {
            "class_table": fixed.pop("class_table"),
            "lambda_y": torch.tensor(0.4, dtype=torch.float64),
        }
    settings = {"epsilon": EPSILON, "debias": debias, "options": options}
    ours, theirs = ({key: leaf(part) for key, part in given.items()} for _ in range(2))
    names = tuple("abc") if labels else ()
    sides = (
        otdd.LabeledSamples(given[x], fixed.get(f"labels_{x}"), names, given[a])
        for x, a in ("xa", "yb")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        loss = otdd.sinkhorn_loss(**ours, **fixed, **settings, ground=ground)
        solved = otdd.sinkhorn_divergence(
            *sides,
            **settings,
            class_table=given.get("class_table"),
            cost=otdd.GroundCost(0.6, 0.4, ground),
            compute=otdd.ComputeOptions("cpu", precision="double"),
        )
    shares = {"xy": 1.0, "xx": -0.5, "yy": -0.5}
    dual = torch.zeros(()).double()
    for name, term in solved.terms.items():
        dual = dual + shares[name] * dense_dual(name, ground, theirs, fixed, term)
    found, expected = (
        torch.autograd.grad(value, list(inputs.values()))
        for value, inputs in ((loss, ours), (dual, theirs))
    )
    for key, one, other in zip(given, found, expected, strict=True):
        off = one - other
        if key in ("a", "b"):
            # Up to a constant, which is that of the simplex.
            off = off - off.mean()
            assert float(given[key] @ one) == pytest.approx(0, abs=1e-12)
        assert float(off.abs().max()) <= 1e-9 * (1 + float(other.abs().max())), key


def dense_dual(name: str, ground: str, given: dict[str, Tensor], fixed: Any, term: Any) -> Tensor:
    """Of a term at fixed potentials, those of points without mass their best."""
    (x, a), (y, b) = ((given[side], given["a" if side == "x" else "b"]) for side in name)
    share, f, g = 1.0, term.f, term.g
    if ground == "cosine":
        share, (x, y) = 0.5, (side / side.norm(dim=1, keepdim=True) for side in (x, y))
    cost = share * given["lambda_x"] * (x[:, None] - y).square().sum(2)
    if fixed:
        labels = (fixed[f"labels_{side}"] + (CLASSES if side == "y" else 0) for side in name)
        rows, columns = labels
        cost = cost + given["lambda_y"] * given["class_table"][rows][:, columns]
    with torch.no_grad():
        best_f = reference.softmin_rows(cost, b, torch.where(b > 0, g, 0), EPSILON)
        best_g = reference.softmin_rows(cost.T, a, torch.where(a > 0, f, 0), EPSILON)
    f, g = torch.where(a > 0, f, best_f), torch.where(b > 0, g, best_g)
    return reference.dual_value(cost, a, b, f, g, EPSILON)


@pytest.mark.parametrize("debias", [True, False])
def test_inner_products_are_squared_distances_but_for_terms_of_one_side(debias: bool) -> None:
    """-<x, y> = |x - y|^2 / 2 - |x|^2 / 2 - |y|^2 / 2."""
    x, y = clouds(9, 7)
    leaves = [leaf(part) for part in (x, y, masses(9, 0), masses(7, 1))]
    options = {"epsilon": EPSILON, "debias": debias, "options": EXACT}
    found = otdd.sinkhorn_loss(*leaves, **options, lambda_x=0.8, ground="inner")
    expected = otdd.sinkhorn_loss(*leaves, **options, lambda_x=0.4)
    x, y, a, b = leaves
    if not debias:
        expected = expected - 0.4 * (a @ x.square().sum(1) + b @ y.square().sum(1))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = (torch.autograd.grad(value, leaves) for value in (found, expected))
    for one, other in zip(*gradients, strict=True):
        # By masses up to a constant.
        off = (one - other) - (one - other).mean() if one.ndim == 1 else one - other
        assert float(off.abs().max()) <= 1e-9


def test_a_far_point_without_mass_has_its_softmin_as_gradient() -> None:
    """Its potential in the self term is still far from settled when the solve stops."""
    x, y = clouds(13, 9)
    x[6] = 300.0
    a, b = masses(13, 0, zeros=True), masses(9, 0, zeros=True)
    cross, own = (
        reference.entropic_transport(reference.dense_cost(x, other), a, weights, EPSILON)[1]
        for other, weights in ((y, b), (x, a))
    )
    inputs = leaf(x), leaf(a)
    loss = otdd.sinkhorn_loss(inputs[0], y, inputs[1], b, epsilon=EPSILON, options=EXACT)
    by_x, by_a = torch.autograd.grad(loss, inputs)
    expected = (cross - own)[6] - (cross - own)[1]
    assert float(by_a[6] - by_a[1]) == pytest.approx(float(expected), rel=1e-6)
    assert not by_x[6].any()


def test_float32_stays_accurate_far_from_the_origin() -> None:
    """Without a common centre, r x - P y cancels: errors of 1e-2 at an offset of 1e5."""
    x, y = ((points + 1e5).float() for points in clouds(60, 50))
    compute = otdd.ComputeOptions("cpu", precision="high")
    found, exact = (
        torch.autograd.grad(
            otdd.sinkhorn_loss(one, other, epsilon=EPSILON, options=options, compute=where), one
        )[0]
        for one, other, options, where in (
            (leaf(x), y, otdd.Converged(1e-5), compute),
            (leaf(x.double()), y.double(), EXACT, None),
        )
    )
    assert float((found - exact).abs().max()) <= 1e-3 * float(exact.abs().max())


@pytest.mark.parametrize("name", ["x", "y", "lambda_x", "class_table"])
def test_only_inputs_that_require_a_gradient_get_one(name: str) -> None:
    inputs: dict[str, Any] = {
        **{"x": cloud(9, 0), "y": cloud(7, 1), "lambda_x": torch.tensor(0.5).double()},
        "class_table": table(),
    }
    inputs[name].requires_grad_()
    otdd.sinkhorn_loss(**inputs, **LABELS, epsilon=EPSILON).backward()
    assert [key for key, value in inputs.items() if value.grad is not None] == [name]
    assert inputs[name].grad.any()


def test_nothing_is_computed_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(DivergenceGradient, "__call__", refuse)
    x, y = leaf(cloud(9, 0)), cloud(7, 1)
    with torch.no_grad():
        assert not otdd.sinkhorn_loss(x, y, epsilon=EPSILON).requires_grad
    assert not otdd.sinkhorn_loss(x.detach(), y, epsilon=EPSILON).requires_grad
    with pytest.raises(AssertionError, match="was computed"):
        otdd.sinkhorn_loss(x, y, epsilon=EPSILON)


def test_backward_scales_and_is_not_disturbed_by_a_step() -> None:
    """Whatever the strides."""
    wide = leaf(torch.cat((cloud(9, 0), cloud(9, 5)), 1).T)
    x, y = wide.T[:, ::2], cloud(14, 1)[::2]
    packed = leaf(x.detach().contiguous())
    loss = otdd.sinkhorn_loss(packed, y.contiguous(), epsilon=EPSILON)
    (gradient,) = torch.autograd.grad(loss, packed)
    loss = otdd.sinkhorn_loss(x, y, epsilon=EPSILON)
    with torch.no_grad():
        wide += 1
    (found,) = torch.autograd.grad(-3 * loss, wide)
    torch.testing.assert_close(found.T[:, ::2], -3 * gradient, rtol=1e-12, atol=0)
    assert not found.T[:, 1::2].any()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("of", [lambda loss: loss, torch.square], ids=["itself", "a function"])
def test_derivatives_that_there_are_not_are_refused(of: Callable[[Tensor], Tensor]) -> None:
    """Second ones by lambdas and of other costs, and third ones."""
    x, y, lambda_x = leaf(cloud(9, 0)), cloud(7, 1), leaf(torch.tensor(0.5))

    def by_x(by: tuple[Tensor, ...] = (x,), **options: Any) -> tuple[Tensor, ...]:
        loss = otdd.sinkhorn_loss(x, y, epsilon=EPSILON, **options)
        return torch.autograd.grad(of(loss), by, create_graph=True)

    message = r"^the loss is differentiable twice by x and y alone, .*; detach lambda_x$"
    for gradient in by_x((x, lambda_x), lambda_x=lambda_x):
        with pytest.raises(InputError, match=message):
            torch.autograd.grad(gradient.sum(), x, retain_graph=True)
    message = r"^the loss is differentiable once, .*; detach the gradient, or take differences of "
    with pytest.raises(InputError, match=message):
        torch.autograd.grad(by_x(ground="cosine")[0].sum(), x)
    message = r"^the loss is differentiable twice, .*; detach that, or in place of torch.* call vhp"
    (second,) = torch.autograd.grad(by_x()[0].square().sum(), x, create_graph=True)
    with pytest.raises(InputError, match=message):
        torch.autograd.grad(second.sum(), x)


def test_a_cloud_is_at_rest_at_itself() -> None:
    x = leaf(cloud(9, 0))
    for other in (x, leaf(cloud(9, 0))):
        loss = otdd.sinkhorn_loss(x, other, epsilon=EPSILON)
        assert loss.item() == 0
        assert float(torch.autograd.grad(loss, x)[0].abs().max()) < 1e-12


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_come_in_the_type_of_the_input(dtype: torch.dtype) -> None:
    x, y = leaf(cloud(9, 0, dtype=dtype)), cloud(7, 1, dtype=dtype)
    exact = leaf(x.detach().double())
    loss = otdd.sinkhorn_loss(x, y, epsilon=EPSILON, options=otdd.Converged(1e-5))
    loss.backward()
    otdd.sinkhorn_loss(exact, y.double(), epsilon=EPSILON, options=otdd.Converged(1e-7)).backward()
    assert loss.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == dtype
    error = float((x.grad.double() - exact.grad).abs().max())
    assert error <= max(torch.finfo(dtype).eps, 2e-5) * float(exact.grad.abs().max())


@pytest.mark.slow
def test_kernels_give_the_same_gradients() -> None:
    """In `fast` a plan is applied to matrices of 11 bits."""
    scale = 1e3
    exact, found = (
        {
            "x": leaf(scale * cloud(9, 0)),
            "y": leaf(scale * cloud(7, 1, 0.5)),
            "a": leaf(torch.full((9,), 1 / 9).double()),
            "class_table": leaf(scale**2 * table()),
            "lambda_x": leaf(torch.tensor(0.5)),
        }
        for _ in range(2)
    )
    more: dict[str, Any] = {"epsilon": 4 * EPSILON * scale**2, **LABELS}
    otdd.sinkhorn_loss(**exact, **more, options=EXACT).backward()
    compute = otdd.ComputeOptions(device="cpu", backend="triton")
    otdd.sinkhorn_loss(**found, **more, options=otdd.Converged(1e-4), compute=compute).backward()
    for name, value in found.items():
        off = value.grad - exact[name].grad
        assert float(off.abs().max()) <= 2e-3 * float(exact[name].grad.abs().max()), name


def test_an_absent_last_class_needs_the_class_totals() -> None:
    inputs: dict[str, Any] = {"x": cloud(9, 0), "y": cloud(7, 1), "epsilon": EPSILON, **LABELS}
    with pytest.raises(InputError, match=r"\(5, 5\).*2 \+ 2 classes.*class_totals"):
        otdd.sinkhorn_loss(**inputs, class_table=table(5))
    w = leaf(table(5))
    otdd.sinkhorn_loss(**inputs, class_table=w, class_totals=(3, 2)).backward()
    assert w.grad is not None
    assert not w.grad[2].any()
    assert not w.grad[:, 2].any()
    assert w.grad[:2, 3:].all()
    assert w.grad[3:, 3:].all()


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"y": torch.ones(7, 2)}, "x has 3 features and y has 2"),
        (
            {"y": torch.ones(7, 3, device="meta")},
            "y is on the device meta, where tensors have no numbers",
        ),
        ({"x": [[0.0, 1.0, 2.0]]}, r"x must be a tensor \(n, d\) or \(B, n, d\), got list"),
        ({"a": torch.ones(9) / 8}, r"a must sum to 1, got 1\.125"),
        ({"b": torch.ones(7) / 7.001}, "b must sum to 1"),
        ({"a": torch.ones(8) / 8}, r"shape \(9,\)"),
        ({"a": torch.full((9,), float("nan"))}, "finite and not negative, got nan at rows 0,"),
        ({"epsilon": 0.0}, "epsilon must be positive"),
        ({"lambda_x": torch.ones(2)}, r"0-dim tensor, got shape \(2,\)"),
        ({"lambda_y": torch.tensor(-1.0)}, "lambda_y must be finite and not negative"),
        (
            {"labels_x": zeros(8), "class_table": torch.zeros(2, 2)},
            r"labels must have shape \(9,\)",
        ),
        ({"labels_x": zeros(9) - 1, "class_table": torch.zeros(1, 1)}, "labels must lie in"),
        ({"labels_x": zeros(9), "class_table": torch.zeros(3, 3)}, r"\(3, 3\).*1 \+ 1 classes"),
        (
            {"labels_y": zeros(7), "class_table": torch.full((2, 2), float("inf"))},
            r"4 NaN or infinite entries, the first at \[0, 0\]; measure it",
        ),
        ({"labels_x": zeros(9)}, "labels need class_table"),
        ({"class_table": torch.zeros(2, 2)}, "class_table needs labels_x"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_inputs(bad: dict[str, Any], message: str) -> None:
    inputs = {"x": cloud(9, 0), "y": cloud(7, 1), "epsilon": EPSILON}
    with pytest.raises(InputError, match=message):
        otdd.sinkhorn_loss(**{**inputs, **bad})
