"""Cost matrices, solved in recordings that read them where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.operators import matrix_kernel
from otdd_flash.solver import solving
from otdd_flash.solver.matrix.transport import solve_matrix
from otdd_flash.solver.matrix_comparison import MatrixComparison
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.small import route
from otdd_flash.solver.term import TransportTerm

pytestmark = pytest.mark.usefixtures("nothing_kept")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IN_TRITON = ComputeOptions(device=DEVICE, backend="triton")


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
    given = MatrixComparison.prepare(costs.to(DEVICE), a, b, IN_TRITON).at(epsilon)
    found = route.solve_small(given, Converged(), **other)  # type: ignore[arg-type]
    return None if found is None else found.xy


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["negative float16", "transposed", "strided"])
def test_terms_are_proved(kind: str) -> None:
    costs, a, b = drawn(18, 13)
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


@pytest.mark.slow
def test_what_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbidden pairs, goals and rows that are too long for a sweep."""
    monkeypatch.setattr(matrix_kernel, "MOST_COLUMNS", 16)
    forbidding = torch.zeros(8, 9)
    forbidding[0, 0] = torch.inf
    small, forbidden, wide, tall = (
        MatrixComparison.prepare(costs, None, None, IN_TRITON)
        for costs in (
            torch.zeros(8, 9),
            forbidding,
            torch.zeros(2, 17),
            torch.zeros(17, 2),
        )
    )
    # What is known of costs, before they are said to be elsewhere.
    for given in (small, forbidden, wide, tall):
        assert given.facts.forbidden == (given is forbidden)
        assert given.operator("xy").a is not None
    monkeypatch.setattr(MatrixComparison, "device", torch.device("cuda"))
    for given, options, recorded in (
        (small, Converged(), True),
        (small, Converged(bound_width=0.1), False),
        (small, Converged(max_seconds=1.0), False),
        (forbidden, Converged(), False),
        (wide, Converged(), False),
        (tall, Converged(), True),
    ):
        assert route.is_small(given, options) == recorded, options


@pytest.mark.parametrize("taken", [True, False])
def test_a_matrix_that_recordings_take_is_solved_by_them(
    taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they find that it needs more."""
    in_triton = ComputeOptions(device=DEVICE, backend="triton")
    given = MatrixComparison.prepare(*drawn(8, 9), in_triton)
    monkeypatch.setattr(solving, "is_small", lambda *_: False)
    in_passes = solve_matrix(given, 0.5, None, Converged())[0]
    recorded = replace(in_passes, xy=replace(in_passes.xy, value=7.0))
    monkeypatch.setattr(solving, "is_small", lambda *_: True)
    monkeypatch.setattr(solving, "solve_small", lambda *_, **__: recorded if taken else None)
    assert solve_matrix(given, 0.5, None, Converged())[0].xy.value == (
        7.0 if taken else in_passes.xy.value
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "epsilon"), [(64, 0.1), (256, 0.001), (1000, 0.01), (3000, 0.1)])
def test_as_solved_in_passes(n: int, epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(0, 1, n, dtype=torch.float64, device="cuda")
    costs = (x[:, None] - x).square().float()
    a, b = (torch.exp(-(((x - c) / 0.08) ** 2) / 2) + 1e-9 for c in (0.3, 0.7))
    a, b = a / a.sum(), b / b.sum()
    mine = otdd.matrix_transport(costs, a, b, epsilon=epsilon)
    monkeypatch.setattr(solving, "is_small", lambda *given: False)
    truth = otdd.matrix_transport(costs.double(), a, b, epsilon=epsilon)
    for other in (truth, otdd.matrix_transport(costs, a, b, epsilon=epsilon)):
        assert mine.converged
        assert other.converged
        assert max(mine.bounds[0], other.bounds[0]) <= min(mine.bounds[1], other.bounds[1])
    assert mine.transport_cost == pytest.approx(truth.transport_cost, rel=1e-2)


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
