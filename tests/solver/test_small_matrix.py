"""Small cost matrices, solved in recordings on their own scores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import reference
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.score_pool import GivenScores
from otdd_flash.solver.matrix.problem import MatrixProblem
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.small import forget, route
from otdd_flash.solver.small.exchanged import GivenCosts
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
    problem = MatrixProblem.prepare(costs.to(DEVICE), a, b, IN_TRITON)
    return route.solve_small_matrix(problem, epsilon, Converged(), **other)  # type: ignore[arg-type]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("kind", ["float32", "float16", "transposed", "strided", "negative"])
@pytest.mark.parametrize(("n", "m"), [(18, 13), (5, 33)])
def test_terms_are_proved(kind: str, n: int, m: int) -> None:
    costs, a, b = drawn(n, m)
    costs = {
        "float32": lambda: costs,
        "float16": lambda: costs.half(),
        "transposed": lambda: costs.T.contiguous().T,
        "strided": lambda: costs.repeat_interleave(2, 1)[:, ::2],
        "negative": lambda: costs - 10,
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


def test_a_room_serves_another_matrix_of_its_size() -> None:
    first, again = (solved(*drawn(18, 13), 0.3) for _ in range(2))
    assert first is not None
    assert again is not None
    other = solved(*drawn(20, 15, seed=1), 0.3)
    assert other is not None
    assert abs(other.value - first.value) > 1e-3
    back = solved(*drawn(18, 13), 0.3)
    assert back is not None
    assert back.bounds == first.bounds == again.bounds


def test_what_recordings_read_of_a_matrix() -> None:
    costs, a, b = drawn(18, 13)
    problem = MatrixProblem.prepare(costs.to(DEVICE), a, b, IN_TRITON)
    pool, facts = GivenScores(route.matrix_room(problem)), problem.facts
    GivenCosts(costs.to(DEVICE), (problem.a, problem.b), facts.magnitudes).fill(pool, uniform=False)
    pool.of_costs.copy_(torch.tensor([facts.mean, *facts.range], dtype=torch.float64))
    pool.prepare(own=False)
    x, y = slice(0, 18), slice(pool.room.n, pool.room.n + 13)
    torch.testing.assert_close(pool.scores[0, x, y].cpu(), -costs, rtol=0, atol=0)
    torch.testing.assert_close(pool.scores[0, y, x].cpu(), -costs.T, rtol=0, atol=0)
    mean, lowest, highest = (float(number) for number in pool.cross)
    exact, rows = costs.double(), a > 0
    assert mean == pytest.approx(float(problem.a.cpu() @ exact @ problem.b.cpu()), rel=1e-6)
    assert (lowest, highest) == (float(exact[rows].min()), float(exact[rows].max()))
    of_x, of_y = pool.cross_magnitudes[0, x].cpu(), pool.cross_magnitudes[0, y].cpu()
    assert bool((exact.abs() <= of_x[:, None] + of_y)[rows].all())
    logs = pool.log2_masses[0, y].cpu()
    torch.testing.assert_close(logs, problem.b.cpu().log2(), rtol=1e-12, atol=0)
    assert float(pool.masses.sum()) == pytest.approx(2, rel=1e-12)


def test_a_start_is_taken() -> None:
    costs, a, b = drawn(18, 13)
    first = solved(costs, a, b, 0.1)
    assert first is not None
    again = solved(costs, a, b, 0.1, start={"xy": first.g})
    assert again is not None
    assert again.iterations < first.iterations


def test_what_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbidden pairs, goals and sizes that recordings do not take."""
    costs, a, b = drawn(8, 9)
    forbidding = costs.clone()
    forbidding[0, 0] = torch.inf
    small, forbidden, large = (
        MatrixProblem.prepare(*given, IN_TRITON)
        for given in ((costs, a, b), (forbidding, a, b), (torch.zeros(1, 4000), None, None))
    )
    # What is known of costs, before they are said to be elsewhere.
    assert [bool(given.facts.forbidden) for given in (small, forbidden, large)] == [0, 1, 0]
    assert not route.is_small_matrix(small, Converged()) or DEVICE == "cuda"
    monkeypatch.setattr(MatrixProblem, "device", torch.device("cuda"))
    assert route.is_small_matrix(small, Converged())
    assert not route.is_small_matrix(small, Converged(bound_width=0.1))
    assert not route.is_small_matrix(small, Converged(max_seconds=1.0))
    assert not route.is_small_matrix(forbidden, Converged())
    assert not route.is_small_matrix(large, Converged())


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 256, 1000])
@pytest.mark.parametrize("epsilon", [0.1, 0.01, 0.001])
def test_as_solved_in_passes(n: int, epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(0, 1, n, dtype=torch.float64, device="cuda")
    costs = (x[:, None] - x).square().float()
    a, b = (torch.exp(-(((x - c) / 0.08) ** 2) / 2) + 1e-9 for c in (0.3, 0.7))
    a, b = a / a.sum(), b / b.sum()
    mine = otdd.matrix_transport(costs, a, b, epsilon=epsilon)
    monkeypatch.setattr(route, "MOST_BYTES_OF_A_MATRIX", 0)
    other = otdd.matrix_transport(costs, a, b, epsilon=epsilon)
    assert mine.converged
    assert other.converged
    assert mine.bounds[0] <= other.bounds[1]
    assert other.bounds[0] <= mine.bounds[1]
    truth = otdd.matrix_transport(costs.double(), a, b, epsilon=epsilon)
    assert mine.bounds[0] <= truth.bounds[1]
    assert truth.bounds[0] <= mine.bounds[1]
    assert abs(mine.transport_cost - truth.transport_cost) <= 1e-2 * abs(truth.transport_cost)
