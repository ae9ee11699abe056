"""Gradients of transport maps, potentials and plans: by unrolled autograd, systems, differences."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import reference
import torch
from derivative_cases import (
    CLASSES,
    DEVICE,
    EARLY,
    EPSILON,
    EXACT,
    WAYS,
    clouds,
    drawn,
    labelled,
    masses,
    quiet,
    solve_by,
)
from pairwise import pairwise
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import CGOptions, ComputeOptions, Converged, InputError, NotConvergedWarning
from otdd_flash.errors import ConvergenceError

MAP, POTENTIALS = otdd.transport_map, otdd.sinkhorn_potentials

Inputs = dict[str, Any]


def problem(n: int, m: int, *, zeros: bool = False, labels: bool = True) -> Inputs:
    """Inputs that a gradient is asked for by."""
    given = dict(zip(("x", "y"), clouds(n, m), strict=True))
    given |= {"a": masses(n, 3, zeros=zeros), "b": masses(m, 4, zeros=zeros)}
    given["lambda_x"] = torch.tensor(0.5, dtype=torch.float64)
    if labels:
        given["class_table"] = labelled(n, m)["class_table"]
        given["lambda_y"] = torch.tensor(0.4, dtype=torch.float64)
    return given


def solved(function: Any, given: Inputs, **settings: Any) -> Any:
    """By points of all inputs, and labels where there is a table."""
    labels = labelled(len(given["x"]), len(given["y"])) if "class_table" in given else {}
    return quiet(function, **labels | given, **settings)


def first(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def dense_cost(given: Inputs) -> Tensor:
    cost = given["lambda_x"] * (given["x"][:, None] - given["y"][None]).square().sum(2)
    if "class_table" in given:
        block = given["class_table"][:CLASSES, CLASSES:]
        rows, columns = (torch.arange(size) % CLASSES for size in cost.shape)
        cost = cost + given["lambda_y"] * block[rows][:, columns]
    return cost


def dense(given: Inputs, potentials: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Potentials and conditional plans (n, m), for autograd."""
    cost, weights = dense_cost(given), (given["a"], given["b"])
    f, g = reference.held_potentials(cost, weights, potentials, EPSILON, iterations=200)
    conditional = (weights[1].log() + (g - cost) / EPSILON).softmax(1)
    shift = weights[1] @ g
    return f + shift, g - shift, conditional


def leaves(given: Inputs, *but: str) -> Inputs:
    return {key: part.clone().requires_grad_(key not in but) for key, part in given.items()}


def gradients(result: Tensor, given: Inputs) -> dict[str, Tensor]:
    wanted = {key: part for key, part in given.items() if part.requires_grad}
    found = torch.autograd.grad(result, list(wanted.values()), allow_unused=True)
    return {
        key: torch.zeros_like(part) if one is None else one
        for (key, part), one in zip(wanted.items(), found, strict=True)
    }


