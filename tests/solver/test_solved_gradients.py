"""Gradients of transport maps and potentials, against unrolled autograd and differences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from pairwise import pairwise
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import CGOptions, ComputeOptions, Converged, InputError, NotConvergedWarning
from otdd_flash.errors import ConvergenceError
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.solver import direct, transport_map
from otdd_flash.solver.adjoint import Entries
from otdd_flash.solver.tensor_problem import problem_of_tensors
from otdd_flash.solver.transport_map import MapGradient

pytestmark = pytest.mark.usefixtures("iterations_alone")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON = 1.0
EXACT, TIGHT = Converged(tolerance=1e-12), CGOptions(tolerance=1e-12)
EARLY = Converged(tolerance=1e-12, max_iterations=2)
CLASSES = 3

Inputs = dict[str, Any]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def masses(n: int, seed: int, *, zeros: bool) -> Tensor:
    found = drawn(n, seed=seed).sigmoid() + 0.1
    if zeros and n > 1:
        found[:: max(2, n // 3)] = 0
    return found / found.sum()


def problem(n: int, m: int, *, zeros: bool = False, labels: bool = True, d: int = 3) -> Inputs:
    """Inputs that a gradient is asked for by."""
    given = {"x": drawn(n, d, seed=1), "y": drawn(m, d, seed=2) + 0.4}
    given |= {"a": masses(n, 3, zeros=zeros), "b": masses(m, 4, zeros=zeros)}
    given["lambda_x"] = torch.tensor(0.5, dtype=torch.float64)
    if labels:
        means = drawn(2 * CLASSES, 2, seed=5)
        given["class_table"] = torch.cdist(means, means).square()
        given["lambda_y"] = torch.tensor(0.4, dtype=torch.float64)
    return given


def fixed(given: Inputs) -> Inputs:
    """What else a call takes."""
    settings: Inputs = {"epsilon": EPSILON, "options": EXACT, "cg": TIGHT}
    if "class_table" in given:
        for key, points in (("labels_x", "x"), ("labels_y", "y")):
            settings[key] = torch.arange(len(given[points])) % CLASSES
        settings["class_totals"] = (CLASSES, CLASSES)
    return settings


def quiet(call: Callable[..., Any], given: Inputs, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        return call(**given, **fixed(given) | settings)


def dense_cost(given: Inputs) -> Tensor:
    cost = given["lambda_x"] * (given["x"][:, None] - given["y"][None]).square().sum(2)
    if "class_table" in given:
        labels, block = fixed(given), given["class_table"][:CLASSES, CLASSES:]
        cost = cost + given["lambda_y"] * block[labels["labels_x"]][:, labels["labels_y"]]
    return cost


def dense(given: Inputs, potentials: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Potentials and conditional plans (n, m), for autograd."""
    cost, weights = dense_cost(given), (given["a"], given["b"])
    f, g = reference.held_potentials(cost, weights, potentials, EPSILON)
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


MAP_CASES = pairwise(
    shape=[(1, 1), (5, 5), (9, 11), pytest.param((33, 70), marks=pytest.mark.slow)],
    labels=[False, True],
    zeros=[False, True],
    images=[0, 1, 3, 20],
    options=[EXACT, EARLY],
    kept=[True, False],
)


