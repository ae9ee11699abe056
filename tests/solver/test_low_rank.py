"""Preconditioners of systems that masses leave slow, and when they are made."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.operators import memory
from otdd_flash.operators.plan import KeptPlan
from otdd_flash.solver import low_rank, schur
from otdd_flash.solver.low_rank import LowRank
from otdd_flash.solver.schur import CGOptions, SchurSystem, SelfSystem, Solver

pytestmark = pytest.mark.usefixtures("iterations_alone")

N, M, RANK = 260, 240, 60
EPSILON = 0.5


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "RANK", RANK)


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


def right_sides(system: SchurSystem, count: int = 3, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(system.metric.masses), count, generator=draw, dtype=torch.float64)
    return system.times(drawn)


def spectrum(system: SchurSystem, found: LowRank) -> Tensor:
    """Of M^-1 S, less the eigenvalue of constants, ascending."""
    m = len(system.metric.masses)
    one = torch.eye(m, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(found.times(one, system.metric.inverse))
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    return torch.linalg.eigvalsh(root @ system.times(one) @ root)


@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_what_is_left_is_well_conditioned(damping: float) -> None:
    """Symmetric and positive, and as good up to a factor as the inverse; masses are not."""
    system = SchurSystem(KeptPlan(plan(tail=1.5)), damping)
    found = system.preconditioner()
    assert found is not None
    inverse = found.times(torch.eye(M, dtype=torch.float64), system.metric.inverse)
    torch.testing.assert_close(inverse, inverse.T, rtol=0, atol=1e-9 * float(inverse.max()))
    constants = int(damping == 0)
    values = spectrum(system, found)[constants:]
    assert float(values[-1] / values[0]) <= 3
    alone = LowRank(system.metric.inverse[:, :0])
    values = spectrum(system, alone)[constants:]
    assert float(values[-1] / values[0]) > 15


def test_rows_without_mass_stay_out() -> None:
    entries = plan()
    entries[:, 7], entries[3] = 0, 0
    system = SchurSystem(KeptPlan(entries))
    found = system.preconditioner()
    assert found is not None
    image = found.times(torch.ones(M, 2, dtype=torch.float64), system.metric.inverse)
    assert image[7].tolist() == [0, 0]
    assert bool(image.isfinite().all())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls, original = [], SchurSystem.preconditioner

    def preconditioner(self: SchurSystem) -> LowRank | None:
        calls.append(self)
        return original(self)

    monkeypatch.setattr(SchurSystem, "preconditioner", preconditioner)
    return calls


def test_slow_iterations_are_preconditioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whatever follows; solutions are those of many more iterations without."""
    calls, options = counted(monkeypatch), CGOptions(1e-9)
    system = SchurSystem(KeptPlan(plan()))
    right = right_sides(system)
    alone = Solver(system, system, options)
    alone._patience = None
    slow = alone.solve(right)
    assert calls == []
    assert int(slow.iterations.min()) >= 50
    monkeypatch.setattr(schur, "PATIENCE", 10)
    solver = Solver(system, system, options)
    for found in (solver.solve(right), solver.solve(right)):
        assert bool(found.converged.all())
        left = right - system.times(found.values)
        assert float((system.metric.size(left) / system.metric.size(right)).max()) <= 1e-9
        assert int(found.iterations.max()) <= 10 + 25
    assert int(found.iterations.max()) <= 25
    assert len(calls) == 1


