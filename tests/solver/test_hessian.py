"""Hessian products against dense pseudo-inverses, differences of gradients and closed forms."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import reference
import torch
from allpairspy import AllPairs
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import CGOptions, Converged, InputError, NotConvergedWarning
from otdd_flash.errors import ConvergenceError
from otdd_flash.operators import kernel_plans, memory
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.solver import curvature, direct, plan_points, second_derivatives
from otdd_flash.solver.hessian import DivergenceCurvature
from otdd_flash.solver.schur import Solver

pytestmark = pytest.mark.usefixtures("iterations_alone")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON = 0.4
EXACT = Converged(tolerance=1e-12)
TIGHT = CGOptions(tolerance=1e-12)
CLASSES = 3


def cloud(n: int, seed: int, d: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=draw, dtype=torch.float64) + seed / 5


def masses(n: int, seed: int, *, zeros: bool = False) -> Tensor:
    found = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    if zeros and n > 1:
        found[:: max(2, n // 3)] = 0
    return found / found.sum()


def labelled(n: int, m: int) -> dict[str, Any]:
    means = torch.randn(2 * CLASSES, 2, generator=torch.Generator().manual_seed(3)).double()
    return {
        "labels_x": torch.arange(n) % CLASSES,
        "labels_y": torch.arange(m) % CLASSES,
        "class_table": torch.cdist(means, means).square(),
        "class_totals": (CLASSES, CLASSES),
    }


def hessian(x: Tensor, y: Tensor, *weights: Tensor, **options: Any) -> otdd.SinkhornHessian:
    settings = {"epsilon": EPSILON, "options": EXACT, "cg": TIGHT} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        return otdd.sinkhorn_hessian(x, y, *weights, **settings)


def couplings(
    found: otdd.SinkhornHessian, x: Tensor, y: Tensor, a: Tensor, b: Tensor, **options: Any
) -> dict[str, Tensor]:
    """The plans of the potentials that were returned, dense."""
    table, sides = options.get("class_table"), {"x": (x, a), "y": (y, b)}
    plans = {}
    for name, term in found.divergence.terms.items():
        (one, of_one), (two, of_two) = (sides[key] for key in name)
        classes = None
        if table is not None:
            places = [range(CLASSES) if key == "x" else range(CLASSES, 6) for key in name]
            block = table[list(places[0])][:, list(places[1])]
            labels = [options[f"labels_{key}"] for key in name]
            classes = (0.5 * block, *labels)
        cost = reference.dense_cost(one, two, options.get("lambda_x", 0.5), *(classes or ()))
        plans[name] = reference.plan(cost, of_one, of_two, term.f, term.g, EPSILON)
    return plans


def dense(
    plans: dict[str, Tensor], x: Tensor, y: Tensor, a: Tensor, b: Tensor | None, lambda_x: float
) -> tuple[Tensor, Tensor]:
    """T along one direction."""
    along = a, torch.zeros_like(y) if b is None else b
    by_x, by_y = reference.hessian_product(plans["xy"], (x, y), along, EPSILON, lambda_x)
    if "xx" in plans:
        by_x = by_x - reference.own_hessian_product(plans["xx"], x, a, EPSILON, lambda_x) / 2
        by_y = by_y - reference.own_hessian_product(plans["yy"], y, along[1], EPSILON, lambda_x) / 2
    return by_x, by_y


CASES = list(
    AllPairs(
        [
            [(1, 1), (33, 70), (70, 33)],
            [False, True],  # labels
            [False, True],  # masses of 0
            [0.5, 1.0],  # lambda_x
            [False, True],  # debias
            [1, 7],  # directions
            [1000, 3],  # iterations
            [plan_points.MOST_MOMENTS, 0],
            [False, True],  # the plan is kept
        ]
    )
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_the_dense_pseudo_inverse(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (n, m), labels, zeros, lambda_x, debias, count, iterations, moments, kept = case
    monkeypatch.setattr(plan_points, "MOST_MOMENTS", moments)
    if not kept:
        monkeypatch.setattr(StoredOperator, "_prepared_plan", lambda *_: None)
    x, y = cloud(n, 0), cloud(m, 1)
    a, b = masses(n, 0, zeros=zeros), masses(m, 1)
    options: dict[str, Any] = {"lambda_x": lambda_x} | (labelled(n, m) if labels else {})
    stop = Converged(tolerance=1e-12, max_iterations=iterations)
    found = hessian(x, y, a, b, debias=debias, **options | {"options": stop})
    plans = couplings(found, x, y, a, b, **options)
    v = torch.randn(count, n, 3, generator=torch.Generator().manual_seed(2)).double()
    w = torch.randn(count, m, 3, generator=torch.Generator().manual_seed(4)).double()
    got = found.product(v)
    assert bool(got.converged.all())
    joint = DivergenceCurvature(found._problem, found.divergence, TIGHT).along(v, w)
    assert joint.y is not None
    for k in range(count):
        expected, _ = dense(plans, x, y, v[k], None, lambda_x)
        size = float(expected.abs().max()) + 1e-3
        assert float((got.values[k] - expected).abs().max()) <= 1e-9 * size
        energy = float((v[k] * expected).sum())
        assert abs(float(got.curvature[k]) - energy) <= 1e-9 * float(v[k].norm()) * size
        by_x, by_y = dense(plans, x, y, v[k], w[k], lambda_x)
        size = float(by_x.abs().max()) + float(by_y.abs().max()) + 1e-3
        assert float((joint.x[k] - by_x).abs().max()) <= 1e-9 * size
        assert float((joint.y[k] - by_y).abs().max()) <= 1e-9 * size
        energy = float((v[k] * by_x).sum() + (w[k] * by_y).sum())
        assert abs(float(joint.curvature[k]) - energy) <= 1e-8 * float(v[k].norm()) * size


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("labels", [False, True])
def test_products_are_differences_of_gradients(debias: bool, labels: bool) -> None:
    x, y, v = cloud(12, 0), cloud(9, 1), cloud(12, 2)
    options = labelled(12, 9) if labels else {}

    def gradient(points: Tensor) -> Tensor:
        return hessian(points, y, debias=debias, **options).gradient

    step, differences = 3e-3, torch.zeros_like(x)
    for times, weight in ((1, 2 / 3), (2, -1 / 12)):
        ends = [gradient(x + sign * times * step * v) for sign in (1, -1)]
        differences += weight * (ends[0] - ends[1]) / step
    found = hessian(x, y, debias=debias, **options).product(v).values
    assert float((found - differences).abs().max()) <= 1e-9


@pytest.mark.slow
def test_both_passes_of_autograd() -> None:
    x, y = (cloud(5, seed, d=2).requires_grad_() for seed in (0, 1))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return otdd.sinkhorn_loss(x, y, epsilon=EPSILON, options=EXACT)

    assert torch.autograd.gradgradcheck(loss, (x, y))
    assert torch.autograd.gradgradcheck(lambda y: loss(x.detach(), y), (y,))
    assert torch.autograd.gradgradcheck(lambda x: (2 * loss(x.exp(), y.detach())).square(), (x,))


def test_autograd_gives_the_products() -> None:
    x, y, v, w = (
        cloud(20, 0).requires_grad_(),
        cloud(15, 1).requires_grad_(),
        *map(cloud, (20, 15), (2, 3)),
    )
    loss = otdd.sinkhorn_loss(x, y, epsilon=EPSILON, options=EXACT)
    gradients = torch.autograd.grad(loss, (x, y), create_graph=True)
    found = torch.autograd.grad(gradients, (x, y), (v, w))
    known = hessian(x.detach(), y.detach())
    joint = DivergenceCurvature(known._problem, known.divergence, TIGHT).along(v[None], w[None])
    assert joint.y is not None
    for got, expected in zip(found, (joint.x[0], joint.y[0]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)
    # Of y standing still.
    (found_x,) = torch.autograd.grad(
        torch.autograd.grad(
            otdd.sinkhorn_loss(x, y.detach(), epsilon=EPSILON, options=EXACT), x, create_graph=True
        ),
        x,
        v,
    )
    torch.testing.assert_close(found_x, known.product(v).values, rtol=1e-8, atol=1e-10)


def test_products_by_autograds_own_function() -> None:
    x, y, v = cloud(12, 0), cloud(9, 1), cloud(12, 2)

    def loss(x: Tensor) -> Tensor:
        return otdd.sinkhorn_loss(x, y, epsilon=EPSILON, options=EXACT)

    _, found = torch.autograd.functional.vhp(loss, x, v)
    torch.testing.assert_close(found, hessian(x, y).product(v).values, rtol=1e-8, atol=1e-10)


def test_half_types_stay_what_they_are() -> None:
    x, y, v = (points.half() for points in (cloud(12, 0), cloud(9, 1), cloud(12, 2)))
    found = hessian(x, y, options=None, cg=CGOptions())
    values = found.product(v).values
    assert found.gradient.dtype == values.dtype == torch.float16
    exact = hessian(x.double(), y.double()).product(v.double()).values
    torch.testing.assert_close(values.double(), exact, rtol=2e-3, atol=2e-3)
    with pytest.raises(
        InputError, match=r"^v must be torch.float16 on cpu as the gradient, got torch.float32"
    ):
        found.product(v.float())


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8])
def test_integer_points_have_real_derivatives(kind: torch.dtype) -> None:
    x, y, v = (3 * cloud(12, 0)).abs().to(kind), cloud(9, 1).float(), cloud(12, 2).float()
    found = hessian(x, y, options=None, cg=CGOptions())
    exact = hessian(x.float(), y, options=None, cg=CGOptions())
    assert torch.equal(found.gradient, exact.gradient)
    assert torch.equal(found.product(v).values, exact.product(v).values)


def test_the_first_pass_of_autograd_solves_no_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it evaluate the plan again."""
    x = cloud(20, 0).requires_grad_()
    loss = otdd.sinkhorn_loss(x, cloud(15, 1), epsilon=EPSILON)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pass")

    monkeypatch.setattr(StoredOperator, "apply_plan", refuse)
    monkeypatch.setattr(StoredOperator, "plan_entries", refuse)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(AssertionError, match="a pass"):
        torch.autograd.grad(gradient.sum(), x)


