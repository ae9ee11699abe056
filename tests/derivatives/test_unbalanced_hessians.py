"""Derivatives by the plan's system with relaxed marginals, against those of dense potentials."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import reference
import torch
from derivative_cases import (
    DEVICE,
    EARLY,
    WAYS,
    DenseHessian,
    clouds,
    drawn,
    labelled,
    masses,
    on_the_device,
    quiet,
    solve_by,
)
from pairwise import pairwise
from refusals import naming
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.derivatives import plan_points
from otdd_flash.derivatives.hessian import DivergenceCurvature
from otdd_flash.kernels.passes import plan_blocks
from otdd_flash.operators import triton_plans

TIGHT = otdd.Converged(1e-9)
DOUBLE = otdd.ComputeOptions("cpu", precision="double")
EPSILON = 0.2

# In units of the mean cost, which is about 1; None is exact.
PENALTIES = [(0.01, 0.01), (0.3, 0.3), (1e3, 1e3), (0.2, None), (None, 0.02), (0.1, 1e3)]


class Problem:
    """Labelled clouds of which a point of each side has no mass, with directions."""

    def __init__(self, sizes: tuple[int, int] = (6, 7)) -> None:
        draw = torch.Generator().manual_seed(1)
        n, m = sizes
        self.x, self.y = (torch.randn(k, 2, generator=draw).double() for k in sizes)
        self.y += 0.5
        self.a, self.b = (torch.rand(k, generator=draw).double() + 0.2 for k in sizes)
        self.a[-1], self.b[0] = 0, 0
        self.a, self.b = self.a / self.a.sum(), self.b / self.b.sum()
        table = torch.rand(5, 5, generator=draw).double()
        self.table = (table + table.T).fill_diagonal_(0)
        self.labels = torch.arange(n) % 2, torch.arange(m) % 3
        self.along = torch.randn(n, 2, generator=draw).double()
        self.along_y = torch.randn(m, 2, generator=draw).double()

    @property
    def settings(self) -> dict[str, object]:
        names = {"labels_x": self.labels[0], "labels_y": self.labels[1]}
        return {"epsilon": EPSILON, "class_table": self.table, "lambda_y": 0.3, **names}

    def cost(self, x: Tensor, y: Tensor, one: int, two: int) -> Tensor:
        blocks = slice(2), slice(2, 5)
        table = self.table[blocks[one], blocks[two]]
        classes = table[self.labels[one]][:, self.labels[two]]
        return reference.dense_cost(x, y, 0.5) + 0.3 * classes

    def gradients(self, x: Tensor, y: Tensor, rho: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Return the gradients by both clouds, for autograd; debiased for equal penalties."""

        def pulls(one: int, two: int, penalties: tuple[float, float]) -> tuple[Tensor, Tensor]:
            points, masses = (x, y), (self.a, self.b)
            p, q, of_p, of_q = points[one], points[two], masses[one], masses[two]
            cost = self.cost(p, q, one, two)
            f, g = reference.potentials_of(cost, of_p, of_q, EPSILON, penalties)
            plan = of_p[:, None] * ((f[:, None] + g - cost) / EPSILON).exp() * of_q
            apart = plan[..., None] * (p[:, None] - q)
            return apart.sum(1), -apart.sum(0)

        by_x, by_y = pulls(0, 1, rho)
        if rho[0] == rho[1]:
            own_x, own_y = pulls(0, 0, rho), pulls(1, 1, rho)
            by_x, by_y = by_x - sum(own_x) / 2, by_y - sum(own_y) / 2
        return by_x, by_y

    def products(self, rho: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Return the Hessian's product with both directions."""
        x, y = self.x.clone().requires_grad_(), self.y.clone().requires_grad_()
        by_x, by_y = self.gradients(x, y, rho)
        # The Hessian is symmetric.
        found = (by_x * self.along).sum() + (by_y * self.along_y).sum()
        product = torch.autograd.grad(found, (x, y))
        return product[0], product[1]


def penalties_of(rho: tuple[float | None, float | None]) -> tuple[float, float]:
    one, other = (math.inf if each is None else each for each in rho)
    return one, other


@pytest.mark.parametrize("rho", PENALTIES)
def test_double_backward_of_a_loss(rho: tuple[float | None, float | None]) -> None:
    problem = Problem()
    expected = problem.products(penalties_of(rho))
    x, y = problem.x.clone().requires_grad_(), problem.y.clone().requires_grad_()
    loss = otdd.sinkhorn_loss(
        x,
        y,
        problem.a,
        problem.b,
        unbalanced=rho,
        debias=rho[0] == rho[1],
        options=TIGHT,
        **problem.settings,
    )
    first = torch.autograd.grad(loss, (x, y), create_graph=True)
    found = torch.autograd.grad(first, (x, y), (problem.along, problem.along_y))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7 * float(other.abs().max()))


