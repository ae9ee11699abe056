"""Linear systems of small plans that are decomposed, against pseudo-inverses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from derivative_cases import ONE, drawn, masses
from pairwise import pairwise
from torch import Tensor

from otdd_flash import CGOptions
from otdd_flash.operators.plan import KeptPlan
from otdd_flash.solver import direct
from otdd_flash.solver.direct import Cholesky
from otdd_flash.solver.schur import SchurSystem, SelfSystem, Solution, Solver, solve


def plan(n: int, m: int, *, spread: float = 2.0, zeros: bool = False) -> Tensor:
    entries = (spread * drawn(n, m)).exp()
    if zeros and n > 1 and m > 1:
        entries[n // 2], entries[:, m // 2] = 0, 0
    return entries / entries.sum()


def schur(entries: Tensor, damping: float = 0.0) -> Tensor:
    r, c = entries.sum(1), entries.sum(0)
    per_row = torch.where(r > 0, 1 / r, 0)
    return (1 + damping) * c.diag() - entries.T @ (per_row[:, None] * entries)


def less_constants(values: Tensor, c: Tensor) -> Tensor:
    """Solutions that sum to 0 over the masses, and are 0 where there is none."""
    return torch.where(c[:, None] > 0, values - (c @ values) / c.sum(), 0)


def solved(entries: Tensor, right: Tensor, cg: CGOptions = ONE, *, own: bool = False) -> Solution:
    system: Any = (SelfSystem if own else SchurSystem)(KeptPlan(entries), cg.damping)
    return solve(system, system, right, cg)


@pairwise(
    shape=[(1, 1), (1, 9), (9, 1), (20, 20), (30, 20), (20, 30)],
    zeros=[False, True],
    damping=[0.0, 0.1],
    count=[1, 7],
)
def test_cross_systems(shape: tuple[int, int], zeros: bool, damping: float, count: int) -> None:
    entries = plan(*shape, zeros=zeros)
    matrix, c = schur(entries, damping), entries.sum(0)
    right = matrix @ drawn(shape[1], count, seed=1)
    found = solved(entries, right, CGOptions(1e-9, 1, damping))
    assert bool(found.converged.all())
    assert found.iterations.tolist() == [0] * count
    expected = torch.linalg.pinv(matrix, rtol=1e-10, hermitian=True) @ right
    expected = expected if damping else less_constants(expected, c)
    torch.testing.assert_close(found.values, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(found.left, right - matrix @ found.values, rtol=0, atol=1e-15)
    scale = torch.where(c > 0, 1 / c, 0).sqrt()[:, None]
    size = (scale * right).norm(dim=0).clamp_min(1e-300)
    residual = (scale * found.left).norm(dim=0) / size
    torch.testing.assert_close(found.residual, residual, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("n", [1, 25])
def test_self_systems(n: int, zeros: bool, damping: float) -> None:
    entries = plan(n, n, spread=0.5, zeros=zeros)
    entries = entries + entries.T
    matrix = (1 + damping) * entries.sum(1).diag() + entries
    right = matrix @ drawn(n, 7, seed=1)
    found = solved(entries, right, CGOptions(1e-9, 1, damping), own=True)
    assert found.iterations.tolist() == [0] * 7
    expected = torch.linalg.pinv(matrix, hermitian=True) @ right
    torch.testing.assert_close(found.values, expected, rtol=1e-10, atol=1e-11)


def test_constants_are_left_out() -> None:
    entries = plan(30, 20)
    right = schur(entries) @ drawn(20, 2, seed=1)
    found = solved(entries, right + 1e-3 * entries.sum(0)[:, None])
    assert int(found.iterations.max()) == 0
    torch.testing.assert_close(found.values, solved(entries, right).values, rtol=1e-10, atol=1e-12)
    assert float((entries.sum(0) @ found.values).abs().max()) <= 1e-12


def test_a_plan_of_rank_one() -> None:
    entries = masses(12, 0)[:, None] * masses(9, 1)
    right = schur(entries) @ drawn(9, 2, seed=1)
    found = solved(entries, right)
    assert int(found.iterations.max()) == 0
    expected = less_constants(right / entries.sum(0)[:, None], entries.sum(0))
    torch.testing.assert_close(found.values, expected, rtol=1e-10, atol=1e-12)


BLOCKS = torch.block_diag(plan(10, 8), plan(7, 8)) / 2
UNDECIDED = {
    "blocks": (BLOCKS, False),
    "blocks of fewer rows": (BLOCKS.T.contiguous(), False),
    "nearly blocks": (BLOCKS + 1e-19, False),
    "a permutation": (torch.eye(9, dtype=torch.float64)[torch.randperm(9)] / 9, False),
    "two sides of a self term": (
        torch.block_diag(plan(5, 5), torch.zeros(5, 5).double()).roll(5, 1)
        + torch.block_diag(plan(5, 5), torch.zeros(5, 5).double()).roll(5, 1).T,
        True,
    ),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_pivots_of_rounding_size_leave_it_to_iterations(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, own = UNDECIDED[name]
    matrix = entries.sum(1).diag() + entries if own else schur(entries)
    right, cg = matrix @ drawn(len(matrix), 3, seed=1), CGOptions(1e-10)
    system: Any = (SelfSystem if own else SchurSystem)(KeptPlan(entries))
    assert system.direct is not None
    assert not bool(system.direct.sound)
    found = solved(entries, right, cg, own=own)
    monkeypatch.setattr(direct, "MOST_POINTS", 0)
    expected = solved(entries, right, cg, own=own)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("between", [1e-6, 1e-10])
def test_gaps_above_rounding_are_told(between: float) -> None:
    entries = BLOCKS + between / 300
    right = schur(entries) @ drawn(16, 3, seed=1)
    found = solved(entries, right)
    assert int(found.iterations.max()) == 0
    # What moves one block against the other is as uncertain as the gap is small.
    change = schur(entries) @ found.values - right
    assert float(change.norm() / right.norm()) <= 1e-11
    expected = less_constants(drawn(16, 3, seed=1), entries.sum(0))
    assert float((found.values - expected).norm()) <= 1e-13 / between


def test_what_the_decomposition_refuses_is_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library leaves in place of a factor then."""
    identity = torch.eye(20, dtype=torch.float64)
    for failed in (0, 3):
        monkeypatch.setattr(
            torch.linalg, "cholesky_ex", lambda _, failed=failed: (identity, torch.tensor(failed))
        )
        found = SchurSystem(KeptPlan(plan(30, 20))).direct
        assert found is not None
        assert bool(found.sound) == (failed == 0)