@pytest.mark.slow(after=5)
@MAP_CASES
def test_maps(
    shape: tuple[int, int],
    labels: bool,
    zeros: bool,
    images: int,
    options: Converged,
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of plans that were stopped early; by masses those are of r and c, not of a and b."""
    if not kept:
        monkeypatch.setattr(StoredOperator, "_prepared_plan", lambda *_: None)
    given = problem(*shape, zeros=zeros, labels=labels)
    if images:
        given["values"] = drawn(shape[1], images, seed=6) + 5
    still = ("a", "b") if zeros or options is EARLY else ()
    ours, theirs = leaves(given, *still), leaves(given, *still)
    mapped = quiet(otdd.transport_map, ours, options=options)
    plain = {key: part for key, part in given.items() if key != "values"}
    at = quiet(otdd.sinkhorn_potentials, plain, options=options)
    expected = dense(theirs, at)[2] @ theirs.get("values", theirs["y"])
    torch.testing.assert_close(mapped, expected, rtol=0, atol=1e-9)
    cotangent = drawn(*mapped.shape, seed=7)
    found = gradients((mapped * cotangent).sum(), ours)
    assert_same(found, gradients((expected * cotangent).sum(), theirs), 1e-8)


POTENTIAL_CASES = pairwise(
    shape=[(1, 1), (5, 5), (9, 11), pytest.param((33, 70), marks=pytest.mark.slow)],
    labels=[False, True],
    zeros=[False, True],
    cotangents=["f", "g", "both"],
    options=[EXACT, EARLY],
)


@pytest.mark.slow(after=5)
@POTENTIAL_CASES
def test_potentials(
    shape: tuple[int, int], labels: bool, zeros: bool, cotangents: str, options: Converged
) -> None:
    given = problem(*shape, zeros=zeros, labels=labels)
    still = ("a", "b") if zeros else ()
    ours, theirs = leaves(given, *still), leaves(given, *still)
    f, g = quiet(otdd.sinkhorn_potentials, ours, options=options)
    assert f.dtype == g.dtype == torch.float64
    assert abs(float((given["b"] @ g).detach())) <= 1e-12
    expected = dense(theirs, (f, g))
    torch.testing.assert_close((f, g), expected[:2], rtol=0, atol=1e-8)
    of_f, of_g = drawn(shape[0], seed=7), drawn(shape[1], seed=8)
    of_f, of_g = of_f * (cotangents != "g"), of_g * (cotangents != "f")
    found = gradients(f @ of_f + g @ of_g, ours)
    expected = gradients(expected[0] @ of_f + expected[1] @ of_g, theirs)
    assert_same(found, expected, 1e-8, held(given, (f, g)))


@pytest.mark.parametrize("mass", [1e-9, 1e-20, 1e-100])
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
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
        f, g = quiet(otdd.sinkhorn_potentials, ours, **settings)
        loss = f.sin() @ drawn(30, seed=7).to(f) + g @ drawn(40, seed=8).to(f)
        found.append(gradients(loss, ours))
    for key, expected in found[0].items():
        error = (found[1][key] - expected).abs().max() / expected.abs().max()
        assert float(error) <= 1e-3, (key, error)


@pytest.mark.parametrize("function", ["transport_map", "sinkhorn_potentials", "matrix_plan"])
@pytest.mark.parametrize("decomposed", [False, True])
def test_masses_that_nothing_can_be_divided_by_are_0(
    function: str, decomposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One over a subnormal mass is infinite, and gradients were NaN or wrong."""
    if decomposed:
        monkeypatch.setattr(direct, "MOST_POINTS", 3000)
    x, y = drawn(9, 3, seed=1), drawn(11, 3, seed=2)
    found = []
    for least in (0.0, 1e-310):
        a, b = (masses(size, size, zeros=True) for size in (9, 11))
        sides = [torch.where(side > 0, side, least) for side in (a, b)]
        given = (torch.cdist(x, y).square(),) if function == "matrix_plan" else (x, y)
        moving = given[0].clone().requires_grad_()
        result = getattr(otdd, function)(moving, *given[1:], *sides, epsilon=EPSILON)
        result = result if isinstance(result, Tensor) else result[0]
        found.append(torch.autograd.grad(result, moving, drawn(*result.shape))[0])
    assert bool(found[0].isfinite().all())
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["map", "potentials"])
@pytest.mark.parametrize("zeros", [False, True])
def test_masses_by_differences(function: str, zeros: bool) -> None:
    """Of mass that arrives where there is none as well."""
    given = problem(7, 9, zeros=zeros)

    def loss(inputs: Inputs) -> Tensor:
        if function == "map":
            return (quiet(otdd.transport_map, inputs) * drawn(7, 3, seed=7)).sum()
        f, g = quiet(otdd.sinkhorn_potentials, inputs)
        return f @ drawn(7, seed=7) + g @ drawn(9, seed=8)

    inputs = leaves(given, *(key for key in given if key not in ("a", "b")))
    found = gradients(loss(inputs), inputs)
    for key, step in (("a", 1e-4), ("b", 1e-4)):
        weights, present = given[key], int(given[key].argmax())
        for k in range(len(weights)):
            moved = torch.zeros_like(weights)
            moved[k] += step
            moved[present] -= step
            # Four points on the side where masses are not negative.
            values = [loss(given | {key: weights + j * moved}) for j in range(5)]
            factors = (-25 / 12, 4, -3, 4 / 3, -1 / 4)
            slope = sum(w * value for w, value in zip(factors, values, strict=True)) / step
            assert abs(float(slope - found[key][k] + found[key][present])) <= 1e-6 * (
                1 + float(found[key].abs().max())
            )


