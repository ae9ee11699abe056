"""Derivatives by the plan's system with relaxed marginals, against those of dense potentials."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import reference
import torch
from derivative_cases import (
    clouds,
    drawn,
)
from refusals import naming
from torch import Tensor

import otdd_flash as otdd

TIGHT = otdd.Converged(1e-9)
DOUBLE = otdd.ComputeOptions("cpu", precision="double")
EPSILON = 0.2

# In units of the mean cost, which is about 1; None is exact.
PENALTIES = [(0.01, 0.01), (0.3, 0.3), (1e3, 1e3), (0.2, None), (None, 0.02), (0.1, 1e3)]


class Problem:
    """Labelled clouds, a point of each side without mass unless they all have, and directions."""

    def __init__(self, *, massless: bool = True) -> None:
        draw, (n, m) = torch.Generator().manual_seed(1), (6, 7)
        self.x, self.y = (torch.randn(k, 2, generator=draw).double() for k in (n, m))
        self.y += 0.5
        self.a, self.b = (torch.rand(k, generator=draw).double() + 0.2 for k in (n, m))
        if massless:
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


def assert_same_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], given: dict[str, Tensor]
) -> None:
    """Equal, those by the masses that are given along the simplex."""
    for key, one in expected.items():
        other = found[key]
        if key in "ab":
            masses = given[key].detach()
            one, other = one - masses @ one, other - masses @ other
        with naming(key):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6 * float(one.abs().max()))


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
    assert_same_gradients(gradients(found, given), gradients(expected, held), given)


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
    assert_same_gradients(gradients((found,), given), gradients((expected,), held), given)


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
    assert_same_gradients(gradients((found,), given), gradients((expected,), held), given)


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
