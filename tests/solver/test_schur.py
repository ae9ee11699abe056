"""Linear systems of a plan, decomposed and by iterations, against dense solves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from derivative_cases import ONE, drawn, solve_by
from pairwise import pairwise
from torch import Tensor

from otdd_flash.operators.plan import KeptPlan
from otdd_flash.solver import direct, schur
from otdd_flash.solver.conjugate_gradients import Iterates, Limits, Metric, Near, System
from otdd_flash.solver.direct import Cholesky
from otdd_flash.solver.schur import CGOptions, SchurSystem, SelfSystem, Solution, Solver, solve

by_iterations = pytest.mark.usefixtures("iterations_alone")


def plan(n: int, m: int, *, spread: float = 2.0, zeros: bool = False) -> Tensor:
    entries = (spread * drawn(n, m)).exp()
    if zeros and n > 1 and m > 1:
        entries[n // 2], entries[:, m // 2] = 0, 0
    return entries / entries.sum()


def system_of(entries: Tensor, damping: float = 0.0) -> SchurSystem:
    return SchurSystem(KeptPlan(entries), damping)


def dense_schur(entries: Tensor, damping: float = 0.0) -> Tensor:
    r, c = entries.sum(1), entries.sum(0)
    per_row = torch.where(r > 0, 1 / r, 0)
    return (1 + damping) * c.diag() - entries.T @ (per_row[:, None] * entries)


def right_sides(matrix: Tensor, count: int = 3) -> Tensor:
    return matrix @ drawn(len(matrix), count, seed=1)


def less_constants(values: Tensor, c: Tensor) -> Tensor:
    """Solutions that sum to 0 over the masses, and are 0 where there is none."""
    return torch.where(c[:, None] > 0, values - (c @ values) / c.sum(), 0)


def solved(entries: Tensor, right: Tensor, cg: CGOptions = ONE, *, own: bool = False) -> Solution:
    system: Any = (SelfSystem if own else SchurSystem)(KeptPlan(entries), cg.damping)
    return solve(system, system, right, cg)


def options_of(way: str, damping: float, monkeypatch: pytest.MonkeyPatch) -> CGOptions:
    return replace(solve_by(way, monkeypatch), damping=damping)


@pairwise(
    way=["decomposed", "iterations"],
    shape=[(1, 1), (1, 9), (9, 1), (20, 20), (30, 20), (20, 30)],
    zeros=[False, True],
    damping=[0.0, 0.1],
    count=[1, 7],
)
def test_cross_systems(
    way: str,
    shape: tuple[int, int],
    zeros: bool,
    damping: float,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cg, entries = options_of(way, damping, monkeypatch), plan(*shape, zeros=zeros)
    matrix, c = dense_schur(entries, damping), entries.sum(0)
    right = right_sides(matrix, count)
    found = solved(entries, right, cg)
    assert bool(found.converged.all())
    assert way != "decomposed" or found.iterations.tolist() == [0] * count
    expected = torch.linalg.pinv(matrix, rtol=1e-10, hermitian=True) @ right
    expected = expected if damping else less_constants(expected, c)
    values = found.values if damping else less_constants(found.values, c)
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.left, right - matrix @ found.values, rtol=0, atol=1e-15)
    scale = torch.where(c > 0, 1 / c, 0).sqrt()[:, None]
    size = (scale * right).norm(dim=0).clamp_min(1e-300)
    residual = (scale * found.left).norm(dim=0) / size
    torch.testing.assert_close(found.residual, residual, rtol=1e-9, atol=1e-300)


@pairwise(way=["decomposed", "iterations"], n=[1, 25], zeros=[False, True], damping=[0.0, 0.1])
def test_self_systems(
    way: str, n: int, zeros: bool, damping: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cg, entries = options_of(way, damping, monkeypatch), plan(n, n, spread=0.5, zeros=zeros)
    entries = entries + entries.T
    matrix = (1 + damping) * entries.sum(1).diag() + entries
    right = right_sides(matrix)
    found = solved(entries, right, cg, own=True)
    assert way != "decomposed" or found.iterations.tolist() == [0] * 3
    expected = torch.linalg.pinv(matrix, hermitian=True) @ right
    torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=1e-10)


def test_decomposed_systems_leave_constants_out() -> None:
    entries = plan(30, 20)
    right = right_sides(dense_schur(entries))
    found = solved(entries, right + 1e-3 * entries.sum(0)[:, None])
    assert int(found.iterations.max()) == 0
    torch.testing.assert_close(found.values, solved(entries, right).values, rtol=1e-10, atol=1e-12)
    assert float((entries.sum(0) @ found.values).abs().max()) <= 1e-12


@by_iterations
def test_iterations_leave_constants_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the projection rounding adds a part that nothing takes away."""
    entries = plan(40, 30)
    system = system_of(entries)
    right = right_sides(dense_schur(entries)) + 1e-3 * system.metric.masses
    assert bool(solve(system, system, right, CGOptions(1e-10)).converged.all())
    monkeypatch.setattr(system.metric, "constants", False)
    assert not bool(solve(system, system, right, CGOptions(1e-10)).converged.any())
    assert CGOptions() == schur.DEFAULTS


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
    system: Any = (SelfSystem if own else SchurSystem)(KeptPlan(entries))
    assert system.direct is not None
    assert not bool(system.direct.sound)
    found = solved(entries, right, cg, own=own)
    monkeypatch.setattr(direct, "MOST_POINTS", 0)
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
    expected = less_constants(drawn(16, 3, seed=1), entries.sum(0))
    assert float((found.values - expected).norm()) <= 1e-13 / between


