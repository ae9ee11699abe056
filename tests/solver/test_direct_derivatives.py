"""Derivatives by decomposed systems, against pseudo-inverses, differences and iterations."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import reference
import torch
from direct_cases import EPSILON, ONE, clouds, drawn, labelled, masses, quiet
from pairwise import pairwise
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import CGOptions, Converged
from otdd_flash.solver import direct
from otdd_flash.solver.hessian import DivergenceCurvature

HESSIANS = pairwise(
    shape=[(1, 1), (1, 5), (20, 20), (33, 21), (21, 33)],
    labels=[False, True],
    zeros=[False, True],
    debias=[False, True],
    count=[1, 7],
    steps=[1000, 3],
)


@pytest.mark.slow(after=8)
@HESSIANS
def test_hessian_products(
    shape: tuple[int, int], labels: bool, zeros: bool, debias: bool, count: int, steps: int
) -> None:
    """Of x alone and of both clouds, also of plans that were stopped early."""
    (n, m), (x, y) = shape, clouds(*shape)
    a, b = masses(n, 0, zeros=zeros), masses(m, 1, zeros=zeros)
    options = labelled(n, m) if labels else {}
    stop = Converged(1e-12, max_iterations=steps)
    given = {"debias": debias, "options": stop, "cg": ONE}
    found = quiet(otdd.sinkhorn_hessian, x, y, a, b, **options, **given)
    v, w = drawn(count, n, 3, seed=4), drawn(count, m, 3, seed=5)
    got = found.product(v)
    assert got.iterations.tolist() == [0] * count
    joint = DivergenceCurvature(found._problem, found.divergence, ONE).along(v, w)
    assert int(joint.iterations.max()) == 0
    plans = couplings(found, {"x": (x, a), "y": (y, b)}, options)
    for k in range(count):
        still = torch.zeros_like(y)
        alone, (by_x, by_y) = (
            dense_product(plans, (x, y), (v[k], along)) for along in (still, w[k])
        )
        size = 1e-3 + float(alone[0].abs().max() + by_x.abs().max() + by_y.abs().max())
        assert float((got.values[k] - alone[0]).abs().max()) <= 1e-9 * size
        assert float((joint.x[k] - by_x).abs().max()) <= 1e-9 * size
        assert joint.y is not None
        assert float((joint.y[k] - by_y).abs().max()) <= 1e-9 * size
        energy = float((v[k] * by_x).sum() + (w[k] * by_y).sum())
        assert abs(float(joint.curvature[k]) - energy) <= 1e-8 * size * float(v[k].norm())


def couplings(found: Any, sides: dict[str, tuple[Tensor, Tensor]], options: Any) -> Any:
    """The plans of the potentials that were returned, dense."""
    plans = {}
    for name, term in found.divergence.terms.items():
        (one, of_one), (two, of_two) = (sides[key] for key in name)
        classes = ()
        if options:
            rows, columns = (slice(0, 3) if key == "x" else slice(3, 6) for key in name)
            labels = (options[f"labels_{key}"] for key in name)
            classes = (0.5 * options["class_table"][rows, columns], *labels)
        cost = reference.dense_cost(one, two, 0.5, *classes)
        plans[name] = reference.plan(cost, of_one, of_two, term.f, term.g, EPSILON)
    return plans


def dense_product(
    plans: Any, points: tuple[Tensor, Tensor], along: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    found = list(reference.hessian_product(plans["xy"], points, along, EPSILON, 0.5))
    for k, name in enumerate(("xx", "yy")):
        if name in plans:
            own = reference.own_hessian_product(plans[name], points[k], along[k], EPSILON, 0.5)
            found[k] = found[k] - own / 2
    return found[0], found[1]


def test_a_hessian_keeps_its_decompositions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], torch.linalg.cholesky_ex
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda *given: calls.append(None) or real(*given)
    )
    found = quiet(otdd.sinkhorn_hessian, *clouds(12, 9))
    for k in range(3):
        found.product(drawn(12, 3, seed=k))
    assert len(calls) == 2


def inputs_of(function: str, n: int, m: int, *, labels: bool, zeros: bool) -> dict[str, Tensor]:
    """What the function is differentiated by."""
    found = {"a": masses(n, 3, zeros=zeros), "b": masses(m, 4, zeros=zeros)}
    if function == "matrix_plan":
        return {"costs": 2 * drawn(n, m, seed=1).square()} | found
    found |= dict(zip(("x", "y"), clouds(n, m), strict=True))
    found["lambda_x"] = torch.tensor(0.5, dtype=torch.float64)
    if labels:
        found["class_table"] = labelled(n, m)["class_table"]
    if function == "transport_map":
        found["values"] = drawn(m, 4, seed=6)
    return found


def gradients(
    function: str, given: dict[str, Tensor], settings: dict[str, Any]
) -> dict[str, Tensor]:
    leaves = {key: part.clone().requires_grad_() for key, part in given.items()}
    result = quiet(getattr(otdd, function), **leaves, **settings)
    results = result if isinstance(result, tuple) else (result,)
    cotangents = [drawn(*part.shape, seed=7 + k) for k, part in enumerate(results)]
    found = torch.autograd.grad(results, list(leaves.values()), cotangents)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.slow(after=12)
@pairwise(
    function=["transport_map", "sinkhorn_potentials", "matrix_plan"],
    shape=[(1, 1), (1, 6), (9, 9), (21, 33), (33, 21)],
    labels=[False, True],
    zeros=[False, True],
    damping=[0.0, 0.05],
    steps=[1000, 2],
)
def test_gradients_are_those_of_iterations(
    function: str,
    shape: tuple[int, int],
    labels: bool,
    zeros: bool,
    damping: float,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which other files compare with dense solves and unrolled autograd."""
    labels = labels and function != "matrix_plan"
    given = inputs_of(function, *shape, labels=labels, zeros=zeros)
    settings: dict[str, Any] = {"options": Converged(1e-12, max_iterations=steps)}
    if labels:
        settings |= {key: part for key, part in labelled(*shape).items() if key != "class_table"}
    without = CGOptions(1e-9, 1, damping)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="conjugate gradients")
        found = gradients(function, given, settings | {"cg": without})
    monkeypatch.setattr(direct, "MOST_POINTS", 0)
    expected = gradients(function, given, settings | {"cg": CGOptions(1e-13, 1000, damping)})
    for key, part in found.items():
        most = 1 + float(expected[key].abs().max())
        assert float((part - expected[key]).abs().max()) <= 1e-10 * most, key