def inputs_of(problem: Problem) -> dict[str, Tensor]:
    values = {"x": problem.x, "y": problem.y, "a": problem.a, "b": problem.b}
    values |= {"table": problem.table, "lambda_x": torch.tensor(0.5).double()}
    values |= {"lambda_y": torch.tensor(0.3).double()}
    return {key: value.clone().requires_grad_() for key, value in values.items()}


def dense_cost(problem: Problem, given: dict[str, Tensor]) -> Tensor:
    classes = given["table"][:2, 2:][problem.labels[0]][:, problem.labels[1]]
    cost = reference.dense_cost(given["x"], given["y"], 1.0) * given["lambda_x"]
    return cost + given["lambda_y"] * classes


def along_simplex(gradient: Tensor, masses: Tensor) -> Tensor:
    return gradient - masses @ gradient


def assert_same_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-6
) -> None:
    for key, one in expected.items():
        other = found[key]
        if key in "ab":
            masses = expected[key].new_tensor(1.0) * found[f"masses {key}"]
            one, other = along_simplex(one, masses), along_simplex(other, masses)
        atol = rtol * float(one.abs().max())
        torch.testing.assert_close(
            other, one, rtol=rtol, atol=atol, msg=lambda m, k=key: f"{k}: {m}"
        )


def gradients(outputs: tuple[Tensor, ...], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of random sums of the outputs."""
    draw = torch.Generator().manual_seed(3)
    total = sum(
        (output * torch.randn(output.shape, generator=draw, dtype=torch.float64)).sum()
        for output in outputs
    )
    parts = torch.autograd.grad(total, list(given.values()), allow_unused=True)
    found = dict(zip(given, parts, strict=True))
    return {key: part for key, part in found.items() if part is not None}


def with_masses(found: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    return found | {f"masses {key}": given[key].detach() for key in "ab"}


def call(function: object, problem: Problem, given: dict[str, Tensor], **more: object) -> object:
    return function(  # type: ignore[operator]
        *(given[key] for key in "xyab"),
        epsilon=EPSILON,
        labels_x=problem.labels[0],
        labels_y=problem.labels[1],
        class_table=given["table"],
        lambda_x=given["lambda_x"],
        lambda_y=given["lambda_y"],
        options=TIGHT,
        cg=otdd.CGOptions(1e-11),
        **more,
    )


@pytest.mark.parametrize("rho", PENALTIES)
def test_potentials(rho: tuple[float | None, float | None]) -> None:
    problem = Problem()
    given = inputs_of(problem)
    found = call(otdd.sinkhorn_potentials, problem, given, unbalanced=rho)
    held = inputs_of(problem)
    cost = dense_cost(problem, held)
    expected = reference.potentials_of(cost, held["a"], held["b"], EPSILON, penalties_of(rho))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-6, atol=1e-6)
    expected = gradients(expected, held)
    assert_same_gradients(with_masses(gradients(found, given), given), expected)


@pytest.mark.parametrize("rho", PENALTIES)
def test_maps(rho: tuple[float | None, float | None]) -> None:
    problem = Problem()
    given = inputs_of(problem)
    found = call(otdd.transport_map, problem, given, unbalanced=rho)
    held = inputs_of(problem)
    cost = dense_cost(problem, held)
    f, g = reference.potentials_of(cost, held["a"], held["b"], EPSILON, penalties_of(rho))
    density = ((f[:, None] + g - cost) / EPSILON).exp() * held["b"]
    expected = density @ held["y"] / density.sum(1, keepdim=True)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=1e-7)
    assert_same_gradients(
        with_masses(gradients((found,), given), given), gradients((expected,), held)
    )


@pytest.mark.parametrize("rho", PENALTIES)
def test_plans_of_matrices(rho: tuple[float | None, float | None]) -> None:
    problem = Problem()
    cost = problem.cost(problem.x, problem.y, 0, 1)
    values = {"costs": cost, "a": problem.a, "b": problem.b}
    given, held = (
        {key: value.clone().requires_grad_() for key, value in values.items()} for _ in range(2)
    )
    settings = {"options": TIGHT, "cg": otdd.CGOptions(1e-11), "unbalanced": rho}
    found = otdd.matrix_plan(*given.values(), epsilon=EPSILON, **settings)
    f, g = reference.potentials_of(*held.values(), EPSILON, penalties_of(rho))
    exponents = (f[:, None] + g - held["costs"]) / EPSILON
    expected = held["a"][:, None] * exponents.exp() * held["b"]
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=1e-9)
    assert_same_gradients(
        with_masses(gradients((found,), given), given), gradients((expected,), held)
    )


@pytest.mark.slow(after=4)
@pairwise(
    way=WAYS,
    shape=[(1, 1), (20, 20), (33, 21), (21, 33)],
    rho=[(0.3, 0.3), (50.0, 50.0), (0.2, None), (None, 2.0), (0.3, 20.0)],
    options=[otdd.Converged(1e-4), EARLY],
    labels=[True, False],
    zeros=[True, False],
    count=[1, 7],
    moments=[plan_points.MOST_MOMENTS, 0],
)
def test_products_are_those_of_the_dense_inverse(
    way: str,
    shape: tuple[int, int],
    rho: tuple[float | None, float | None],
    options: otdd.Converged,
    labels: bool,
    zeros: bool,
    count: int,
    moments: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of x alone and of both clouds, also of plans that were stopped early."""
    cg = solve_by(way, monkeypatch)
    monkeypatch.setattr(plan_points, "MOST_MOMENTS", moments)
    (n, m), (x, y) = shape, clouds(*shape)
    a, b = masses(n, 0, zeros=zeros), masses(m, 1, zeros=zeros)
    cost = {"unbalanced": rho, **(labelled(n, m) if labels else {})}
    given = {"debias": rho[0] == rho[1], "options": options, "cg": cg}
    found = quiet(otdd.sinkhorn_hessian, x, y, a, b, **given, **cost)
    exact = DenseHessian(found.divergence.terms, x, y, a, b, **cost)
    v, w = drawn(count, n, 3, seed=4), drawn(count, m, 3, seed=5)
    got = found.product(v)
    joint = DivergenceCurvature(found._comparison, found.divergence, cg).along(v, w)
    assert bool(got.converged.all())
    assert way != "decomposed" or int(got.iterations.max() + joint.iterations.max()) == 0
    assert joint.y is not None
    for k in range(count):
        by_x, _, energy = exact.along(v[k])
        size = 1e-3 + float(by_x.abs().max())
        torch.testing.assert_close(got.values[k], by_x, rtol=0, atol=1e-9 * size)
        close = 1e-9 * float(v[k].norm()) * size
        torch.testing.assert_close(got.curvature[k], energy, rtol=0, atol=close)
        by_x, by_y, energy = exact.along(v[k], w[k])
        size = 1e-3 + float(by_x.abs().max()) + float(by_y.abs().max())
        torch.testing.assert_close(joint.x[k], by_x, rtol=0, atol=1e-9 * size)
        torch.testing.assert_close(joint.y[k], by_y, rtol=0, atol=1e-9 * size)
        close = 1e-8 * float(v[k].norm()) * size
        torch.testing.assert_close(joint.curvature[k], energy, rtol=0, atol=close)


@pytest.mark.slow
@pytest.mark.usefixtures("iterations_alone")
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("rho", [(0.5, 0.5), (0.3, None), (1e3, 1e3), (None, 0.05)])
def test_kernels(
    rho: tuple[float | None, float | None], held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations with a plan in float16 that is held, or evaluated anew."""
    monkeypatch.setattr(triton_plans, "KEPT_BYTES", 0)
    monkeypatch.setattr(triton_plans, "FEW_COORDINATES", 0)
    if not held:
        monkeypatch.setattr(triton_plans, "holds", lambda *_: False)
    x, y, v, w = (part.float() for part in (*clouds(40, 33), drawn(40, 3), drawn(33, 3)))
    cost = labelled(40, 33) | {"unbalanced": rho}
    compute = otdd.ComputeOptions(DEVICE, backend="triton")
    given = {"epsilon": 1.0, "compute": compute, "debias": rho[0] == rho[1]}
    found = otdd.sinkhorn_hessian(*on_the_device((x, y)), **given, **on_the_device(cost))
    along = DivergenceCurvature(found._comparison, found.divergence, otdd.CGOptions()).along
    got = along(*on_the_device((v[None], w[None])))
    assert bool(got.converged.all())
    assert got.y is not None
    exact = DenseHessian(found.divergence.terms, *on_the_device((x, y)), **on_the_device(cost))
    by_x, by_y, energy = exact.along(*on_the_device((v, w)))
    for one, other in ((got.x[0], by_x), (got.y[0], by_y)):
        assert float((one - other).norm() / other.norm()) <= 5e-5
    assert abs(float(got.curvature[0] - energy)) <= 1e-4 * abs(float(energy))


@pytest.mark.slow
@pytest.mark.usefixtures("iterations_alone")
@pytest.mark.parametrize("rho", [(30.0, 30.0), (20.0, None)])
def test_points_of_many_coordinates(
    rho: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are multiplied as they are packed, block by block."""
    monkeypatch.setattr(triton_plans, "KEPT_BYTES", 0)
    monkeypatch.setattr(triton_plans, "holds", lambda *_: False)
    monkeypatch.setattr(plan_points, "LOOKED_AT", 1 << 14)
    monkeypatch.setattr(plan_blocks, "BLOCK_HEIGHT", 128)
    monkeypatch.setattr(plan_blocks, "BLOCK_WIDTH", 256)
    x, y, v, w = (
        (drawn(n, 136, seed=seed) + 10 + seed / 5).float().to(DEVICE)
        for seed, n in enumerate((140, 100, 140, 100))
    )
    a = masses(140, 0, zeros=True).to(DEVICE)
    cost = {"epsilon": 272.0, "unbalanced": rho}
    compute = otdd.ComputeOptions(DEVICE, backend="triton")
    given = {"debias": rho[0] == rho[1], "cg": otdd.CGOptions(1e-6), "compute": compute}
    found = otdd.sinkhorn_hessian(x, y, a, **cost, **given)
    assert isinstance(found._curvature._cross._at, plan_points.PackedPlanPoints)
    exact = DenseHessian(found.divergence.terms, x, y, a, **cost)
    for both in (True, False):
        got = found._curvature.along(v[None], w[None] if both else None)
        by_x, by_y, energy = exact.along(v, w if both else None)
        assert float((got.x[0] - by_x).norm()) <= 1e-5 * float(by_x.norm())
        if got.y is not None:
            assert float((got.y[0] - by_y).norm()) <= 1e-5 * float(by_y.norm())
        size = float(v.norm() * by_x.norm() + (w.norm() * by_y.norm() if both else 0))
        assert abs(float(got.curvature[0] - energy)) <= 1e-6 * size


@pytest.mark.parametrize("weighted", [False, True])
def test_a_row_that_moves_nothing_has_an_image_and_no_derivative(weighted: bool) -> None:
    """Its conditional plan is that of its softmin, also where e^(-f / rho) is 0."""
    x = torch.tensor([[0.0], [0.2], [60.0]]).double()
    y = torch.tensor([[0.0], [0.3], [2.0]]).double()
    a = torch.tensor([0.3, 0.3, 0.4]).double() if weighted else None
    given = {"epsilon": 0.5, "unbalanced": 0.5, "options": TIGHT}
    x.requires_grad_()
    found = otdd.transport_map(x, y, a, **given)
    f, g = otdd.sinkhorn_potentials(x, y, a, **given)
    expected = ((g - reference.dense_cost(x, y, 0.5)) / 0.5).softmax(1) @ y
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    source = otdd.LabeledSamples(x.detach(), None, (), a)
    of_data = {"labels": "none", "debias": False, "compute": DOUBLE, "solver": TIGHT}
    result = otdd.dataset_distance(source, y, epsilon=0.5, unbalanced=0.5, **of_data)
    torch.testing.assert_close(result.barycentric_map(), expected.detach(), rtol=1e-6, atol=1e-8)
    for output in (found, f):
        with pytest.raises(otdd.InputError, match="less of its mass than float64 holds"):
            output.sum().backward()
    # Nothing of it is missing in the plan, nor in its derivative.
    cost = reference.dense_cost(x.detach(), y, 0.5).requires_grad_()
    plan = otdd.matrix_plan(cost, a, **given)
    (by_cost,) = torch.autograd.grad((plan * plan).sum(), cost)
    assert float(by_cost[2].abs().max()) < 1e-290
    assert float(by_cost[:2].abs().min()) > 0


X, Y = clouds(6, 5)
ONE_SIDED: dict[str, object] = {"unbalanced": [1.0, None]}
REFUSED: list[tuple[Callable[..., object], dict[str, object], str]] = [
    *(
        (function, {"unbalanced": 1.0, "options": otdd.GeomlossSchedule()}, "leave out unbalanced")
        for function in (otdd.sinkhorn_hessian, otdd.sinkhorn_potentials, otdd.transport_map)
    ),
    (otdd.sinkhorn_hessian, ONE_SIDED, "debias=false"),
    (otdd.sinkhorn_hessian, {"unbalanced": 1.0, "unbalanced_relative": 1.0}, "got both"),
    (otdd.transport_map, {"unbalanced": 1e-40}, "potentials as small as this vanish"),
]


@pytest.mark.parametrize(("function", "settings", "message"), REFUSED)
def test_what_is_refused(
    function: Callable[..., object], settings: dict[str, object], message: str
) -> None:
    with naming(message), pytest.raises(otdd.InputError, match=message):
        function(X, Y, epsilon=1.0, **settings)


def test_third_derivatives_and_those_by_masses_are_refused_as_of_exact_marginals() -> None:
    x = X.clone().requires_grad_()
    a = torch.full((6,), 1 / 6).double().requires_grad_()
    loss = otdd.sinkhorn_loss(x, Y, a, epsilon=1.0, unbalanced=1.0)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(otdd.InputError, match=r"detach a$"):
        gradient.sum().backward()
    loss = otdd.sinkhorn_loss(x, Y, epsilon=1.0, unbalanced=1.0)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
    with pytest.raises(otdd.InputError, match="differentiable twice"):
        second.sum().backward()


def test_a_relative_penalty_is_in_mean_costs() -> None:
    mean = float(reference.dense_cost(X, Y, 0.5).mean())
    for function in (otdd.sinkhorn_potentials, otdd.transport_map):
        one, other = (
            function(X, Y, epsilon=1.0, options=TIGHT, **each)
            for each in ({"unbalanced": [0.4 * mean, None]}, {"unbalanced_relative": [0.4, None]})
        )
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    v = drawn(6, 3)
    one, other = (
        otdd.sinkhorn_hessian(X, Y, epsilon=1.0, options=TIGHT, **each).product(v).values
        for each in ({"unbalanced": 0.4 * mean}, {"unbalanced_relative": 0.4})
    )
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    cost = reference.dense_cost(X, Y, 0.5)
    one, other = (
        otdd.matrix_plan(cost, epsilon=1.0, options=TIGHT, **each)
        for each in ({"unbalanced": 0.4 * mean}, {"unbalanced_relative": 0.4})
    )
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-10)