def test_what_the_decomposition_refuses_is_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library leaves in place of a factor then."""
    identity = torch.eye(20, dtype=torch.float64)
    for failed in (0, 3):
        monkeypatch.setattr(
            torch.linalg, "cholesky_ex", lambda _, failed=failed: (identity, torch.tensor(failed))
        )
        found = system_of(plan(30, 20)).direct
        assert found is not None
        assert bool(found.sound) == (failed == 0)


def test_a_residual_above_the_tolerance_leaves_it_to_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This and all later solves."""
    entries, exact = plan(30, 20), Cholesky.solve
    system = system_of(entries)
    solver, right = Solver(system, system, CGOptions(1e-6)), right_sides(dense_schur(entries))
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
    for name, most in (("MOST_POINTS", 3), ("MOST_POINTS_CPU", 3), ("MOST_ENTRIES", 27)):
        for limit in (most, most - 1):
            with monkeypatch.context() as limited:
                limited.setattr(direct, name, limit)
                for shape in ((3, 9), (9, 3)):
                    decomposed = system_of(plan(*shape)).direct is not None
                    assert decomposed == (limit == most), (name, limit, shape)


@by_iterations
@pytest.mark.parametrize("share", [1e-3, 3e-2])
def test_residuals_of_the_plan_itself_correct_what_a_rounded_one_gives(share: float) -> None:
    entries = plan(30, 20, spread=1.0)
    draw = torch.Generator().manual_seed(1)
    off = share * (2 * torch.rand(entries.shape, generator=draw, dtype=torch.float64) - 1)
    system, near = system_of(entries), system_of(entries * (1 + off))
    right = right_sides(dense_schur(entries))
    found = solve(system, near, right, CGOptions(1e-6))
    assert bool(found.converged.all())
    assert float(found.residual.max()) <= 1e-6
    left = right - system.times(found.values)
    torch.testing.assert_close(found.left, left, rtol=0, atol=1e-9 * float(right.abs().max()))


@by_iterations
def test_a_plan_that_is_too_far_gives_way_to_the_plan_itself() -> None:
    entries = plan(30, 20, spread=1.0)
    system, other = system_of(entries), system_of(plan(30, 20))
    right = right_sides(dense_schur(entries))
    found = solve(system, other, right, CGOptions(1e-10))
    assert bool(found.converged.all())
    assert float(found.residual.max()) <= 1e-10
    alone = solve(system, system, right, CGOptions(1e-10))
    assert bool((found.iterations > alone.iterations).all())


