"""Gradients and products are linear in what they are asked for, up to the ends of its type."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import CGOptions, Converged, NotConvergedWarning
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.solver import direct
from otdd_flash.solver.units import largest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Their squares are 0 and infinite, as those of what they multiply.
POWERS = [-1000, -540, 540, 1000]
# Of float32, in which products of small ones with a plan leave no digit.
POWERS_SINGLE = [-120, 120]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(DEVICE)


def clouds(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return drawn(30, 3, seed=1).to(dtype), (drawn(20, 3, seed=2) + 0.3).to(dtype)


def times_power(values: Tensor, power: int) -> Tensor:
    """In two steps, of which each has a factor."""
    half = power // 2
    return values.double() * 2.0**half * 2.0 ** (power - half)


def settings(dtype: torch.dtype) -> dict[str, Any]:
    double = dtype == torch.float64
    return {
        "epsilon": 1.0,
        "cg": CGOptions(1e-10 if double else 1e-5),
        "options": Converged(1e-10 if double else 1e-4),
        "compute": otdd.ComputeOptions(DEVICE, precision="double" if double else "fast"),
    }


def result_of(function: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is differentiated, and by what."""
    x, y = clouds(dtype)
    given = (torch.cdist(x, y).square(),) if function == "matrix_plan" else (x, y)
    moving = given[0].requires_grad_()
    found = getattr(otdd, function)(*given, **settings(dtype))
    return (found if isinstance(found, Tensor) else found[0]), moving


@pytest.fixture(params=["decomposed", "iterations"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "iterations":
        monkeypatch.setattr(direct, "MOST_POINTS", 0)


CASES = [
    *((torch.float64, power) for power in POWERS),
    *((torch.float32, power) for power in POWERS_SINGLE),
]


def assert_linear(found: Tensor, one: Tensor, power: int, most: float | None = None) -> None:
    expected = one.double()
    error = (times_power(found, -power) - expected).abs().max() / expected.abs().max()
    assert float(error) <= (most or (1e-12 if one.dtype == torch.float64 else 1e-5))


@pytest.mark.parametrize(("dtype", "power"), CASES)
@pytest.mark.parametrize("function", ["sinkhorn_potentials", "transport_map", "matrix_plan"])
def test_cotangents(function: str, dtype: torch.dtype, power: int) -> None:
    result, moving = result_of(function, dtype)
    cotangent = drawn(*result.shape, seed=3).to(result)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotConvergedWarning)
        one, found = (
            torch.autograd.grad(result, moving, along.to(result), retain_graph=True)[0]
            for along in (cotangent, times_power(cotangent, power))
        )
    assert_linear(found, one, power)


@pytest.mark.parametrize("power", [-400, 400])
@pytest.mark.parametrize("function", ["sinkhorn_potentials", "transport_map", "sinkhorn_hessian"])
def test_what_the_type_of_a_plan_does_not_hold(
    function: str, power: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points in float64 and a plan in float32, of more points than are held."""
    monkeypatch.setattr(direct, "MOST_POINTS", 0)
    monkeypatch.setattr(StoredOperator, "_prepared_plan", lambda *_: None)
    x, y = clouds(torch.float64)
    x.requires_grad_(function != "sinkhorn_hessian")
    found = getattr(otdd, function)(x, y, **settings(torch.float32))

    def asked(along: Tensor) -> Tensor:
        if isinstance(found, otdd.SinkhornHessian):
            return found.product(along).values
        result = found if isinstance(found, Tensor) else found[0]
        return torch.autograd.grad(result, x, along, retain_graph=True)[0]

    along = drawn(30, 3, seed=3)[..., 0 if function == "sinkhorn_potentials" else slice(None)]
    assert_linear(asked(times_power(along, power)), asked(along), power, 1e-5)


@pytest.mark.parametrize(("dtype", "power"), CASES)
@pytest.mark.parametrize("debias", [False, True])
def test_directions(dtype: torch.dtype, power: int, debias: bool) -> None:
    """Each by itself, and of 0 there is nothing."""
    hessian = otdd.sinkhorn_hessian(*clouds(dtype), debias=debias, **settings(dtype))
    v = drawn(30, 3, seed=3).to(dtype)
    found = hessian.product(torch.stack((v, times_power(v, power).to(dtype), 0 * v)))
    assert bool(found.converged.all())
    one, other, none = found.values
    assert_linear(other, one, power)
    assert not none.any()
    # Without overflow of the square.
    if abs(power) < 500:
        of_one, of_other, of_none = found.curvature.tolist()
        assert of_other == pytest.approx(of_one * 4.0**power, rel=1e-4)
        assert of_none == 0


@pytest.mark.parametrize(("dtype", "power"), CASES)
def test_second_passes_of_autograd(dtype: torch.dtype, power: int) -> None:
    x, y = clouds(dtype)
    x.requires_grad_()
    options = {key: part for key, part in settings(dtype).items() if key != "cg"}
    loss = otdd.sinkhorn_loss(x, y, **options)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    v = drawn(30, 3, seed=3).to(dtype)
    one, found = (
        torch.autograd.grad(gradient, x, along.to(dtype), retain_graph=True)[0]
        for along in (v, times_power(v, power))
    )
    assert_linear(found, one, power)


@pytest.mark.parametrize("power", [-500, 500])
def test_values_of_a_map(power: int) -> None:
    """Right-hand sides of the size of the values."""
    x, y = clouds(torch.float64)
    x.requires_grad_()
    cotangent = drawn(30, 3, seed=3)
    one, found = (
        torch.autograd.grad(
            otdd.transport_map(x, y, values=values, **settings(torch.float64)), x, cotangent
        )[0]
        for values in (y, times_power(y, power))
    )
    assert_linear(found, one, power)


def test_the_largest() -> None:
    one, two = torch.tensor([[1.0, -3.0], [0.0, 2.0]]), torch.tensor([[-4.0, 0.5]])
    assert largest(one, two).tolist() == 4
    assert largest(one, dim=0).tolist() == [1, 3]
    assert largest(one[None], two[None], dim=(1, 2)).tolist() == [4]
    for dtype in (torch.float32, torch.float64):
        zeros = torch.zeros(3, dtype=dtype)
        assert torch.equal(zeros / largest(zeros), zeros)
    assert bool(largest(torch.tensor([1.0, torch.nan])).isnan())