def test_points_that_changed_meanwhile_are_refused() -> None:
    x = cloud(9, 0).requires_grad_()
    loss = otdd.sinkhorn_loss(x, cloud(7, 1), epsilon=EPSILON)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with torch.no_grad():
        x += 1
    with pytest.raises(InputError, match=r"^an input was changed in place .*; clone it before$"):
        torch.autograd.grad(gradient.sum(), x)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("labels", [False, True])
def test_one_direction_for_all_points(debias: bool, labels: bool) -> None:
    x, y, a = cloud(12, 0), cloud(9, 1), masses(12, 0)
    found = hessian(x, y, a, lambda_x=0.7, debias=debias, **(labelled(12, 9) if labels else {}))
    t = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    values = found.product(t.expand(12, 3)).values
    torch.testing.assert_close(values, 1.4 * a[:, None] * t, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("debias", [False, True])
def test_without_an_end_to_epsilon_all_points_are_one(debias: bool) -> None:
    x, y, v, a = cloud(12, 0), cloud(9, 1), cloud(12, 2), masses(12, 0)
    values = hessian(x, y, a, epsilon=1e8, debias=debias).product(v).values
    expected = a[:, None] * (a @ v if debias else v)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("labels", [False, True])
def test_a_cloud_and_itself_are_at_a_minimum(labels: bool) -> None:
    """The divergence of a cloud from itself is 0, and nowhere less."""
    x = cloud(8, 0, d=2)
    options = labelled(8, 8) if labels else {}
    if labels:
        block = options["class_table"][:CLASSES, :CLASSES]
        options["class_table"] = block.repeat(2, 2)
    found = hessian(x, x.clone(), **options)
    assert found.divergence.identical
    assert float(found.gradient.abs().max()) <= 1e-12
    matrix = found.product(torch.eye(16).double().view(16, 8, 2)).values.view(16, 16)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12)
    assert float(torch.linalg.eigvalsh(matrix).min()) >= -1e-12


