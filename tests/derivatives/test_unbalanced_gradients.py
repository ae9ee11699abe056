"""Gradients of losses with relaxed marginals, against differences of dense solves."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from test_unbalanced_hessians import Problem, inputs_of
from torch import Tensor

import otdd_flash as otdd
from tests.tiers import slow

TIGHT = otdd.Converged(1e-9)
PENALTIES = [(0.3, 0.3), (5.0, 5.0), (0.2, None), (None, 0.2), (0.1, 3.0)]
STEP = 1e-5


def dense(values: dict[str, Tensor], epsilon: float, rho: tuple[float, float]) -> float:
    """S of points, masses, a table and weights; OT without self terms for unequal penalties."""
    x, y, a, b = (values[key] for key in "xyab")
    labels = torch.arange(len(x)) % 2, torch.arange(len(y)) % 3

    def term(one: int, two: int) -> float:
        points, masses = (x, y), (a, b)
        table = values["table"][(slice(2), slice(2, 5))[one], (slice(2), slice(2, 5))[two]]
        weights = values["lambda_x"], values["lambda_y"]
        cost = reference.dense_cost(points[one], points[two], 1.0) * weights[0]
        cost = cost + weights[1] * table[labels[one]][:, labels[two]]
        sides = masses[one], masses[two]
        return reference.unbalanced_transport(cost, *sides, epsilon, rho, 1e-12)[0]

    value = term(0, 1)
    return value - (term(0, 0) + term(1, 1)) / 2 if rho[0] == rho[1] else value


def drawn() -> dict[str, Tensor]:
    given = inputs_of(Problem(massless=False))
    return {key: part.detach() for key, part in given.items()}


@pytest.mark.parametrize("rho", [*PENALTIES[::2], *slow(PENALTIES[1::2])])
def test_gradients_are_those_of_dense_solves(rho: tuple[float | None, float | None]) -> None:
    """By points, masses along the simplex, the table and both weights."""
    values, epsilon = drawn(), 0.2
    given = {key: value.clone().requires_grad_() for key, value in values.items()}
    loss = otdd.sinkhorn_loss(
        *(given[key] for key in "xyab"),
        epsilon=epsilon,
        labels_x=torch.arange(6) % 2,
        labels_y=torch.arange(7) % 3,
        class_table=given["table"],
        lambda_x=given["lambda_x"],
        lambda_y=given["lambda_y"],
        unbalanced=rho,
        debias=rho[0] == rho[1],
        options=TIGHT,
    )
    loss.backward()
    penalties = tuple(math.inf if each is None else each for each in rho)
    assert float(loss.detach()) == pytest.approx(dense(values, epsilon, penalties), rel=1e-7)
    draw = torch.Generator().manual_seed(2)
    for key, value in values.items():
        along = torch.randn(value.shape, generator=draw, dtype=torch.float64)
        if key in "ab":
            along = along - along.mean()
        if key == "table":
            along = (along + along.T).fill_diagonal_(0)
        ends = [
            dense(values | {key: value + sign * STEP * along}, epsilon, penalties)
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * STEP)
        gradient = given[key].grad
        assert gradient is not None
        found = float((gradient * along).sum())
        assert found == pytest.approx(slope, rel=2e-5, abs=2e-7), key


def test_a_far_row_is_left_alone() -> None:
    """Where exact marginals pull it with all of its mass, relaxed ones let go."""
    x = torch.tensor([[0.0], [0.1], [30.0]])
    y = torch.tensor([[0.0], [0.2]])
    pulls = []
    for rho in (None, 0.5):
        points = x.clone().requires_grad_()
        otdd.sinkhorn_loss(points, y, epsilon=0.1, unbalanced=rho, debias=False).backward()
        assert points.grad is not None
        pulls.append(float(points.grad[2]))
    assert pulls[0] > 9
    assert pulls[1] < 1e-20


@pytest.mark.parametrize("mass", [0.0, 0.1])
def test_a_point_that_moves_nothing_has_no_derivative(mass: float) -> None:
    """The way out is the same with mass and without."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 2, generator=draw), torch.randn(5, 2, generator=draw)
    x[0] = 40.0
    weights = torch.tensor([mass, 1, 1, 1, 1, 1], dtype=torch.float64)
    a = weights / weights.sum()
    f, _ = otdd.sinkhorn_potentials(x.requires_grad_(), y, a, epsilon=0.3, unbalanced=0.3)
    with pytest.raises(otdd.InputError, match="raise unbalanced, or leave such points out"):
        f.sum().backward()


def test_a_batch_is_its_pairs() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 9, 2, generator=draw), torch.randn(3, 8, 2, generator=draw)
    x.requires_grad_()
    found = otdd.sinkhorn_losses(x, y, epsilon=0.1, unbalanced=0.5)
    each = [
        otdd.sinkhorn_loss(p, q, epsilon=0.1, unbalanced=0.5) for p, q in zip(x, y, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(each))
    found.sum().backward()
    assert x.grad is not None
    assert float(x.grad.abs().min()) > 0


@pytest.mark.parametrize("rho", PENALTIES)
def test_of_a_matrix(rho: tuple[float | None, float | None]) -> None:
    """The gradient by costs is the plan; those by masses are along the simplex."""
    values = drawn()
    cost = reference.dense_cost(values["x"], values["y"], 0.5).requires_grad_()
    a, b = (values[key].clone().requires_grad_() for key in "ab")
    loss = otdd.matrix_loss(cost, a, b, epsilon=0.1, unbalanced=rho, options=TIGHT)
    loss.backward()
    penalties = tuple(math.inf if each is None else each for each in rho)
    held = cost.detach(), a.detach(), b.detach()
    _, f, g = reference.unbalanced_transport(*held, 0.1, penalties, 1e-12)
    assert cost.grad is not None
    torch.testing.assert_close(cost.grad, reference.plan(*held, f, g, 0.1), rtol=1e-6, atol=1e-12)
    along = torch.linspace(-1, 1, 6).double()
    ends = [
        reference.unbalanced_transport(
            held[0], held[1] + sign * STEP * along, held[2], 0.1, penalties, 1e-12
        )[0]
        for sign in (1, -1)
    ]
    assert a.grad is not None
    slope = (ends[0] - ends[1]) / (2 * STEP)
    assert float(a.grad @ along) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_rows_without_a_counterpart_are_moved_by_the_self_term_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 2, generator=draw).double() for n in (25, 20))
    x[15:, 0] += 40
    x.requires_grad_()
    given = {"epsilon": 2.0, "unbalanced": 2.0, "options": TIGHT}

    def gradient(other: Tensor, *, debias: bool) -> Tensor:
        (found,) = torch.autograd.grad(otdd.sinkhorn_loss(x, other, debias=debias, **given), x)
        return found[15:]

    assert float(gradient(y, debias=False).abs().max()) < 1e-30
    # OT(x, x) / 2 moves with both of its sides.
    own = gradient(x.detach().clone(), debias=False)
    whole = gradient(y, debias=True)
    torch.testing.assert_close(whole, -own, rtol=1e-5, atol=1e-9)
    # A step against the gradient is outwards, and leaves the centre.
    away = x[15:].detach() - x[15:].detach().mean(0)
    assert float((whole * away).sum()) < -1e-3
    assert float(whole.sum(0).norm()) < 1e-6