@pytest.mark.parametrize("function", ["transport_map", "sinkhorn_potentials", "matrix_plan"])
@pytest.mark.parametrize("shape", [(7, 5), (5, 7)])
def test_gradients_are_differences(function: str, shape: tuple[int, int]) -> None:
    given = inputs_of(function, *shape, labels=False, zeros=False)
    key = "costs" if function == "matrix_plan" else "x"
    found, along = gradients(function, given, {"cg": ONE})[key], drawn(*given[key].shape, seed=9)

    def value(step: float) -> float:
        results = quiet(getattr(otdd, function), **given | {key: given[key] + step * along})
        results = results if isinstance(results, tuple) else (results,)
        pairs = ((part, drawn(*part.shape, seed=7 + k)) for k, part in enumerate(results))
        return float(sum((part * cotangent).sum() for part, cotangent in pairs))

    h = 1e-3
    slope = (8 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12 * h)
    assert float((found * along).sum()) == pytest.approx(slope, rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("function", ["transport_map", "sinkhorn_potentials"])
def test_cotangents_that_are_not_finite(function: str) -> None:
    given = inputs_of(function, 6, 5, labels=False, zeros=False)
    x = given["x"].requires_grad_()
    result = quiet(getattr(otdd, function), **given)
    result = result if isinstance(result, Tensor) else result[0]
    cotangent = drawn(*result.shape)
    cotangent[2] = torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = torch.autograd.grad(result, x, cotangent)
    assert bool(found.isnan().all())