def test_columns_that_rounding_empties_are_solved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in float16 has no entry where masses are very small; what it gives is used all over.

    Its own masses there, none, would leave these columns out of every direction.
    """
    monkeypatch.setattr(schur, "PATIENCE", 10)
    exact = plan()
    exact[:, ::5] *= 1e-9
    rounded = exact.clone()
    rounded[:, ::5] = 0
    system, near = SchurSystem(KeptPlan(exact)), SchurSystem(KeptPlan(rounded))
    for found in (
        Solver(system, near, CGOptions(1e-6)).solve(right_sides(system)),
        Solver(system, system, CGOptions(1e-6)).solve(right_sides(system)),
    ):
        assert bool(found.converged.all())
        assert int(found.iterations.max()) <= 100


def test_quick_ones_and_self_systems_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self system not even after as many iterations as another one is given."""
    calls, entries = counted(monkeypatch), plan(tail=0.0)
    system = SchurSystem(KeptPlan(entries))
    found = Solver(system, system, CGOptions(1e-6)).solve(right_sides(system))
    assert bool(found.converged.all())
    assert int(found.iterations.max()) < schur.PATIENCE
    assert calls == []
    monkeypatch.setattr(schur, "PATIENCE", 2)
    own = SelfSystem(KeptPlan(entries @ (entries.T / entries.sum(0)[:, None])))
    right = torch.randn(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = Solver(own, own, CGOptions(1e-9)).solve(right)
    assert bool(found.converged.all())
    assert int(found.iterations.min()) > 2


@pytest.mark.parametrize("reason", ["memory", "rows"])
def test_without_memory_or_rows_masses_have_to_do(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = SchurSystem(KeptPlan(plan()))
    if reason == "memory":
        monkeypatch.setattr(low_rank, "holds", lambda *_: False)
    else:
        monkeypatch.setattr(low_rank, "ROWS_PER_VECTOR", 2 * M)
    assert system.preconditioner() is None
    found = Solver(system, system, CGOptions(1e-9)).solve(right_sides(system))
    assert bool(found.converged.all())
    assert int(found.iterations.min()) >= 50


def test_vectors_are_as_many_as_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "UNASKED", 0)
    monkeypatch.setattr(memory, "free_memory", lambda *_: 2 * 8 * low_rank.MATRICES * M * 30)
    of_one = 8 * low_rank.MATRICES * M
    for most, drawn in ((60 * of_one, 60), (59 * of_one, 30), (of_one, 1), (1, 0), (None, 30)):
        assert low_rank.rank_for(M, 1, most, torch.device("cpu")) == drawn
    # Of which a product has as many rows as the other side has points.
    assert low_rank.rank_for(M, 4 * M, 60 * of_one, torch.device("cpu")) == 15
    of_one = 8 * low_rank.MATRICES * N
    found = SchurSystem(KeptPlan(plan()), most=15 * of_one).preconditioner()
    assert found is not None
    assert found.vectors.shape[1] == 15


class InFloat32(KeptPlan):
    """Products of halves, as tensor cores round them."""

    precision = 2.0**-20

    def times(self, values: Tensor, *_: Any) -> Tensor:
        return self._rounded(self.entries, values)

    def transposed_times(self, values: Tensor, *_: Any) -> Tensor:
        return self._rounded(self.entries.T, values)

    def _rounded(self, matrix: Tensor, values: Tensor) -> Tensor:
        scale = values.abs().amax(0).clamp_min(1e-300)
        found = matrix.float() @ (values / scale).float()
        noise = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        size = matrix.float() @ (values / scale).float().abs()
        return (found + 2.0**-21 * size * noise).double() * scale


def test_rounding_is_not_taken_for_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of groups so far apart that it hides theirs, and of which it makes no more than a share."""
    monkeypatch.setattr(low_rank, "RANK", 2 * RANK)
    monkeypatch.setattr(low_rank, "ROWS_PER_VECTOR", 2)
    exact = plan(tail=20.0)
    system, near = SchurSystem(KeptPlan(exact)), SchurSystem(InFloat32(exact))
    preconditioner = near.preconditioner()
    assert preconditioner is not None
    root = near.metric.masses.sqrt()
    scaled = root * preconditioner.times(
        root * torch.eye(M, dtype=torch.float64), near.metric.inverse
    )
    share = near.precision * float(torch.linalg.eigvalsh(scaled)[-1])
    assert 0.5 / low_rank.UNITS <= share <= 1.01 / low_rank.UNITS
    found = Solver(system, near, CGOptions(1e-4)).solve(right_sides(system))
    assert bool(found.converged.all())
