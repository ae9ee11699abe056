"""`matrix_loss`: values, gradients by matrices and masses, and the memory that they take."""

from __future__ import annotations

import math
from collections.abc import Callable

import matrix_cases as cases
import pytest
import reference
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import otdd_flash as otdd

EPSILON = 0.5
SHARP = otdd.Converged(1e-11)


def problem(n: int, m: int) -> dict[str, Tensor]:
    draw = cases.generator(n, m)
    return {
        "costs": cases.random(n, m, draw),
        "a": cases.masses(n, draw),
        "b": cases.masses(m, draw),
        "self_costs[0]": (own := cases.random(n, n, draw)) + own.T,
        "self_costs[1]": (own := cases.random(m, m, draw)) + own.T,
    }


def loss(given: dict[str, Tensor], *, debias: bool = True, **others: object) -> Tensor:
    own = (given["self_costs[0]"], given["self_costs[1]"]) if debias else None
    kept = {key: given[key] for key in ("costs", "a", "b")}
    return otdd.matrix_loss(**kept, epsilon=EPSILON, self_costs=own, options=SHARP, **others)


def dense(given: dict[str, Tensor], *, debias: bool = True) -> float:
    a, b = given["a"], given["b"]
    value = reference.entropic_transport(given["costs"], a, b, EPSILON)[0]
    if not debias:
        return value
    own = (given["self_costs[0]"], a), (given["self_costs[1]"], b)
    return value - sum(reference.entropic_transport(c, w, w, EPSILON)[0] for c, w in own) / 2


@pytest.mark.parametrize(("size", "debias"), [((1, 1), True), ((7, 5), False), ((9, 11), True)])
def test_is_the_dense_value(size: tuple[int, int], debias: bool) -> None:
    given = problem(*size)
    found = loss(given, debias=debias)
    assert found.shape == ()
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(dense(given, debias=debias), abs=1e-9)


def symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("key", ["costs", "self_costs[0]", "self_costs[1]"])
def test_gradients_by_matrices_are_differences(key: str) -> None:
    given = problem(3, 2)
    moved = given[key].clone().requires_grad_()
    loss(given | {key: moved}).backward()

    def value(point: Tensor) -> Tensor:
        at = dense(given | {key: point if key == "costs" else symmetric(point)})
        return torch.tensor(at, dtype=torch.float64)

    expected = reference.finite_differences(value, given[key])
    torch.testing.assert_close(moved.grad, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("key", "debias"), [("a", False), ("b", True)])
