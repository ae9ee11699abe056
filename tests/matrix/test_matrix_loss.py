"""`matrix_loss`: values, gradients by matrices and masses, and the memory that they take."""

from __future__ import annotations

import math
from collections.abc import Callable

import matrix_cases as cases
import pytest
import reference
import torch
from live_bytes import peak
from torch import Tensor

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
    scaled = expected._comparison.torch_operator("xy").plan_entries(
        *potentials, EPSILON, torch.float64
    )
    torch.testing.assert_close(costs.grad.double() / 2.0**100, scaled, rtol=2**-8, atol=0)


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


def test_costs_that_changed_in_place_are_refused() -> None:
    costs = cases.random(7, 5, cases.generator(7)).requires_grad_()
    value = otdd.matrix_loss(costs, epsilon=EPSILON)
    with torch.no_grad():
        costs += 1
    with pytest.raises(otdd.InputError, match="changed in place"):
        value.backward()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_takes_one_matrix_and_forward_none(dtype: torch.dtype) -> None:
    n = 1200
    costs = torch.rand(n, n, generator=cases.generator(8)).to(dtype).requires_grad_()
    options, found = otdd.Converged(max_iterations=3), []
    vectors = 200 * 2 * n

    def forward() -> None:
        found.append(otdd.matrix_loss(costs, epsilon=0.5, options=options))

    # Tiles of scores, of any size of the matrix, and what a sample takes of it.
    tiles = 4 << 20
    here = torch.device("cpu")
    assert peak(forward, here) <= tiles + vectors
    assert peak(found[0].backward, here) <= costs.nbytes + tiles + vectors
