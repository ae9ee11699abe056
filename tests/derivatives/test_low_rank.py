"""Preconditioners of systems that masses leave slow, and when they are made."""

from __future__ import annotations

from functools import cache

import pytest
import reference
import torch
from spying import calls_of
from torch import Tensor

from otdd_flash import memory
from otdd_flash.derivatives import plan_system
from otdd_flash.derivatives.plan_system import CGOptions, LowRank, PlanMatrix, PlanSystem
from otdd_flash.operators.base import StoredPlan

pytestmark = pytest.mark.usefixtures("iterations_alone")

N, M, RANK = 260, 240, 60
EPSILON = 0.5


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_system, "RANK", RANK)


def plan(*, tail: float = 5.0) -> Tensor:
    """Between points of which some lie far from all others, alone or in small groups."""
    return _plan(tail).clone()


@cache
def _plan(tail: float) -> Tensor:
    draw = torch.Generator().manual_seed(0)

    def cloud(count: int) -> Tensor:
        found = torch.randn(count, 3, generator=draw, dtype=torch.float64)
        return found * (1 + tail * torch.rand(count, 1, generator=draw, dtype=torch.float64) ** 8)

    cost = reference.dense_cost(cloud(N), cloud(M), 1.0)
    a, b = (torch.full((count,), 1 / count, dtype=torch.float64) for count in (N, M))
    g = torch.zeros_like(b)
    for _ in range(100):
        f = reference.softmin_rows(cost, b, g, EPSILON)
        g = reference.softmin_rows(cost.T, a, f, EPSILON)
    return reference.plan(cost, a, b, f, g, EPSILON)


def right_sides(matrix: PlanMatrix, count: int = 3, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(matrix.metric.masses), count, generator=draw, dtype=torch.float64)
    return matrix.times(drawn)


@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_what_is_left_is_well_conditioned(damping: float) -> None:
    """Symmetric and positive, and as good up to a factor as the inverse; masses are not."""
    matrix = PlanMatrix(StoredPlan(plan(tail=1.5)), damping)
    found, one = matrix.preconditioner(), torch.eye(M, dtype=torch.float64)
    assert found is not None
    for preconditioner, good in ((found, True), (LowRank(matrix.metric.inverse[:, :0]), False)):
        inverse = preconditioner.times(one, matrix.metric.inverse)
        torch.testing.assert_close(inverse, inverse.T, rtol=0, atol=1e-9 * float(inverse.max()))
        values, vectors = torch.linalg.eigh(inverse)
        root = vectors * values.clamp_min(0).sqrt() @ vectors.T
        # Without the eigenvalue of constants.
        left = torch.linalg.eigvalsh(root @ matrix.times(one) @ root)[int(damping == 0) :]
        assert (float(left[-1] / left[0]) <= 3) == good


def test_slow_iterations_are_preconditioned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, options = calls_of(monkeypatch, PlanMatrix, "preconditioner"), CGOptions(1e-9)
    kept = StoredPlan(plan())
    alone = PlanSystem(kept, options, kept)
    matrix = alone.matrix
    right = right_sides(matrix)
    alone._patience = None
    assert int(alone.solve(right).iterations.min()) >= 50
    assert calls == []
    monkeypatch.setattr(plan_system, "PATIENCE", 10)
    solver = PlanSystem(kept, options, kept)
    for most in (10 + 25, 25):
        found = solver.solve(right)
        left = right - matrix.times(found.values)
        assert float((matrix.metric.size(left) / matrix.metric.size(right)).max()) <= 1e-9
        assert int(found.iterations.max()) <= most
    assert len(calls) == 1


def test_vectors_are_as_many_as_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    of_one = 8 * plan_system.MATRICES * M
    monkeypatch.setattr(memory, "ASSUMED_FREE", 0)
    monkeypatch.setattr(memory, "free_memory", lambda *_: 2 * of_one * 30)
    for most, drawn in ((60 * of_one, 60), (59 * of_one, 30), (of_one, 1), (1, 0), (None, 30)):
        assert plan_system.rank_for(M, 1, most, torch.device("cpu")) == drawn
    # Of which a product has as many rows as the other side has points.
    assert plan_system.rank_for(M, 4 * M, 60 * of_one, torch.device("cpu")) == 15


def test_columns_that_rounding_empties_are_solved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in float16 has no entry where masses are very small; what it gives is used all over.

    Its own masses there, none, would leave these columns out of every direction.
    """
    monkeypatch.setattr(plan_system, "PATIENCE", 10)
    exact = plan()
    exact[:, ::5] *= 1e-9
    rounded = exact.clone()
    rounded[:, ::5] = 0
    kept = StoredPlan(exact)
    for quick in (StoredPlan(rounded), kept):
        system = PlanSystem(kept, CGOptions(1e-6), quick)
        found = system.solve(right_sides(system.matrix))
        assert bool(found.converged.all())
        assert int(found.iterations.max()) <= 100