def test_gradients_by_masses_are_differences_along_the_simplex(key: str, debias: bool) -> None:
    given = problem(3, 4)
    moved = given[key].clone().requires_grad_()
    loss(given | {key: moved}, debias=debias).backward()
    gradient = moved.grad
    assert float(given[key] @ gradient) == pytest.approx(0, abs=1e-12)
    for place in range(1, len(gradient)):
        step = torch.zeros_like(given[key])
        step[place], step[0] = 1e-5, -1e-5
        ends = [dense(given | {key: given[key] + sign * step}, debias=debias) for sign in (1, -1)]
        expected = (ends[0] - ends[1]) / 2e-5
        assert float(gradient[place] - gradient[0]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_all_gradients_at_once_and_a_cotangent() -> None:
    given = {key: part.clone().requires_grad_() for key, part in problem(4, 3).items()}
    (3.0 * loss(given)).backward()
    for key, part in given.items():
        alone = {name: other.detach() for name, other in given.items()}
        alone[key] = alone[key].clone().requires_grad_()
        loss(alone).backward()
        torch.testing.assert_close(part.grad, 3 * alone[key].grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gradient_is_the_plan_in_the_type_of_the_costs(dtype: torch.dtype) -> None:
    costs = cases.random(33, 70, cases.generator(1)).to(dtype).requires_grad_()
    value = otdd.matrix_loss(costs, epsilon=EPSILON)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (value * 2.0**100).backward()
    assert costs.grad is not None
    assert costs.grad.dtype == dtype
    expected = otdd.matrix_transport(costs.detach(), epsilon=EPSILON)
    potentials = expected.term.f, expected.term.g
    scaled = expected._problem.tiles.scaled_plan(*potentials, EPSILON, torch.float64)
    torch.testing.assert_close(costs.grad.double() / 2.0**100, scaled, rtol=2**-8, atol=0)


def test_small_entries_survive_a_loss_scale() -> None:
    costs = torch.tensor([[0.0, 20.0], [20.0, 0.0]], requires_grad=True)
    scale = 2.0**110
    (otdd.matrix_loss(costs, epsilon=0.2) * scale).backward()
    assert float(costs.grad[0, 1]) == pytest.approx(0.5 * math.exp(-100) * scale, rel=1e-4)


def test_float16_is_refused_for_gradients_alone() -> None:
    costs = cases.random(7, 5, cases.generator(2)).half()
    assert otdd.matrix_loss(costs, epsilon=EPSILON).dtype == torch.float32
    with pytest.raises(otdd.InputError, match=r"costs requires a gradient and is float16"):
        otdd.matrix_loss(costs.clone().requires_grad_(), epsilon=EPSILON)
    with torch.no_grad():
        otdd.matrix_loss(costs.clone().requires_grad_(), epsilon=EPSILON)


def test_forbidden_pairs_have_no_gradient() -> None:
    draw = cases.generator(4)
    costs = cases.random(9, 8, draw)
    closed = torch.rand(9, 8, generator=draw) < 0.4
    costs[closed] = math.inf
    costs.requires_grad_()
    otdd.matrix_loss(costs, epsilon=EPSILON, options=SHARP).backward()
    assert float(costs.grad[closed].abs().max()) == 0
    assert float(costs.grad.sum()) == pytest.approx(1)


def test_masses_of_zero_get_the_gradient_of_their_potential() -> None:
    given = problem(5, 4)
    a = torch.tensor([0.5, 0, 0.25, 0.25, 0]).double().requires_grad_()
    loss(given | {"a": a}, debias=False).backward()
    _, f, _ = reference.entropic_transport(given["costs"], a.detach(), given["b"], EPSILON)
    expected = f - a.detach() @ f
    torch.testing.assert_close(a.grad, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: (own, own + 1j), "must be real"),
        (lambda own: (own[:, :5], own), r"self_costs\[0\] must have shape \(7, 7\)"),
        (lambda own: (own, own + torch.triu(own)), r"self_costs\[1\] must be symmetric"),
        (lambda own: (own.log() * 0 + math.inf, own), r"self_costs\[0\] must be finite"),
        (lambda own: (own,), "self_costs must be a list of 2"),
    ],
)
def test_self_costs_that_do_not_fit(change: Callable[..., tuple], message: str) -> None:
    own = symmetric(cases.random(7, 7, cases.generator(5))) + 1
    with pytest.raises(otdd.InputError, match=message):
        otdd.matrix_loss(own, epsilon=EPSILON, self_costs=change(own))


def test_symmetric_to_rounding_is_enough_and_counted() -> None:
    draw = cases.generator(6)
    own = symmetric(cases.random(30, 30, draw)).float()
    shaken = own * (1 + 1e-6 * torch.randn(30, 30, generator=draw))
    found = otdd.matrix_loss(
        own, epsilon=EPSILON, self_costs=(shaken, own), options=otdd.Converged(1e-4)
    )
    assert float(found) == pytest.approx(0, abs=1e-5)


def test_once() -> None:
    costs = cases.random(7, 5, cases.generator(7)).requires_grad_()
    value = otdd.matrix_loss(costs, epsilon=EPSILON)
    (gradient,) = torch.autograd.grad(value, costs, create_graph=True)
    with pytest.raises(otdd.InputError, match="matrix_loss is differentiable once"):
        gradient.sum().backward()
    value = otdd.matrix_loss(costs, epsilon=EPSILON)
    with torch.no_grad():
        costs += 1
    with pytest.raises(otdd.InputError, match="changed in place"):
        value.backward()


def test_a_start_by_term() -> None:
    given = problem(33, 70)
    one = otdd.matrix_transport(
        given["costs"], given["a"], given["b"], epsilon=EPSILON, options=SHARP
    )
    assert float(loss(given, debias=False, start={"xy": one.g})) == pytest.approx(
        one.value, rel=1e-9
    )


def peak(run: Callable[[], object]) -> int:
    """The most bytes that were allocated at once on top of those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    now = most = 0
    for event in recorded.events():
        if event.name == "[memory]":
            now += event.cpu_memory_usage
            most = max(most, now)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_takes_one_matrix_and_forward_none(dtype: torch.dtype) -> None:
    n = 1500
    costs = torch.rand(n, n, generator=cases.generator(8)).to(dtype).requires_grad_()
    options, found = otdd.Converged(max_iterations=3), []
    vectors = 200 * 2 * n

    def forward() -> None:
        found.append(otdd.matrix_loss(costs, epsilon=0.5, options=options))

    # Tiles of scores, of any size of the matrix, and what a sample takes of it.
    tiles = 4 << 20
    assert peak(forward) <= tiles + vectors
    assert peak(found[0].backward) <= costs.nbytes + tiles + vectors
