"""Gradients and products are linear in what they are asked for, up to the ends of its type."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from derivative_cases import DEVICE, drawn, solve_by
from pairwise import named, pairwise
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import CGOptions, Converged, NotConvergedWarning

# Squares of 2^-540 and 2^540 are 0 and infinite, as those of what they multiply. In float32
# products of small ones with a plan leave no digit.
CASES = {
    **{f"double {k}": (torch.float64, "double", k) for k in (-1000, -540, 540, 1000)},
    **{f"single {k}": (torch.float32, "fast", k) for k in (-120, 120)},
    # Points in float64 and a plan in float32.
    **{f"mixed {k}": (torch.float64, "fast", k) for k in (-400, 400)},
}
Case = tuple[torch.dtype, str, int]


def clouds(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = drawn(30, 3, seed=1), drawn(20, 3, seed=2) + 0.3
    return x.to(DEVICE, dtype), y.to(DEVICE, dtype)


def times_power(values: Tensor, power: int) -> Tensor:
    """In two steps, of which each has a factor."""
    half = power // 2
    return values.double() * 2.0**half * 2.0 ** (power - half)


def settings(precision: str) -> dict[str, Any]:
    return {
        "epsilon": 2.0,
        "cg": CGOptions(1e-10 if precision == "double" else 1e-5),
        "options": Converged(1e-4),
        "compute": otdd.ComputeOptions(DEVICE, precision=precision),
    }


def assert_linear(found: Tensor, one: Tensor, power: int, precision: str) -> None:
    expected = one.double()
    error = (times_power(found, -power) - expected).abs().max() / expected.abs().max()
    assert float(error) <= (1e-12 if precision == "double" else 1e-5)


def differentiated(function: str, dtype: torch.dtype, precision: str) -> tuple[Tensor, Tensor]:
    """What has a gradient, and by what."""
    x, y = clouds(dtype)
    options = settings(precision)
    if function == "sinkhorn_loss":
        del options["cg"]
        x.requires_grad_()
        loss = otdd.sinkhorn_loss(x, y, **options)
        return torch.autograd.grad(loss, x, create_graph=True)[0], x
    given = (torch.cdist(x, y).square(),) if function == "matrix_plan" else (x, y)
    moving = given[0].requires_grad_()
    found = getattr(otdd, function)(*given, **options)
    return (found if isinstance(found, Tensor) else found[0]), moving


@pytest.mark.slow(after=11)
@pairwise(
    case=named(CASES),
    function=["sinkhorn_potentials", "transport_map", "matrix_plan", "sinkhorn_loss"],
    way=["streamed", "iterations", "decomposed"],
)
def test_cotangents(case: Case, function: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients, and of the second pass of a loss."""
    solve_by(way, monkeypatch)
    dtype, precision, power = case
    result, moving = differentiated(function, dtype, precision)
    cotangent = drawn(*result.shape, seed=3).to(result)
    with warnings.catch_warnings():
        # The loss asks for more than a plan in float32 gives points in float64.
        unmet = "ignore" if function == "sinkhorn_loss" else "error"
        warnings.simplefilter(unmet, NotConvergedWarning)
        one, found = (
            torch.autograd.grad(result, moving, along.to(result), retain_graph=True)[0]
            for along in (cotangent, times_power(cotangent, power))
        )
    assert_linear(found, one, power, precision)


@pytest.mark.slow(after=6)
@pairwise(case=named(CASES), way=["streamed", "iterations", "decomposed"], debias=[True, False])
def test_directions(case: Case, way: str, debias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, and of 0 there is nothing."""
    solve_by(way, monkeypatch)
    dtype, precision, power = case
    hessian = otdd.sinkhorn_hessian(*clouds(dtype), debias=debias, **settings(precision))
    v = drawn(30, 3, seed=3).to(DEVICE, dtype)
    found = hessian.product(torch.stack((v, times_power(v, power).to(dtype), 0 * v)))
    assert bool(found.converged.all())
    one, other, none = found.values
    assert_linear(other, one, power, precision)
    assert not none.any()
    # Without overflow of the square.
    if abs(power) < 500:
        of_one, of_other, of_none = found.curvature.tolist()
        assert of_other == pytest.approx(of_one * 4.0**power, rel=1e-4)
        assert of_none == 0
