"""Quasi-Newton steps: their algebra, what is kept, and that a step leaves the host alone."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from otdd_flash.operators.stored import StoredOperator
from otdd_flash.solver import quasi_newton
from otdd_flash.solver.alternating import alternate
from otdd_flash.solver.quasi_newton import MEMORY, Point, begin, restart
from otdd_flash.solver.symmetric import average

SIZE = 17


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def masses(n: int, seed: int = 1) -> Tensor:
    weights = draw(n, seed=seed).abs() + 0.1
    return weights / weights.sum()


def random_operator(n: int, m: int, dtype: torch.dtype = torch.float64) -> StoredOperator:
    a = masses(n)
    cost = reference.dense_cost(draw(n, 3), draw(m, 3, seed=2) + 1).to(dtype)
    return StoredOperator.from_cost(cost, a, a if n == m else masses(m, 3))


def two_loops(residual: Tensor, steps: Tensor, falls: Tensor, weights: Tensor) -> Tensor:
    """Nocedal's recursion, one pair after the other."""
    pairs = list(zip(steps, falls, strict=True))
    products = [(weights @ (s * y), weights @ (y * y)) for s, y in pairs]
    result, factors = residual.clone(), []
    for (s, y), (curvature, _) in zip(reversed(pairs), reversed(products), strict=True):
        factors.append(weights @ (s * result) / curvature)
        result = result - factors[-1] * y
    result = result * sum(sy for sy, _ in products) / sum(yy for _, yy in products)
    for (s, y), (curvature, _), factor in zip(pairs, products, reversed(factors), strict=True):
        result = result + (factor - weights @ (y * result) / curvature) * s
    return result


@pytest.mark.parametrize("known", [1, 3, MEMORY])
def test_the_matrix_form_is_the_recursion(known: int) -> None:
    weights = masses(SIZE)
    root = draw(SIZE, SIZE, seed=5)
    positive = root @ root.T / SIZE + torch.eye(SIZE)
    steps = draw(known, SIZE, seed=6)
    # Self-adjoint in the metric: diag(1 / b) times a positive definite matrix.
    falls = steps @ positive / weights
    steps, falls = (v - (v @ weights)[:, None] for v in (steps, falls))
    residual = draw(SIZE, seed=7)
    residual = residual - weights @ residual
    memory = torch.zeros(2, MEMORY, SIZE).double()
    memory[0, MEMORY - known :], memory[1, MEMORY - known :] = steps, falls
    products = (memory * weights) @ torch.cat((memory[1], residual[None])).T
    found = quasi_newton._direction(residual, memory, products, 0.5)
    expected = two_loops(residual, steps, falls, weights)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_without_differences_the_step_is_the_plain_update() -> None:
    track, residual = begin(draw(3), draw(SIZE)), draw(SIZE)
    found = quasi_newton._direction(residual, track.memory, track.products, 0.5)
    torch.testing.assert_close(found, residual / 2)


def test_remembered_products_are_those_of_the_remembered_differences() -> None:
    operator = random_operator(9, SIZE)
    track = begin(torch.zeros(9).double(), torch.zeros(SIZE).double())
    for _ in range(MEMORY + 5):
        track = quasi_newton.Track(*alternate(operator, 0.05, track))
        residual = track.updated - track.g
        residual = residual - operator.b @ residual
        vectors = torch.cat((track.memory[1], residual[None]))
        expected = (track.memory * operator.b) @ vectors.T
        expected[0, :, :MEMORY].triu_()
        atol = 1e-12 * float(expected.abs().max())
        torch.testing.assert_close(track.products, expected, rtol=0, atol=atol)
    assert bool((track.memory[0].abs().sum(1) > 0).all())


def point(dual: float, gain: float = 0.0, gap: float = 0.1, g: float = 0.0) -> Point:
    potential = torch.full((3,), g).double() * torch.arange(3)
    numbers = (torch.tensor(v, dtype=torch.float64) for v in (dual, gain, gap, 1.0))
    return Point(torch.zeros(2).double(), potential, potential, *numbers)


def after(*seen: Point) -> quasi_newton.Track:
    track = begin(torch.zeros(2).double(), torch.zeros(3).double())
    for at in seen:
        track = quasi_newton.advance(track, at, torch.ones(3).double() / 3, 1.0)
    return track


def test_a_step_is_kept_only_if_the_dual_gains_what_the_plain_update_would() -> None:
    first = point(1.0, gain=0.5)
    assert float(after(first, point(1.6, g=1.0)).named.dual) == 1.6
    rejected = after(first, point(1.4, g=1.0))
    assert float(rejected.named.dual) == 1.0
    assert torch.equal(rejected.g, first.g)
    # The plain update that follows is kept whatever it brings.
    assert float(after(first, point(1.4, g=1.0), point(0.9)).named.dual) == 0.9
    assert float(after(first, point(math.nan, g=1.0)).named.dual) == 1.0


def test_rejections_in_a_row_are_followed_by_ever_more_plain_updates() -> None:
    good, bad = point(1.0, gain=1.0), point(-1.0, g=1.0)
    seen, waits = [good], []
    for _ in range(11):
        waits.append(float(after(*seen).named.plain))
        seen.append(good if waits[-1] else bad)
    assert waits == [0, 1, 0, 2, 1, 0, 4, 3, 2, 1, 0]


def test_where_the_dual_cannot_tell_the_marginal_error_decides() -> None:
    first = point(1.0, gap=0.1)
    assert float(after(first, point(1.0, gap=0.3)).gap) == pytest.approx(0.3)
    assert float(after(first, point(1.0, gap=0.5)).gap) == pytest.approx(0.1)
    stuck = [point(1.0, gap=0.1)] * 30
    tracks = [after(first, *stuck[:k]) for k in range(30)]
    assert max(float(track.named.plain) for track in tracks) >= 2


def test_a_restart_forgets_the_point_but_not_the_differences() -> None:
    operator = random_operator(9, 7)
    track = begin(torch.zeros(9).double(), torch.zeros(7).double())
    for _ in range(4):
        track = quasi_newton.Track(*alternate(operator, 0.5, track))
    again = restart(track, track.updated)
    assert float(again.named.dual) == -math.inf
    assert torch.equal(again.memory, track.memory)
    assert int((track.memory[0].abs().sum(1) > 0).sum()) == 3
    # The difference of points at two epsilons says nothing.
    assert torch.equal(quasi_newton.Track(*alternate(operator, 0.25, again)).memory, track.memory)


class _NoHostReads(TorchDispatchMode):
    """Refuses operators that need a value, or a size that depends on values, on the host."""

    FORBIDDEN = ("_local_scalar_dense", "item", "equal", "nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.FORBIDDEN, f"a step calls {name}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("step", "n", "m"), [(alternate, 9, 7), (average, 9, 9)])
def test_a_step_reads_nothing_on_the_host_and_keeps_its_shapes(
    step, n: int, m: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("a step reads a tensor on the host")

    operator = random_operator(n, m, dtype)
    track = begin(torch.zeros(n).to(dtype), torch.zeros(m).to(dtype))
    with _NoHostReads(), monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, refuse)
        new = step(operator, 0.1, track)
        new = step(operator, 0.1, new)
    for before, now in zip(track, new, strict=True):
        assert (now.shape, now.dtype) == (before.shape, before.dtype)