@pytest.mark.parametrize("lambda_x", [0.5, 1.0])
def test_numbers_for_lambdas(lambda_x: float) -> None:
    given = problem(5, 6, labels=False) | {"lambda_x": torch.tensor(lambda_x).double()}
    with_tensor, with_number = leaves(given), leaves(given)
    with_number["lambda_x"] = lambda_x
    one = quiet(otdd.transport_map, with_tensor).sum()
    other = quiet(otdd.transport_map, with_number).sum()
    assert torch.equal(one, other)
    found = torch.autograd.grad(one, with_tensor["x"])[0]
    assert torch.equal(found, torch.autograd.grad(other, with_number["x"])[0])


@pytest.mark.slow
def test_a_map_learns_alike() -> None:
    """Points that are sent where others are, by unrolled autograd and by the system."""
    given, losses = problem(12, 10, labels=False), []
    target = drawn(12, 3, seed=9) / 3
    for implicit in (True, False):
        x = given["x"].clone().requires_grad_()
        for _ in range(10):
            inputs = given | {"x": x}
            if implicit:
                mapped = quiet(otdd.transport_map, inputs)
            else:
                still = {key: part.detach() for key, part in inputs.items()}
                at = quiet(otdd.sinkhorn_potentials, still)
                mapped = dense(inputs, at)[2] @ given["y"]
            loss = (mapped - target).square().mean()
            (by_x,) = torch.autograd.grad(loss, x)
            x = (x - 10 * by_x).detach().requires_grad_()
        losses.append(float(loss.detach()))
    assert abs(losses[0] - losses[1]) <= 1e-7 * losses[1]


def test_a_map_of_ones_is_one() -> None:
    given = leaves(problem(6, 7) | {"values": torch.ones(7, 2, dtype=torch.float64)})
    mapped = quiet(otdd.transport_map, given)
    assert torch.equal(mapped, torch.ones_like(mapped))
    found = gradients((mapped * drawn(6, 2)).sum(), given)
    # By the values it is the plan itself.
    assert float(found.pop("values").abs().max()) > 0.1
    assert all(float(part.abs().max()) <= 1e-14 for part in found.values())


def test_cost_gradients_sum_to_nothing() -> None:
    """A shift of all points, or of all distances between classes, changes no map."""
    given = leaves(problem(8, 9) | {"values": drawn(9, 2)})
    found = gradients((quiet(otdd.transport_map, given) * drawn(8, 2, seed=1)).sum(), given)
    assert float((found["x"].sum(0) + found["y"].sum(0)).abs().max()) <= 1e-12
    assert abs(float(found["class_table"].sum())) <= 1e-12
    assert float(found["class_table"][:, :CLASSES].abs().max()) == 0


@pytest.mark.parametrize("shift", [1e3, 1e6])
def test_points_far_from_the_origin(shift: float) -> None:
    near = problem(8, 9, labels=False)
    far = near | {key: near[key] + shift for key in ("x", "y")}
    found = []
    for given in (leaves(near), leaves(far)):
        mapped = quiet(otdd.transport_map, given)
        found.append(gradients((mapped * drawn(8, 3, seed=1)).sum(), given))
    for key in ("x", "y", "lambda_x", "a"):
        torch.testing.assert_close(found[1][key], found[0][key], rtol=0, atol=1e-9 * shift)


@pytest.mark.parametrize("precision", ["high", "fast"])
def test_float32(precision: str) -> None:
    given = problem(40, 30)
    exact, single = leaves(given), leaves({key: part.float() for key, part in given.items()})
    compute = ComputeOptions(DEVICE, precision=precision)
    settings = {"options": Converged(tolerance=1e-5), "cg": CGOptions(), "compute": compute}
    mapped = quiet(otdd.transport_map, single, **settings)
    assert mapped.dtype == torch.float32
    cotangent = drawn(40, 3, seed=7)
    expected = gradients((quiet(otdd.transport_map, exact) * cotangent).sum(), exact)
    found = gradients((mapped * cotangent.float()).sum(), single)
    assert all(part.dtype == torch.float32 for part in found.values())
    assert_same({key: part.double() for key, part in found.items()}, expected, 2e-3)


