"""Cost matrices, solved in recordings that read them where they are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import reference
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.kernels.matrix.sweep import MOST_COLUMNS
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.matrix_pool import MatrixPool, MatrixTerm
from otdd_flash.solver.matrix import problem
from otdd_flash.solver.matrix.problem import MatrixProblem
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.small import forget, matrix_route, pooled_solve
from otdd_flash.solver.small.exchanged import GivenCosts, Read
from otdd_flash.solver.small.pooled_solve import PooledSolve
from otdd_flash.solver.term.result import TransportTerm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IN_TRITON = ComputeOptions(device=DEVICE, backend="triton")


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    forget()
    yield
    forget()


def drawn(n: int, m: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Costs of either sign, and masses with one of 0."""
    draw = torch.Generator().manual_seed(seed)
    costs = torch.randn(n, m, generator=draw)
    a, b = (torch.rand(size, generator=draw) + 0.1 for size in (n, m))
    a[n // 2] = 0.0
    return costs, a / a.sum(), b / b.sum()


def solved(
    costs: Tensor, a: Tensor | None, b: Tensor | None, epsilon: float, **other: object
) -> TransportTerm | None:
    given = MatrixProblem.prepare(costs.to(DEVICE), a, b, IN_TRITON)
    return matrix_route.solve_recorded_matrix(given, epsilon, Converged(), **other)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "n", "m"),
    [("negative float16", 18, 13), ("transposed", 18, 13), ("strided", 5, 33)],
)
def test_terms_are_proved(kind: str, n: int, m: int) -> None:
    costs, a, b = drawn(n, m)
    costs = {
        "negative float16": lambda: (costs - 10).half(),
        "transposed": lambda: costs.T.contiguous().T,
        "strided": lambda: costs.repeat_interleave(2, 1)[:, ::2],
    }[kind]()
    term = solved(costs, a, b, 0.2)
    assert term is not None
    assert term.converged
    exact, rows = costs.double(), a > 0
    masses = a.double()[rows] / a.double().sum(), b.double() / b.double().sum()
    truth, *_ = reference.entropic_transport(exact[rows], *masses, 0.2)
    low, high = term.bounds
    assert low <= truth <= high
    assert high - low < 3e-3 * (1 + abs(truth))
    plan = reference.plan(exact[rows], *masses, term.f.cpu()[rows], term.g.cpu(), 0.2)
    errors = (plan.sum(1) - masses[0]).abs().sum(), (plan.sum(0) - masses[1]).abs().sum()
    assert float(max(errors)) <= term.marginal_error + 1e-9


@pytest.mark.slow
def test_a_room_serves_another_matrix_of_its_size() -> None:
    first = solved(*drawn(18, 13), 0.3)
    assert first is not None
    other = solved(*drawn(20, 15, seed=1), 0.3)
    assert other is not None
    assert abs(other.value - first.value) > 1e-3
    back = solved(*drawn(18, 13), 0.3)
    assert back is not None
    assert back.bounds == first.bounds
    # A start is taken.
    again = solved(*drawn(18, 13), 0.3, start={"xy": back.g})
    assert again is not None
    assert again.iterations < back.iterations