def held(given: Inputs, potentials: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Sums of the plan over the masses."""
    with torch.no_grad():
        f, g = potentials
        entries = ((f[:, None] + g - dense_cost(given)) / EPSILON).exp()
        return {"a": entries @ given["b"], "b": entries.T @ given["a"]}


def assert_same(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float,
    free: dict[str, Tensor] | None = None,
) -> None:
    """Equal, by masses along the simplex, on which a plan with sums `free` keeps its mass."""
    assert found.keys() == expected.keys()
    for key, one in found.items():
        error, most = one - expected[key], float(expected[key].abs().max())
        if key in ("a", "b"):
            ones = torch.ones_like(error)
            across = torch.stack((ones, ones if free is None else free[key]), 1)
            error = error - across @ (torch.linalg.pinv(across, rtol=1e-10) @ error)
        assert float(error.abs().max()) <= tolerance * (1 + most), (key, error)


@pytest.mark.slow(after=6)
@pairwise(
    of=["map", "map of values", "f", "g", "both"],
    way=WAYS,
    shape=[(9, 11), (11, 9), (1, 6), (1, 1)],
    labels=[True, False],
    zeros=[True, False],
    options=[EXACT, EARLY],
)
def test_gradients_are_those_of_dense_iterations(
    of: str,
    way: str,
    shape: tuple[int, int],
    labels: bool,
    zeros: bool,
    options: Converged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of plans that were stopped early; a map's masses are r and c then, not a and b."""
    cg, given = solve_by(way, monkeypatch), problem(*shape, zeros=zeros, labels=labels)
    at = solved(POTENTIALS, given, options=options)
    mapped = of.startswith("map")
    if of == "map of values":
        given["values"] = drawn(shape[1], 20, seed=6) + 5
    still = ("a", "b") if zeros or (mapped and options is EARLY) else ()
    ours, theirs = leaves(given, *still), leaves(given, *still)
    found = solved(MAP if mapped else POTENTIALS, ours, options=options, cg=cg)
    *potentials, plan = dense(theirs, at)
    found, expected = (
        ((found,), (plan @ theirs.get("values", theirs["y"]),)) if mapped else (found, potentials)
    )
    torch.testing.assert_close(found, tuple(expected), rtol=0, atol=1e-8)
    cotangents = [
        drawn(*part.shape, seed=7 + k) * (of != "fg"[1 - k]) for k, part in enumerate(found)
    ]
    sums = (
        sum((part * along).sum() for part, along in zip(parts, cotangents, strict=True))
        for parts in (found, expected)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotConvergedWarning)
        by_ours, by_theirs = (
            gradients(torch.as_tensor(part), inputs)
            for part, inputs in zip(sums, (ours, theirs), strict=True)
        )
    assert_same(by_ours, by_theirs, 1e-8, None if mapped else held(given, at))


@pytest.mark.usefixtures("iterations_alone")
@pytest.mark.parametrize(
    ("mass", "backend"), [(1e-9, "torch"), pytest.param(1e-20, "triton", marks=pytest.mark.slow)]
)
def test_points_of_little_mass_are_as_those_of_none(mass: float, backend: str) -> None:
    """Over their masses their cotangents are all of a residual: the others' were left unsolved."""
    given = problem(30, 40, labels=False)
    if backend == "triton":
        given |= {"x": given["x"].float(), "y": given["y"].float()}
    compute = ComputeOptions(DEVICE, backend=backend)
    settings = {"options": Converged(1e-4), "cg": CGOptions(), "compute": compute}
    found = []
    for least in (0.0, mass):
        a, b = (masses(size, size, zeros=True) for size in (30, 40))
        a, b = (torch.where(side > 0, side, least).to(DEVICE) for side in (a, b))
        ours = leaves(given | {"a": a, "b": b}, "a", "b")
        f, g = solved(POTENTIALS, ours, **settings)
        loss = f.sin() @ drawn(30, seed=7).to(f) + g @ drawn(40, seed=8).to(f)
        found.append(gradients(loss, ours))
    for key, expected in found[0].items():
        error = (found[1][key] - expected).abs().max() / expected.abs().max()
        assert float(error) <= 1e-3, (key, error)


@pytest.mark.parametrize(
    ("function", "way"),
    [(MAP, "iterations"), (POTENTIALS, "decomposed"), (otdd.matrix_plan, "decomposed")],
)
def test_masses_that_nothing_can_be_divided_by_are_0(
    function: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One over a subnormal mass is infinite, and gradients were NaN or wrong."""
    solve_by(way, monkeypatch)
    x, y = clouds(9, 11)
    found = []
    for least in (0.0, 1e-310):
        a, b = (masses(size, size, zeros=True) for size in (9, 11))
        sides = [torch.where(side > 0, side, least) for side in (a, b)]
        given = (torch.cdist(x, y).square(),) if function is otdd.matrix_plan else (x, y)
        moving = given[0].clone().requires_grad_()
        result = first(function(moving, *given[1:], *sides, epsilon=EPSILON))
        found.append(torch.autograd.grad(result, moving, drawn(*result.shape))[0])
    assert bool(found[0].isfinite().all())
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.usefixtures("iterations_alone")
@pytest.mark.parametrize("function", [MAP, POTENTIALS])
def test_masses_by_differences(function: Any) -> None:
    """Of mass that arrives where there is none as well."""
    given = problem(4, 5, zeros=True)

    def loss(inputs: Inputs) -> Tensor:
        found = solved(function, inputs)
        if function is MAP:
            return (found * drawn(4, 3, seed=7)).sum()
        return found[0] @ drawn(4, seed=7) + found[1] @ drawn(5, seed=8)

    inputs = leaves(given, *(key for key in given if key not in ("a", "b")))
    found = gradients(loss(inputs), inputs)
    step = 1e-4
    for key in ("a", "b"):
        weights, present = given[key], int(given[key].argmax())
        for k in range(len(weights)):
            moved = torch.zeros_like(weights)
            moved[k] += step
            moved[present] -= step
            # Points on the side where masses are not negative.
            values = [loss(given | {key: weights + j * moved}) for j in range(4)]
            factors = (-11 / 6, 3, -3 / 2, 1 / 3)
            slope = sum(w * value for w, value in zip(factors, values, strict=True)) / step
            off = float(slope - found[key][k] + found[key][present])
            assert abs(off) <= 1e-6 * (1 + float(found[key].abs().max())), (key, k)


@pytest.mark.usefixtures("iterations_alone")
@pytest.mark.parametrize(
    ("backend", "precision"),
    [("torch", "fast"), pytest.param("triton", "high", marks=pytest.mark.slow)],
)
def test_float32(backend: str, precision: str) -> None:
    given = problem(33, 20)
    exact, single = leaves(given), leaves({key: part.float() for key, part in given.items()})
    compute = ComputeOptions(DEVICE, backend=backend, precision=precision)
    settings = {"options": Converged(tolerance=1e-5), "cg": CGOptions(), "compute": compute}
    mapped = solved(MAP, single, **settings)
    assert mapped.dtype == torch.float32
    cotangent = drawn(33, 3, seed=7)
    expected = gradients((solved(MAP, exact) * cotangent).sum(), exact)
    found = gradients((mapped * cotangent.float()).sum(), single)
    assert all(part.dtype == torch.float32 for part in found.values())
    assert_same({key: part.double() for key, part in found.items()}, expected, 2e-3)


@pytest.mark.parametrize(
    ("function", "way", "value"),
    [(MAP, "decomposed", torch.nan), (POTENTIALS, "iterations", torch.inf)],
)
def test_cotangents_that_are_not_finite(
    function: Any, way: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cg, given = solve_by(way, monkeypatch), leaves(problem(5, 6))
    result = first(solved(function, given, cg=cg))
    cotangent = drawn(*result.shape)
    cotangent[2] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.autograd.grad(result, [given["x"], given["a"]], cotangent)
    assert all(bool(part.isnan().all()) for part in found)


@pytest.mark.usefixtures("iterations_alone")
def test_a_missed_tolerance_is_said() -> None:
    given, few = leaves(problem(9, 11)), CGOptions(1e-12, max_iterations=2)
    mapped = solved(MAP, given, cg=few)
    with pytest.warns(NotConvergedWarning, match=r"residual of .*system of the gradient.*cg\."):
        mapped.sum().backward()
    strict = Converged(tolerance=1e-9, require_convergence=True)
    f, _ = solved(POTENTIALS, given, cg=few, options=strict)
    with pytest.raises(ConvergenceError, match="precision=double"):
        f.square().sum().backward()
    with pytest.warns(NotConvergedWarning):
        otdd.transport_map(*clouds(9, 11), epsilon=EPSILON, options=EARLY)


@pytest.mark.parametrize("function", [MAP, POTENTIALS])
def test_points_without_mass_that_rounding_decides_about_are_refused(function: Any) -> None:
    """A map would be 0 / 0 there, and every gradient NaN."""
    x, y = torch.linspace(0, 3e5, 30)[:, None], torch.tensor([[0.0], [0.3], [1.0]])
    a, b = (torch.arange(30) == 0).double(), torch.tensor([0.5, 0.3, 0.2]).double()

    def gradient(precision: str) -> Tensor:
        leaf = x.clone().requires_grad_()
        compute = otdd.ComputeOptions("cpu", precision=precision)
        found = first(function(leaf, y, a, b, epsilon=1e-3, compute=compute))
        return torch.autograd.grad(found.sum(), leaf)[0]

    with pytest.raises(InputError, match=r"of little or no mass: rounding alone decides"):
        gradient("fast")
    assert bool(gradient("double").isfinite().all())


def twice(function: Any) -> Any:
    given = leaves(problem(5, 6))
    loss = first(solved(function, given)).square().sum()
    (by_x,) = torch.autograd.grad(loss, given["x"], create_graph=True)
    return torch.autograd.grad(by_x.square().sum(), given["y"])


def mapped(values: Tensor) -> Any:
    return solved(MAP, problem(5, 6), values=values)


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (twice, MAP, "transport_map is differentiable once"),
        (twice, POTENTIALS, "sinkhorn_potentials is differentiable once"),
        (mapped, torch.ones(5, 2).double(), r"values must be a tensor \(6, k\), got Tensor of"),
        (mapped, torch.ones(6).double(), r"values must be a tensor \(6, k\)"),
        (mapped, torch.ones(6, 0).double(), r"values must be a tensor \(6, k\)"),
        (mapped, torch.ones(6, 2), r"values must be torch.float64 on cpu as y, got torch.float32"),
        (mapped, torch.tensor([[1.0, torch.nan]] * 6).double(), "values holds NaN"),
    ],
)
def test_what_is_refused(function: Any, given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        function(given)