def test_symmetry_linearity_order_and_units() -> None:
    x, y, v, w = cloud(12, 0), cloud(9, 1), cloud(12, 2), cloud(12, 3)
    found = hessian(x, y)
    of_v, of_w, of_both = found.product(torch.stack((v, w, 2 * v - 3 * w))).values
    torch.testing.assert_close((w * of_v).sum(), (v * of_w).sum(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(of_both, 2 * of_v - 3 * of_w, rtol=1e-9, atol=1e-12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    moved = hessian(x[order], y.flip(0)).product(v[order]).values
    torch.testing.assert_close(moved, of_v[order], rtol=1e-9, atol=1e-12)
    # The cost is a square: second derivatives have no unit.
    scaled = hessian(1e3 * x, 1e3 * y, epsilon=1e6 * EPSILON).product(v).values
    torch.testing.assert_close(scaled, of_v, rtol=1e-9, atol=1e-12)
    far = hessian(x + 1e4, y + 1e4).product(v).values
    torch.testing.assert_close(far, of_v, rtol=1e-6, atol=1e-9)


def test_damping_goes_to_nothing() -> None:
    x, y, v = cloud(12, 0), cloud(9, 1), cloud(12, 2)
    exact = hessian(x, y).product(v).values
    errors = [
        float((hessian(x, y, cg=CGOptions(1e-12, damping=delta)).product(v).values - exact).norm())
        for delta in (1e-2, 1e-3, 1e-4)
    ]
    assert errors[0] > 5 * errors[1] > 25 * errors[2] > 0


@pytest.mark.parametrize("debias", [False, True])
def test_damped_products_are_symmetric_too(debias: bool) -> None:
    """Of both clouds moving; and what constants are taken to does not change."""
    x, y, a = cloud(12, 0), cloud(9, 1), masses(12, 0)
    found = hessian(x, y, a, debias=debias, cg=CGOptions(1e-12, damping=0.1))
    v, w = (torch.stack([cloud(n, seed) + 1 for seed in (2, 3, 4)]) for n in (12, 9))
    v[2], w[2] = 1, 1
    alone = found.product(v)
    matrix = torch.einsum("kni,lni->kl", v, alone.values)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-11)
    torch.testing.assert_close(matrix.diagonal(), alone.curvature, rtol=0, atol=1e-11)
    expected = a[:, None].expand(12, 3)
    torch.testing.assert_close(alone.values[2], expected, rtol=0, atol=1e-13)
    joint = DivergenceCurvature(found._problem, found.divergence, found._curvature._cg).along(v, w)
    assert joint.y is not None
    matrix = torch.einsum("kni,lni->kl", v, joint.x) + torch.einsum("kni,lni->kl", w, joint.y)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-11)
    torch.testing.assert_close(matrix.diagonal(), joint.curvature, rtol=0, atol=1e-11)
    assert float(joint.x[2].abs().max()) + float(joint.y[2].abs().max()) <= 1e-13


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_a_curvature_without_debiasing_is_a_lower_bound(most: int) -> None:
    """However early the linear system is left."""
    x, y, v = cloud(40, 0), cloud(30, 1), cloud(40, 2)
    exact = hessian(x, y, debias=False).product(v).curvature
    early = hessian(x, y, debias=False, cg=CGOptions(1e-12, max_iterations=most))
    with pytest.warns(
        NotConvergedWarning, match=r"; raise cg.tolerance or cg.max_iterations$"
    ) as caught:
        found = early.product(v)
    assert caught[0].filename == __file__
    assert not bool(found.converged)
    assert int(found.iterations) == most
    assert float(found.curvature) <= float(exact) + 1e-12
    # It is off by the square of what the product is off by.
    off = abs(float((v * found.values).sum()) - float(exact))
    assert float(exact - found.curvature) <= off + 1e-12


@pytest.mark.parametrize("debias", [False, True])
def test_a_curvature_is_off_by_the_square_of_what_solutions_are(
    debias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both clouds moving; and below the exact one without self terms."""
    x, y, v, w = cloud(30, 0), cloud(20, 1), cloud(30, 2)[None], cloud(20, 3)[None]
    known = hessian(x, y, debias=debias)
    along = DivergenceCurvature(known._problem, known.divergence, TIGHT).along
    exact = along(v, w)
    whole = Solver.solve

    def off(solver: Solver, right: Tensor) -> Any:
        found = whole(solver, right)
        noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(5)).double()
        values = found.values + size * noise
        return found._replace(values=values, left=right - solver._system.times(values))

    monkeypatch.setattr(Solver, "solve", off)
    errors = []
    for size in (1e-2, 1e-3):
        found = along(v, w)
        assert found.y is not None
        errors.append(float(exact.curvature - found.curvature))
        assert debias or errors[-1] > 0
        assert float((found.x - exact.x).norm()) > 1e-3 * size
    assert 90 < errors[0] / errors[1] < 110


def test_what_autograds_second_pass_did_not_solve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a way out that those who call for a loss have, which takes no `cg`."""
    monkeypatch.setattr(second_derivatives, "TIGHT", 1e-100)
    x = cloud(20, 0).requires_grad_()
    loss = otdd.sinkhorn_loss(x, cloud(15, 1), epsilon=EPSILON, options=EXACT)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.warns(NotConvergedWarning, match=r"; otdd.sinkhorn_hessian takes a larger cg"):
        torch.autograd.grad(gradient, x, cloud(20, 2))


def test_convergence_may_be_required() -> None:
    options = Converged(1e-9, require_convergence=True)
    found = hessian(cloud(40, 0), cloud(30, 1), options=options, cg=CGOptions(1e-12, 1))
    with pytest.raises(ConvergenceError, match=r"^conjugate gradients left a relative residual"):
        found.product(cloud(40, 2))


@pytest.mark.parametrize("debias", [False, True])
def test_groups_that_are_far_apart(debias: bool) -> None:
    """One more direction in which nothing moves, but for rounding: harmless."""
    x, y = cloud(20, 0), cloud(20, 1)
    x[10:, 0] += 60
    y[10:, 0] += 60
    found, v = hessian(x, y, debias=debias, options=Converged(1e-9)), cloud(20, 2)
    plans = couplings(found, x, y, *(torch.full((20,), 0.05, dtype=torch.float64),) * 2)
    assert float(plans["xy"][:10, 10:].max()) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        values = found.product(v).values
    expected, _ = dense(plans, x, y, v, None, 0.5)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [False, True])
def test_points_that_are_matched_one_to_one(
    kind: torch.dtype, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix is 0 but for rounding, and so is what it is to be solved for: that is no miss."""
    if not kept:
        monkeypatch.setattr(StoredOperator, "_prepared_plan", lambda *_: None)
    x, v = cloud(30, 0, d=50).to(kind), cloud(30, 2, d=50).to(kind)
    y = x + 1e-3 * cloud(30, 1, d=50).to(kind)
    found = otdd.sinkhorn_hessian(x, y, epsilon=0.5, debias=False)
    product = found.product(torch.stack((v, torch.ones_like(v))))
    assert bool(product.converged.all())
    # Every point keeps its match: only the gradient's own 2 L r x moves.
    assert float((product.values[0] - v / 30).norm() / (v / 30).norm()) <= 1e-4


@pytest.mark.parametrize("decomposed", [False, True])
def test_all_points_of_a_side_are_equal(decomposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only constants are asked of the system, and rounding of what is left of them."""
    monkeypatch.setattr(direct, "MOST_POINTS", 100 if decomposed else 0)
    draw = torch.Generator().manual_seed(20)
    x, y, v = torch.randn(20, 3, generator=draw), torch.full((19, 3), 0.3), cloud(20, 2).float()
    product = otdd.sinkhorn_hessian(x, y, epsilon=0.5, debias=False).product(v)
    assert bool(product.converged.all())
    torch.testing.assert_close(product.values, v / 20, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("debias", [False, True])
def test_points_in_float32(debias: bool) -> None:
    x, y, v = (points.float() for points in (cloud(200, 0), cloud(150, 1), cloud(200, 2)))
    found = otdd.sinkhorn_hessian(x, y, epsilon=EPSILON, debias=debias)
    got = found.product(v)
    assert got.values.dtype == torch.float32
    assert bool(got.converged)
    weights = [torch.full((n,), 1 / n, dtype=torch.float64) for n in (200, 150)]
    plans = couplings(found, x.double(), y.double(), *weights)
    expected, _ = dense(plans, x.double(), y.double(), v.double(), None, 0.5)
    assert float((got.values - expected).norm() / expected.norm()) <= 2e-5
    assert got.values.shape == (200, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "debias", "kept"),
    [(False, True, False), (True, False, False), (True, True, True), (False, True, True)],
)
def test_products_in_triton(
    labels: bool, debias: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded points iterate, those themselves tell the residual."""
    if not kept:
        monkeypatch.setattr(kernel_plans, "KEPT_BYTES", 0)
        monkeypatch.setattr(kernel_plans, "FEW_COORDINATES", 0)
    x, y, v = (points.float().to(DEVICE) for points in (cloud(50, 0), cloud(40, 1), cloud(50, 2)))
    options = {
        key: part.to(DEVICE) for key, part in labelled(50, 40).items() if key != "class_totals"
    }
    options = options | {"class_totals": (CLASSES, CLASSES)} if labels else {}
    compute = otdd.ComputeOptions(DEVICE, backend="triton")
    found = otdd.sinkhorn_hessian(x, y, epsilon=EPSILON, debias=debias, compute=compute, **options)
    got = found.product(torch.stack((v, v.flip(0))))
    assert bool(got.converged.all())
    weights = [torch.full((n,), 1 / n, dtype=torch.float64, device=DEVICE) for n in (50, 40)]
    plans = couplings(found, x.double(), y.double(), *weights, **options)
    for values, found_energy, along in zip(got.values, got.curvature, (v, v.flip(0)), strict=True):
        expected, _ = dense(plans, x.double(), y.double(), along.double(), None, 0.5)
        off = 5e-6 if kept else 5e-5
        assert float((values - expected).norm() / expected.norm()) <= off
        energy = float((along * expected).sum())
        assert abs(float(found_energy) - energy) <= 5e-5 * float(along.norm() * expected.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("held", ["none", "half", "double"])
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("debias", [False, True])
def test_products_of_many_points(
    held: str, labels: bool, debias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against products in float64 at the same potentials."""
    if held != "double":
        monkeypatch.setattr(kernel_plans, "KEPT_BYTES", 0)
        monkeypatch.setattr(kernel_plans, "FEW_COORDINATES", 0)
    (n, m, d), options = (3000, 2500, 48), labelled(3000, 2500) if labels else {}
    options = {
        key: part.to(DEVICE) if isinstance(part, Tensor) else part for key, part in options.items()
    }
    x, y, v = (cloud(size, seed, d=d).float().to(DEVICE) / 3 for seed, size in enumerate((n, m, n)))
    directions = torch.stack((v, v.flip(0), v.roll(1, 1)))
    found = otdd.sinkhorn_hessian(x, y, epsilon=2.0, debias=debias, **options)
    with monkeypatch.context() as short:
        if held == "none":
            # After the solve, which would be refused.
            short.setattr(memory, "UNASKED", 0)
            short.setattr(memory, "free_memory", lambda _: 0)
        got = found.product(directions)
    assert bool(got.converged.all())
    exact = otdd.sinkhorn_hessian(
        x.double(), y.double(), epsilon=2.0, debias=debias, cg=CGOptions(1e-8), **options
    )
    terms = found.divergence.terms
    exact._curvature._terms = {
        name: replace(term, f=term.f.double(), g=term.g.double()) for name, term in terms.items()
    }
    expected = exact.product(directions.double())
    assert float((got.values - expected.values).norm() / expected.values.norm()) <= 1e-4
    torch.testing.assert_close(got.curvature, expected.curvature, rtol=1e-3, atol=1e-6)


SHAPES = r"^v must be a tensor \(12, 3\), or \(s, 12, 3\) of s >= 1 directions, "
REFUSED = {
    "another shape": (lambda: cloud(11, 2), SHAPES + r"got Tensor of shape \(11, 3\)$"),
    "no tensor": (lambda: [1.0], SHAPES + r"got list of 1 items$"),
    "none": (lambda: torch.zeros(0, 12, 3).double(), SHAPES + "got none$"),
    "another type": (
        lambda: cloud(12, 2).float(),
        r"^v must be torch.float64 on cpu as the gradient, got torch.float32 on cpu$",
    ),
    "sparse": (
        lambda: cloud(12, 2).to_sparse(),
        r"^v must be dense, got torch.sparse_coo; give it as .to_dense\(\)$",
    ),
    "not finite": (lambda: cloud(12, 2) / 0, r"^v holds NaN or infinite values$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_direction(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        hessian(cloud(12, 0), cloud(9, 1)).product(given())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 1.0}, r"^cg.tolerance must be between 0 and 1, got 1.0$"),
        ({"tolerance": 0.0}, r"^cg.tolerance must be between 0 and 1, got 0.0$"),
        ({"max_iterations": 0}, r"^cg.max_iterations must be at least 1, got 0$"),
        ({"damping": -0.1}, r"^cg.damping must be finite and not negative, got -0.1$"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CGOptions(**options)


def test_memory_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hessian(cloud(12, 0), cloud(9, 1))
    monkeypatch.setattr(StoredOperator, "plan_entries", lambda *_: torch.empty(1 << 50))
    with pytest.raises(InputError, match=r"^out of memory on cpu: .* free, and .* need at least"):
        found.product(cloud(12, 2))


def test_many_directions_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    found, v = hessian(cloud(12, 0), cloud(9, 1)), torch.stack([cloud(12, k) for k in range(5)])
    whole = found.product(v)
    monkeypatch.setattr(curvature, "ELEMENTS", 5 * 2 * 12 * 3 // 3)
    parts = found.product(v)
    for one, two in product((whole,), (parts,)):
        torch.testing.assert_close(one.values, two.values, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(one.curvature, two.curvature, rtol=1e-10, atol=1e-12)