@pytest.mark.slow
def test_kernels_apply_the_same_factors() -> None:
    given = {key: part.float() for key, part in problem(70, 33).items()}
    found = []
    for backend in ("torch", "triton"):
        inputs = leaves(given)
        compute = ComputeOptions(DEVICE, backend=backend, precision="high")
        settings = {"options": Converged(tolerance=1e-4), "cg": CGOptions(), "compute": compute}
        mapped = quiet(otdd.transport_map, inputs, **settings)
        found.append(gradients((mapped * drawn(70, 3, seed=7).float()).sum(), inputs))
    assert_same(found[1], found[0], 2e-3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("function", ["map", "potentials"])
def test_cotangents_that_are_not_finite(function: str, value: float) -> None:
    given = leaves(problem(5, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if function == "map":
            result, cotangent = otdd.transport_map(**given, **fixed(given)), drawn(5, 3)
        else:
            result, cotangent = otdd.sinkhorn_potentials(**given, **fixed(given))[0], drawn(5)
        cotangent[2] = value
        found = torch.autograd.grad(result, [given["x"], given["a"]], cotangent)
    assert all(bool(part.isnan().all()) for part in found)


def test_a_missed_tolerance_is_told() -> None:
    given = leaves(problem(9, 11))
    mapped = quiet(otdd.transport_map, given, cg=CGOptions(1e-12, max_iterations=2))
    with pytest.warns(NotConvergedWarning, match=r"residual of .*system of the gradient.*cg\."):
        mapped.sum().backward()
    strict = Converged(tolerance=1e-9, require_convergence=True)
    f, _ = quiet(
        otdd.sinkhorn_potentials, given, cg=CGOptions(1e-12, max_iterations=2), options=strict
    )
    with pytest.raises(ConvergenceError, match="precision=double"):
        f.square().sum().backward()


def test_a_stop_before_the_tolerance_is_told() -> None:
    given = problem(9, 11)
    with pytest.warns(NotConvergedWarning):
        otdd.transport_map(**given, **fixed(given) | {"options": EARLY})


def test_second_derivatives_are_refused() -> None:
    given = leaves(problem(5, 6))
    mapped = quiet(otdd.transport_map, given)
    (by_x,) = torch.autograd.grad(mapped.square().sum(), given["x"], create_graph=True)
    with pytest.raises(InputError, match="transport_map is differentiable once"):
        by_x.square().sum().backward()
    f, _ = quiet(otdd.sinkhorn_potentials, given)
    (by_y,) = torch.autograd.grad(f.square().sum(), given["y"], create_graph=True)
    with pytest.raises(InputError, match="sinkhorn_potentials is differentiable once"):
        torch.autograd.grad(by_y.sum(), given["x"])


@pytest.mark.parametrize("key", ["x", "values", "class_table"])
def test_inputs_that_change_in_place(key: str) -> None:
    given = leaves(problem(5, 6) | {"values": drawn(6, 2)})
    mapped = quiet(otdd.transport_map, given)
    with torch.no_grad():
        given[key] += 1
    with pytest.raises(InputError, match="changed in place"):
        mapped.sum().backward()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(5, 2, dtype=torch.float64), r"values must be a tensor \(6, k\), got Tensor of"),
        (torch.ones(6, dtype=torch.float64), r"values must be a tensor \(6, k\)"),
        (torch.ones(6, 0, dtype=torch.float64), r"values must be a tensor \(6, k\)"),
        (torch.ones(6, 2), r"values must be torch.float64 on cpu as y, got torch.float32 on cpu"),
        (torch.full((6, 2), torch.nan, dtype=torch.float64), "values holds NaN"),
    ],
)
def test_values_that_do_not_fit(values: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quiet(otdd.transport_map, problem(5, 6), values=values)


def test_without_gradients_nothing_is_kept() -> None:
    given = problem(5, 6)
    assert not quiet(otdd.transport_map, given).requires_grad
    with torch.no_grad():
        assert not quiet(otdd.transport_map, leaves(given)).requires_grad
    f, g = quiet(otdd.sinkhorn_potentials, given)
    assert not f.requires_grad
    # The conditional plan, at any mass.
    mapped = quiet(otdd.transport_map, problem(5, 6, zeros=True))
    assert bool(mapped.isfinite().all())
    assert abs(float(given["b"] @ g)) <= 1e-12


def test_a_start_saves_iterations() -> None:
    given = problem(9, 11)
    f, g = quiet(otdd.sinkhorn_potentials, given)
    again = quiet(otdd.sinkhorn_potentials, given, start={"xy": g}, options=Converged(1e-9, 2))
    torch.testing.assert_close(again, (f, g), rtol=0, atol=1e-9)


@pytest.mark.parametrize("zeros", [False, True])
def test_any_potentials(zeros: bool) -> None:
    """Not only those that a solver ends with, whose rows are right: of the plan's own sums."""
    given = problem(7, 9, zeros=zeros) | {"values": drawn(9, 2, seed=6)}
    labels = fixed(given)
    sides = [(given[x], given[a], labels[f"labels_{x}"]) for x, a in (("x", "a"), ("y", "b"))]
    table = given["class_table"], labels["class_totals"]
    weights = otdd.GroundCost(float(given["lambda_x"]), float(given["lambda_y"]))
    solved = problem_of_tensors(*sides, EPSILON, *table, weights, None, debias=False)
    f, g, a, b = drawn(7, seed=8), drawn(9, seed=9), given["a"], given["b"]
    entries = ((f[:, None] + g - dense_cost(given)) / EPSILON).exp()
    q, p = entries @ b, entries.T @ a
    ours = Entries.of(solved, f, g)
    torch.testing.assert_close((ours.q, ours.p), (q, p), rtol=1e-12, atol=0)
    plan = a[:, None] * entries * b
    # The map, at rows and columns that have mass.
    gradient, cotangent = MapGradient(solved, (f, g), given["values"], EXACT, TIGHT), drawn(7, 2)
    gradient.needs = frozenset({"x", "y", "a", "b", "values"})
    means = (entries * b) @ given["values"] / q[:, None]
    torch.testing.assert_close(gradient.mapped(), means, rtol=0, atol=1e-12)
    found = gradient([cotangent])
    parts = ((given["values"][None] - means[:, None]) * cotangent[:, None]).sum(2)
    by_plan = entries * b * parts / q[:, None]
    held = torch.where(plan > 0, by_plan / torch.where(plan > 0, plan, 1), 0)
    # Rows without mass have a share in what columns get, and none in the system's matrix.
    missing = torch.where(a[:, None] > 0, 0, by_plan).sum(0)
    weighted, u, v = reference.adjoint(plan, held, (torch.zeros_like(a), missing))
    by_cost = -(weighted + torch.where(a[:, None] > 0, 0, by_plan)) / EPSILON
    difference = given["x"][:, None] - given["y"]
    by_x = 2 * given["lambda_x"] * (by_cost[:, :, None] * difference)
    torch.testing.assert_close(found["x"], by_x.sum(1), rtol=0, atol=1e-9)
    torch.testing.assert_close(found["y"], -by_x.sum(0), rtol=0, atol=1e-9)
    by_values = (entries * b / q[:, None]).T @ cotangent
    torch.testing.assert_close(found["values"], by_values, rtol=0, atol=1e-12)
    for masses_, one, other in ((a, found["a"], u), (b, found["b"], v)):
        off = (one - other)[masses_ > 0]
        assert float((off - off.mean()).abs().max()) <= 1e-9


@pytest.mark.parametrize("function", [otdd.transport_map, otdd.sinkhorn_potentials])
def test_points_without_mass_that_rounding_decides_about_are_refused(function: Any) -> None:
    """A map would be 0 / 0 there, and every gradient NaN."""
    x, y = torch.linspace(0, 3e5, 30)[:, None], torch.tensor([[0.0], [0.3], [1.0]])
    a, b = (torch.arange(30) == 0).double(), torch.tensor([0.5, 0.3, 0.2]).double()

    def gradient(precision: str) -> Tensor:
        leaf = x.clone().requires_grad_()
        compute = otdd.ComputeOptions("cpu", precision=precision)
        found = function(leaf, y, a, b, epsilon=1e-3, compute=compute)
        (found,) = torch.autograd.grad(
            (found if isinstance(found, Tensor) else found[0]).sum(), leaf
        )
        return found

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
