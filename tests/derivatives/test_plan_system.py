"""Linear systems of a plan where rounding decides: pivots, rounded plans, what is given up.

What systems are solved for is seen by Hessians and gradients, against dense pseudo-inverses.
"""

from __future__ import annotations

import pytest
import torch
from derivative_cases import ONE, drawn
from torch import Tensor

from otdd_flash.derivatives import plan_system
from otdd_flash.derivatives.plan_system import (
    CGOptions,
    Factorization,
    PlanMatrix,
    PlanSystem,
    Solution,
)
from otdd_flash.operators.base import StoredPlan

by_iterations = pytest.mark.usefixtures("iterations_alone")


def plan(n: int, m: int, *, spread: float = 2.0) -> Tensor:
    entries = (spread * drawn(n, m)).exp()
    return entries / entries.sum()


def system_of(entries: Tensor, cg: CGOptions = ONE, *, near: Tensor | None = None) -> PlanSystem:
    """The system of a plan, or one whose quick products are those of a plan near it."""
    plan = StoredPlan(entries, None if near is None else StoredPlan(near))
    return PlanSystem(plan, cg, plan.quick)


def dense_schur(entries: Tensor, damping: float = 0.0) -> Tensor:
    r, c = entries.sum(1), entries.sum(0)
    return (1 + damping) * c.diag() - entries.T @ (entries / r[:, None])


def right_sides(matrix: Tensor, count: int = 3) -> Tensor:
    return matrix @ drawn(len(matrix), count, seed=1)


def solved(entries: Tensor, right: Tensor, cg: CGOptions = ONE, *, own: bool = False) -> Solution:
    plan = StoredPlan(entries)
    return PlanSystem(plan, cg, plan, symmetric=own).solve(right)