def test_a_residual_above_the_tolerance_leaves_it_to_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This and all later solves."""
    entries, exact = plan(30, 20), Cholesky.solve
    system = SchurSystem(KeptPlan(entries))
    solver = Solver(system, system, CGOptions(1e-6))
    right = schur(entries) @ drawn(20, 3, seed=1)
    monkeypatch.setattr(Cholesky, "solve", lambda *given: exact(*given) * (1 + 1e-8))
    near = solver.solve(right)
    assert near.iterations.tolist() == [0, 0, 0]
    torch.testing.assert_close(near.residual, torch.full((3,), 1e-8).double(), rtol=1e-6, atol=0)
    monkeypatch.setattr(Cholesky, "solve", lambda *given: exact(*given) * (1 + 1e-4))
    for _ in range(2):
        found = solver.solve(right)
        assert bool(found.converged.all())
        assert int(found.iterations.min()) > 0
    assert solver.directly(right) is None


def test_larger_systems_are_left_to_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the smaller side, on a CPU from fewer points on; or by entries."""
    wide, tall = KeptPlan(plan(3, 9)), KeptPlan(plan(9, 3))
    for name, most, decomposed in (
        ("MOST_POINTS", 3, True),
        ("MOST_POINTS", 2, False),
        ("MOST_POINTS_CPU", 3, True),
        ("MOST_POINTS_CPU", 2, False),
        ("MOST_ENTRIES", 27, True),
        ("MOST_ENTRIES", 26, False),
    ):
        with monkeypatch.context() as limited:
            limited.setattr(direct, name, most)
            for kept in (wide, tall):
                assert (SchurSystem(kept).direct is not None) == decomposed