@by_iterations
def test_every_direction_stops_by_itself() -> None:
    entries = plan(30, 20)
    system, right = system_of(entries), right_sides(dense_schur(entries))
    right[:, 1] = 0
    together = solve(system, system, right, CGOptions(1e-9))
    assert int(together.iterations[1]) == 0
    assert float(together.values[:, 1].abs().max()) == 0
    for k in range(3):
        alone = solve(system, system, right[:, [k]], CGOptions(1e-9))
        torch.testing.assert_close(alone.values[:, 0], together.values[:, k], rtol=1e-9, atol=1e-12)
        assert int(alone.iterations) == int(together.iterations[k])
    few = solve(system, system, right_sides(dense_schur(entries)), CGOptions(1e-12, 4))
    assert few.iterations.tolist() == [4, 4, 4]
    assert not bool(few.converged.any())


def iterated(system: System, right: Tensor, most: int) -> Iterates:
    """After iterations to no goal but that many steps."""
    found = Iterates(system.metric, Limits(0.0, most))
    found.begin(right, Near(system))
    while bool(found.active.any()):
        found.step()
    return found


@by_iterations
def test_groups_with_no_mass_between_them() -> None:
    """Their difference is in the kernel, and rounding cannot tell: no step is taken along it."""
    entries = torch.block_diag(plan(10, 8, spread=1.0), plan(10, 8, spread=1.0)) / 2
    system, matrix = system_of(entries), dense_schur(entries)
    kernel = torch.cat((torch.ones(8), -torch.ones(8))).double()[:, None]
    found = iterated(system, system.metric.masses * kernel, 1000)
    assert int(found.iterations) == 0
    assert float(found.correction.abs().max()) == 0
    right = right_sides(matrix)
    solution = solve(system, system, right, CGOptions(1e-9))
    assert bool(solution.converged.all())
    assert float((matrix @ solution.values - right).norm() / right.norm()) <= 1e-8


class InFloat32:
    """A matrix whose products are rounded."""

    precision, layout, direct = 8 * 2.0**-24, None, None

    def __init__(self, matrix: Tensor) -> None:
        ones = torch.ones(len(matrix), dtype=torch.float64)
        self._matrix, self.metric = matrix.float(), Metric(ones, constants=False)

    def times(self, values: Tensor) -> Tensor:
        return (self._matrix @ values.float()).double()

    def image(self, *_: Tensor) -> NoReturn:
        raise NotImplementedError

    def preconditioner(self) -> None:
        """It has none."""


@by_iterations
def test_what_rounding_does_not_allow_is_given_up() -> None:
    """Corrections that do not halve the residual end the solve; the best so far is returned."""
    system = InFloat32(dense_schur(plan(30, 20, spread=1.0), damping=0.1))
    right = right_sides(system.times(torch.eye(20, dtype=torch.float64)))
    found = solve(system, system, right, CGOptions(1e-12))
    assert not bool(found.converged.any())
    assert float(found.residual.max()) <= 1e-5
    assert int(found.iterations.max()) < 100


def test_steps_that_rounding_makes_long_are_not_taken() -> None:
    """Along a direction that the matrix takes to nearly 0, only rounding is left of a residual."""
    basis, _ = torch.linalg.qr(drawn(6, 6))
    values = torch.tensor([1.0, 0.8, 0.6, 0.5, 0.3, 1e-9], dtype=torch.float64)
    matrix = basis @ values.diag() @ basis.T
    expected = basis[:, :5].sum(1, keepdim=True)
    right = matrix @ expected + 1e-7 * basis[:, 5:]
    found = iterated(InFloat32(matrix), right, 100).correction
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


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
    matrix, system = dense_schur(entries), system_of(entries)
    scaled = matrix / (entries.sum(0)[:, None] * entries.sum(0)).sqrt()
    assert int((torch.linalg.eigvalsh(scaled) < 1e-7).sum()) > 5
    for tolerance in (1e-3, 1e-5, 1e-7):
        found = solve(system, system, right_sides(matrix), CGOptions(tolerance))
        assert float(found.residual.max()) <= max(tolerance, 1e-6), tolerance
