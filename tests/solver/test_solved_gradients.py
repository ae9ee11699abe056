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
    ONE,
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
from otdd_flash.solver import transport_map

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


def fixed(given: Inputs) -> Inputs:
    """Labels of the points, if they have some."""
    labels = labelled(len(given["x"]), len(given["y"])) if "class_table" in given else {}
    return {key: part for key, part in labels.items() if key != "class_table"}


def solved(function: Any, given: Inputs, **settings: Any) -> Any:
    return quiet(function, **given, **fixed(given), **settings)


def first(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def dense_cost(given: Inputs) -> Tensor:
    cost = given["lambda_x"] * (given["x"][:, None] - given["y"][None]).square().sum(2)
    if "class_table" in given:
        labels, block = fixed(given), given["class_table"][:CLASSES, CLASSES:]
        cost = cost + given["lambda_y"] * block[labels["labels_x"]][:, labels["labels_y"]]
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


@pytest.mark.slow(after=4)
@pairwise(
    way=WAYS,
    shape=[(1, 1), (1, 6), (9, 11), (11, 9)],
    labels=[False, True],
    zeros=[False, True],
    values=[None, 1, 20],
    options=[EXACT, EARLY],
)
def test_maps(
    way: str,
    shape: tuple[int, int],
    labels: bool,
    zeros: bool,
    values: int | None,
    options: Converged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of plans that were stopped early; by masses those are of r and c, not of a and b."""
    cg, given = solve_by(way, monkeypatch), problem(*shape, zeros=zeros, labels=labels)
    at = solved(POTENTIALS, given, options=options)
    if values:
        given["values"] = drawn(shape[1], values, seed=6) + 5
    still = ("a", "b") if zeros or options is EARLY else ()
    ours, theirs = leaves(given, *still), leaves(given, *still)
    mapped = solved(MAP, ours, options=options, cg=cg)
    expected = dense(theirs, at)[2] @ theirs.get("values", theirs["y"])
    torch.testing.assert_close(mapped, expected, rtol=0, atol=1e-9)
    cotangent = drawn(*mapped.shape, seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotConvergedWarning)
        found = gradients((mapped * cotangent).sum(), ours)
    assert_same(found, gradients((expected * cotangent).sum(), theirs), 1e-8)


@pytest.mark.slow(after=4)
@pairwise(
    way=WAYS,
    shape=[(1, 1), (9, 11), (11, 9)],
    labels=[False, True],
    zeros=[False, True],
    cotangents=["f", "g", "both"],
    options=[EXACT, EARLY],
)
def test_potentials(
    way: str,
    shape: tuple[int, int],
    labels: bool,
    zeros: bool,
    cotangents: str,
    options: Converged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cg, given = solve_by(way, monkeypatch), problem(*shape, zeros=zeros, labels=labels)
    still = ("a", "b") if zeros else ()
    ours, theirs = leaves(given, *still), leaves(given, *still)
    f, g = solved(POTENTIALS, ours, options=options, cg=cg)
    assert f.dtype == g.dtype == torch.float64
    assert abs(float((given["b"] @ g).detach())) <= 1e-12
    expected = dense(theirs, (f, g))
    torch.testing.assert_close((f, g), expected[:2], rtol=0, atol=1e-8)
    of_f = drawn(shape[0], seed=7) * (cotangents != "g")
    of_g = drawn(shape[1], seed=8) * (cotangents != "f")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotConvergedWarning)
        found = gradients(f @ of_f + g @ of_g, ours)
    expected = gradients(expected[0] @ of_f + expected[1] @ of_g, theirs)
    assert_same(found, expected, 1e-8, held(given, (f, g)))


@pytest.mark.parametrize(
    ("shape", "zeros", "options"), [((7, 5), False, EARLY), ((5, 7), True, EXACT)]
)
def test_plans_of_matrices_by_decomposed_systems(
    shape: tuple[int, int], zeros: bool, options: Converged
) -> None:
    """Other files ask for the rest of what iterations give."""
    sides = masses(shape[0], 3, zeros=zeros), masses(shape[1], 4, zeros=zeros)
    costs = 2 * drawn(*shape, seed=1).square().requires_grad_()
    plan = quiet(otdd.matrix_plan, costs, *sides, options=options, cg=ONE)
    cotangent = drawn(*shape, seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotConvergedWarning)
        (found,) = torch.autograd.grad(plan, costs, cotangent)
    expected = -reference.adjoint(plan.detach(), cotangent)[0] / EPSILON
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("iterations_alone")
@pytest.mark.parametrize(
    ("mass", "backend"),
    [(1e-9, "torch"), (1e-100, "torch"), pytest.param(1e-20, "triton", marks=pytest.mark.slow)],
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
    [(MAP, "iterations"), (POTENTIALS, "decomposed")]
    + [(otdd.matrix_plan, way) for way in ("iterations", "decomposed")],
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
    for key, step in (("a", 1e-4), ("b", 1e-4)):
        weights, present = given[key], int(given[key].argmax())
        for k in range(len(weights)):
            moved = torch.zeros_like(weights)
            moved[k] += step
            moved[present] -= step
            # Points on the side where masses are not negative.
            values = [loss(given | {key: weights + j * moved}) for j in range(4)]
            factors = (-11 / 6, 3, -3 / 2, 1 / 3)
            slope = sum(w * value for w, value in zip(factors, values, strict=True)) / step
            assert abs(float(slope - found[key][k] + found[key][present])) <= 1e-6 * (
                1 + float(found[key].abs().max())
            ), (key, k)


def test_numbers_for_lambdas() -> None:
    given = problem(5, 6, labels=False) | {"lambda_x": torch.tensor(0.7, dtype=torch.float64)}
    inputs = leaves(given), leaves(given) | {"lambda_x": 0.7}
    one, other = (solved(MAP, each).sum() for each in inputs)
    assert torch.equal(one, other)
    (by_x,) = torch.autograd.grad(one, inputs[0]["x"])
    assert torch.equal(by_x, torch.autograd.grad(other, inputs[1]["x"])[0])


def test_a_map_of_ones_is_one() -> None:
    given = leaves(problem(6, 7) | {"values": torch.ones(7, 2, dtype=torch.float64)})
    mapped = solved(MAP, given)
    assert torch.equal(mapped, torch.ones_like(mapped))
    found = gradients((mapped * drawn(6, 2)).sum(), given)
    # By the values it is the plan itself.
    assert float(found.pop("values").abs().max()) > 0.1
    assert all(float(part.abs().max()) <= 1e-14 for part in found.values())
    assert float(found["class_table"][:, :CLASSES].abs().max()) == 0


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("way", ["decomposed", "streamed", "iterations"])
def test_points_far_from_the_origin(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cg, near = solve_by(way, monkeypatch), problem(8, 9, labels=False)
    found = []
    for shift in (0.0, 1e6):
        given = leaves(near | {key: near[key] + shift for key in ("x", "y")})
        mapped = solved(MAP, given, values=near["y"], cg=cg)
        found.append(gradients((mapped * drawn(8, 3, seed=1)).sum(), given))
    for key in ("x", "y", "lambda_x", "a"):
        torch.testing.assert_close(found[1][key], found[0][key], rtol=0, atol=1e-7)


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
        otdd.transport_map(**given, **fixed(given), epsilon=EPSILON, options=EARLY)


@pytest.mark.parametrize(
    ("function", "name"), [(MAP, "transport_map"), (POTENTIALS, "sinkhorn_potentials")]
)
def test_second_derivatives_are_refused(function: Any, name: str) -> None:
    given = leaves(problem(5, 6))
    (by_x,) = torch.autograd.grad(
        first(solved(function, given)).square().sum(), given["x"], create_graph=True
    )
    with pytest.raises(InputError, match=f"{name} is differentiable once"):
        torch.autograd.grad(by_x.square().sum(), given["y"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(5, 2, dtype=torch.float64), r"values must be a tensor \(6, k\), got Tensor of"),
        (torch.ones(6, dtype=torch.float64), r"values must be a tensor \(6, k\)"),
        (torch.ones(6, 0, dtype=torch.float64), r"values must be a tensor \(6, k\)"),
        (torch.ones(6, 2), r"values must be torch.float64 on cpu as y, got torch.float32 on cpu"),
        (torch.tensor([[1.0, torch.nan]] * 6, dtype=torch.float64), "values holds NaN"),
    ],
)
def test_values_that_do_not_fit(values: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        solved(MAP, problem(5, 6), values=values)


def test_without_gradients_nothing_is_kept() -> None:
    given = problem(5, 6, zeros=True)
    mapped = solved(MAP, given)
    assert not mapped.requires_grad
    # The conditional plan, at any mass.
    assert bool(mapped.isfinite().all())
    with torch.no_grad():
        assert not solved(MAP, leaves(given)).requires_grad
    f, g = solved(POTENTIALS, given)
    assert not f.requires_grad
    again = solved(POTENTIALS, given, start={"xy": g}, options=Converged(1e-9, 2))
    torch.testing.assert_close(again, (f, g), rtol=0, atol=1e-9)


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


def test_a_row_that_underflows_is_refused_and_not_divided_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a point of little mass may, which a solve in float32 leaves where it was."""
    low = torch.tensor([0.0, 1e4, 0.0, 0.0, 0.0])
    monkeypatch.setattr(transport_map, "potentials_everywhere", lambda _, f, g: (f - low, g))
    with pytest.raises(InputError, match="of little or no mass"):
        otdd.transport_map(torch.randn(5, 2), torch.randn(4, 2), epsilon=0.5)