BLOCKS = torch.block_diag(plan(10, 8), plan(7, 8)) / 2
ONE_SIDE = torch.block_diag(plan(5, 5), torch.zeros(5, 5).double()).roll(5, 1)
UNDECIDED = {
    "blocks": (BLOCKS, False),
    "blocks of fewer rows": (BLOCKS.T.contiguous(), False),
    "nearly blocks": (BLOCKS + 1e-19, False),
    "a permutation": (torch.eye(9, dtype=torch.float64)[torch.randperm(9)] / 9, False),
    "two sides of a self term": (ONE_SIDE + ONE_SIDE.T, True),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_pivots_of_rounding_size_leave_it_to_iterations(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, own = UNDECIDED[name]
    matrix = entries.sum(1).diag() + entries if own else dense_schur(entries)
    right, cg = right_sides(matrix), CGOptions(1e-10)
    factorization = PlanMatrix(StoredPlan(entries), symmetric=own).factorization()
    assert factorization is not None
    assert not bool(factorization.sound)
    found = solved(entries, right, cg, own=own)
    monkeypatch.setattr(plan_system, "MOST_POINTS", 0)
    for one, other in zip(found, solved(entries, right, cg, own=own), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("between", [1e-6, 1e-10])
def test_gaps_above_rounding_are_seen(between: float) -> None:
    entries = BLOCKS + between / 300
    right = right_sides(dense_schur(entries))
    found = solved(entries, right)
    assert int(found.iterations.max()) == 0
    # What moves one block against the other is as uncertain as the gap is small.
    change = dense_schur(entries) @ found.values - right
    assert float(change.norm() / right.norm()) <= 1e-11
    c, expected = entries.sum(0), drawn(16, 3, seed=1)
    expected = expected - (c @ expected) / c.sum()
    assert float((found.values - expected).norm()) <= 1e-13 / between


def test_a_residual_above_the_tolerance_leaves_it_to_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This and all later solves."""
    entries, exact = plan(30, 20), Factorization.solve
    solver, right = system_of(entries, CGOptions(1e-6)), right_sides(dense_schur(entries))
    monkeypatch.setattr(Factorization, "solve", lambda *given: exact(*given) * (1 + 1e-8))
    near = solver.solve(right)
    assert near.iterations.tolist() == [0, 0, 0]
    torch.testing.assert_close(near.residual, torch.full((3,), 1e-8).double(), rtol=1e-6, atol=0)
    monkeypatch.setattr(Factorization, "solve", lambda *given: exact(*given) * (1 + 1e-4))
    for _ in range(2):
        found = solver.solve(right)
        assert bool(found.converged.all())
        assert int(found.iterations.min()) > 0
    assert solver.directly(right) is None


def test_larger_systems_are_left_to_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the smaller side, on a CPU from fewer points on; or by entries."""
    for name, most in (("MOST_POINTS", 3), ("MOST_POINTS_CPU", 3), ("MOST_ENTRIES", 27)):
        for limit in (most, most - 1):
            with monkeypatch.context() as limited:
                limited.setattr(plan_system, name, limit)
                for shape in ((3, 9), (9, 3)):
                    matrix = PlanMatrix(StoredPlan(plan(*shape)))
                    factorized = matrix.factorization() is not None
                    assert factorized == (limit == most), (name, limit, shape)


@by_iterations
@pytest.mark.parametrize("off", [1e-3, 3e-2, None])
def test_residuals_of_the_plan_itself_correct_what_another_gives(off: float | None) -> None:
    """One that is rounded, or so far that it gives way to the plan itself."""
    entries = plan(30, 20, spread=1.0)
    share = 1 + (off or 0) * drawn(30, 20, seed=1).clamp(-1, 1)
    near = plan(30, 20) if off is None else entries * share
    system = system_of(entries, CGOptions(1e-6), near=near)
    right = right_sides(dense_schur(entries))
    found = system.solve(right)
    assert bool(found.converged.all())
    left = right - dense_schur(entries) @ found.values
    torch.testing.assert_close(found.left, left, rtol=0, atol=1e-9 * float(right.abs().max()))
    size = system.matrix.metric.size
    assert float(size(left).max()) <= 1e-6 * float(size(right).max())


class InFloat32(StoredPlan):
    """A plan whose products are rounded."""

    precision = 8 * 2.0**-24

    def times(self, values: Tensor, *_: object, transposed: bool = False) -> Tensor:
        entries = self.entries.float()
        return ((entries.T if transposed else entries) @ values.float()).double()


@by_iterations
def test_what_rounding_does_not_allow_is_given_up() -> None:
    """Corrections that do not halve the residual end the solve; the best so far is returned."""
    rounded = InFloat32(plan(30, 20, spread=1.0))
    system = PlanSystem(rounded, CGOptions(1e-12, damping=0.1), rounded)
    right = right_sides(system.matrix.times(torch.eye(20, dtype=torch.float64)))
    found = system.solve(right)
    assert not bool(found.converged.any())
    assert float(found.residual.max()) <= 1e-5
    assert int(found.iterations.max()) < 100


@by_iterations
def test_tight_tolerances_where_many_directions_are_nearly_in_the_kernel() -> None:
    """Pairs that are matched almost one to one."""
    draw = torch.Generator().manual_seed(0)
    n, epsilon = 120, 0.02
    x = torch.randn(n, 2, generator=draw, dtype=torch.float64)
    x *= 1 + 5 * torch.rand(n, 1, generator=draw, dtype=torch.float64) ** 8
    y = x + 0.02 * torch.randn(n, 2, generator=draw, dtype=torch.float64)
    entries = (-torch.cdist(x, y).square() / epsilon).exp()
    entries /= entries.sum()
    matrix = dense_schur(entries)
    scaled = matrix / (entries.sum(0)[:, None] * entries.sum(0)).sqrt()
    assert int((torch.linalg.eigvalsh(scaled) < 1e-7).sum()) > 5
    for tolerance in (1e-3, 1e-5, 1e-7):
        found = system_of(entries, CGOptions(tolerance)).solve(right_sides(matrix))
        assert float(found.residual.max()) <= max(tolerance, 1e-6), tolerance