def test_what_recordings_read_of_a_matrix() -> None:
    """Every number that a certificate is made of, in a room with more points than there are."""
    costs, a, b = drawn(18, 13)
    prepared = MatrixProblem.prepare(costs.to(DEVICE), a, b, IN_TRITON)
    room, facts = matrix_route.matrix_room(prepared.operator.lines), prepared.facts
    assert (room.n, room.m) == (32, 16)
    held = costs.to(DEVICE)
    given = GivenCosts(held, (prepared.a, prepared.b), facts.magnitudes)
    pool = MatrixPool(room, torch.tensor(given.place, device=DEVICE))
    given.fill(pool, uniform=False)
    pool.of_costs.copy_(torch.tensor([facts.mean, *facts.range], dtype=torch.float64))
    pool.prepare(own=False)
    mean, lowest, highest = (float(number) for number in pool.cross)
    exact, rows = costs.double(), a > 0
    assert mean == pytest.approx(float(prepared.a.cpu() @ exact @ prepared.b.cpu()), rel=1e-6)
    assert (lowest, highest) == (float(exact[rows].min()), float(exact[rows].max()))
    of_x, of_y = pool.cross_magnitudes[0, :18].cpu(), pool.cross_magnitudes[0, 32:45].cpu()
    assert bool((exact.abs() <= of_x[:, None] + of_y)[rows].all())
    assert float(pool.masses.sum()) == pytest.approx(2, rel=1e-12)
    term = MatrixTerm(pool)
    f, g = (
        torch.full((1, size), math.nan, dtype=torch.float64, device=DEVICE) for size in (32, 16)
    )
    f[0, :18], g[0, :13] = 0.1, 0.2
    sums = term.marginals(f, g, 0.5)
    plan = prepared.a.cpu()[:, None] * ((0.3 - exact) / 0.5).exp() * prepared.b.cpu()
    for found, expected in ((sums.rows, plan.sum(1)), (sums.columns, plan.sum(0))):
        torch.testing.assert_close(found[0, : len(expected)].cpu(), expected, rtol=1e-12, atol=0)
        assert float(found[0, len(expected) :].abs().sum()) == 0
    q = torch.zeros_like(g)
    q[0, :13] = torch.linspace(0, 1, 13)
    products = term.expected_costs(q)[0].cpu()
    expected = torch.where(rows, exact @ q[0, :13].cpu(), 0)
    torch.testing.assert_close(products[:18], expected, rtol=1e-12, atol=1e-15)
    assert float(products[18:].abs().sum()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_potentials_of_points_without_mass(turned: bool) -> None:
    """Sweeps leave them out; a solution has the softmin."""
    costs, a, b = drawn(18, 40)
    b[[3, 20, 39]] = 0.0
    b /= b.sum()
    given = costs.T.contiguous().T if turned else costs
    term = solved(given, a, b, 0.2)
    assert term is not None
    rows, f, exact = a > 0, term.f.cpu().double(), costs.double()
    back = reference.softmin_rows(exact[rows].T, a.double()[rows] / a.double().sum(), f[rows], 0.2)
    torch.testing.assert_close(term.g.cpu().double()[b == 0], back[b == 0], rtol=0, atol=1e-3)
    columns, g = b > 0, term.g.cpu().double()
    there = reference.softmin_rows(exact[:, columns], b.double()[columns], g[columns], 0.2)
    torch.testing.assert_close(f[a == 0], there[a == 0], rtol=0, atol=1e-3)


@pytest.mark.slow
def test_the_transpose_swaps_potentials() -> None:
    """Of the same memory, by the same steps."""
    costs, a, b = drawn(18, 13)
    one, other = solved(costs, a, b, 0.2), solved(costs.T, b, a, 0.2)
    assert one is not None
    assert other is not None
    assert torch.equal(one.f, other.g)
    assert torch.equal(one.g, other.f)


@pytest.mark.slow
def test_a_solve_that_is_not_done_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is asked more than once; the next solve of this size asks once."""
    monkeypatch.setattr(pooled_solve, "FIRST_REPLAYS", 1)
    asked: list[bool] = []
    whole = PooledSolve.read

    def counted(solve: PooledSolve) -> Read:
        read = whole(solve)
        asked.append(read.done)
        return read

    monkeypatch.setattr(PooledSolve, "read", counted)
    costs, a, b = drawn(30, 41)
    term, again = solved(costs, a, b, 0.05), solved(costs, a, b, 0.05)
    assert asked[0] is False
    assert asked[-2:] == [True, True]
    assert term is not None
    assert again is not None
    assert term.converged
    assert again.bounds == term.bounds


@pytest.mark.slow
def test_what_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbidden pairs, goals and rows that are too long for a sweep."""
    costs, a, b = drawn(8, 9)
    forbidding = costs.clone()
    forbidding[0, 0] = torch.inf
    small, forbidden, wide, tall = (
        MatrixProblem.prepare(*given, IN_TRITON)
        for given in (
            (costs, a, b),
            (forbidding, a, b),
            (torch.zeros(2, MOST_COLUMNS + 1), None, None),
            (torch.zeros(MOST_COLUMNS + 1, 2), None, None),
        )
    )
    # What is known of costs, before they are said to be elsewhere.
    known = [bool(given.facts.forbidden) for given in (small, forbidden, wide, tall)]
    assert known == [False, True, False, False]
    for given in (small, forbidden, wide, tall):
        assert given.operator.a is not None
    assert not matrix_route.is_recorded_matrix(small, Converged()) or DEVICE == "cuda"
    monkeypatch.setattr(MatrixProblem, "device", torch.device("cuda"))
    assert matrix_route.is_recorded_matrix(small, Converged())
    assert not matrix_route.is_recorded_matrix(small, Converged(bound_width=0.1))
    assert not matrix_route.is_recorded_matrix(small, Converged(max_seconds=1.0))
    assert not matrix_route.is_recorded_matrix(forbidden, Converged())
    assert not matrix_route.is_recorded_matrix(wide, Converged())
    assert matrix_route.is_recorded_matrix(tall, Converged())


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 256, 1000, 3000])
@pytest.mark.parametrize("epsilon", [0.1, 0.01, 0.001])
def test_as_solved_in_passes(n: int, epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(0, 1, n, dtype=torch.float64, device="cuda")
    costs = (x[:, None] - x).square().float()
    a, b = (torch.exp(-(((x - c) / 0.08) ** 2) / 2) + 1e-9 for c in (0.3, 0.7))
    a, b = a / a.sum(), b / b.sum()
    mine = otdd.matrix_transport(costs, a, b, epsilon=epsilon)
    monkeypatch.setattr(problem, "is_recorded_matrix", lambda *given: False)
    other = otdd.matrix_transport(costs, a, b, epsilon=epsilon)
    assert mine.converged
    assert other.converged
    assert mine.bounds[0] <= other.bounds[1]
    assert other.bounds[0] <= mine.bounds[1]
    truth = otdd.matrix_transport(costs.double(), a, b, epsilon=epsilon)
    assert mine.bounds[0] <= truth.bounds[1]
    assert truth.bounds[0] <= mine.bounds[1]
    assert abs(mine.transport_cost - truth.transport_cost) <= 1e-2 * abs(truth.transport_cost)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3000, 9000])
def test_recordings_read_whatever_matrix_is_given(n: int) -> None:
    """The next solve of a size is of other costs elsewhere, and of a part of a wider matrix."""
    draw = torch.Generator().manual_seed(n)
    wide = torch.rand(n, n + 64, generator=draw).cuda()
    parts = [wide[:, :n], wide[:, 32 : n + 32], wide[:, 64:].contiguous(), wide[:, :n].T]
    for costs in (*parts, *parts):
        found = otdd.matrix_transport(costs, epsilon=0.05)
        plan = found.plan()
        assert found.converged
        assert float((plan.sum(1) - 1 / n).abs().sum()) <= 2 * found.tolerance
        value = float((plan * costs).sum())
        assert found.transport_cost == pytest.approx(value, rel=1e-3)
