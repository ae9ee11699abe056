"""Linear systems of a plan, against dense solves."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from torch import Tensor

from otdd_flash.operators.plan import KeptPlan
from otdd_flash.solver import schur
from otdd_flash.solver.conjugate_gradients import Iterates, Limits, Metric, Near, System
from otdd_flash.solver.schur import CGOptions, SchurSystem, SelfSystem, solve

pytestmark = pytest.mark.usefixtures("iterations_alone")


def plan(n: int, m: int, *, symmetric: bool = False, spread: float = 3.0) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    logs = spread * torch.randn(n, m, generator=draw, dtype=torch.float64)
    entries = ((logs + logs.T) / 2 if symmetric else logs).exp()
    return entries / entries.sum()


def rounded(entries: Tensor, share: float) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    off = share * (2 * torch.rand(entries.shape, generator=draw, dtype=torch.float64) - 1)
    return entries * (1 + off)


def dense_schur(entries: Tensor, damping: float = 0.0) -> Tensor:
    r, c = entries.sum(1), entries.sum(0)
    inverse = torch.where(r > 0, 1 / r, 0)
    return (1 + damping) * c.diag() - entries.T @ (inverse[:, None] * entries)


def iterated(system: System, right: Tensor, most: int) -> Iterates:
    """After iterations to no goal but that many steps."""
    found = Iterates(system.metric, Limits(0.0, most))
    found.begin(right, Near(system))
    while bool(found.active.any()):
        found.step()
    return found


def right_sides(matrix: Tensor, count: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    return matrix @ torch.randn(len(matrix), count, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("zeros", [False, True])
def test_schur_complements(damping: float, zeros: bool) -> None:
    entries = plan(30, 20)
    if zeros:
        entries[3], entries[:, 5] = 0, 0
    matrix = dense_schur(entries, damping)
    system = SchurSystem(KeptPlan(entries), damping)
    values = torch.randn(20, 3, generator=torch.Generator().manual_seed(3)).double()
    torch.testing.assert_close(system.times(values), matrix @ values, rtol=1e-12, atol=1e-16)
    right = right_sides(matrix)
    found = solve(system, system, right, CGOptions(1e-12))
    assert bool(found.converged.all())
    assert float((matrix @ found.values - right).norm() / right.norm()) <= 1e-11
    torch.testing.assert_close(found.left, right - matrix @ found.values, rtol=0, atol=1e-15)
    assert float(found.residual.max()) <= 1e-12


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_self_systems(damping: float) -> None:
    entries = plan(25, 25, symmetric=True, spread=1.0)
    matrix = (1 + damping) * entries.sum(1).diag() + entries
    system = SelfSystem(KeptPlan(entries), damping)
    right = right_sides(matrix)
    found = solve(system, system, right, CGOptions(1e-12))
    expected = torch.linalg.solve(matrix, right)
    torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("share", [1e-3, 3e-2])
def test_residuals_of_the_plan_itself_correct_what_a_rounded_one_gives(share: float) -> None:
    entries = plan(30, 20, spread=1.0)
    system = SchurSystem(KeptPlan(entries))
    near = SchurSystem(KeptPlan(rounded(entries, share)))
    right = right_sides(dense_schur(entries))
    found = solve(system, near, right, CGOptions(1e-6))
    assert bool(found.converged.all())
    assert float(found.residual.max()) <= 1e-6
    left = right - system.times(found.values)
    torch.testing.assert_close(found.left, left, rtol=0, atol=1e-9 * float(right.abs().max()))


def test_a_plan_that_is_too_far_gives_way_to_the_plan_itself() -> None:
    entries = plan(30, 20, spread=1.0)
    system = SchurSystem(KeptPlan(entries))
    other = SchurSystem(KeptPlan(plan(30, 20, spread=2.0)))
    right = right_sides(dense_schur(entries))
    found = solve(system, other, right, CGOptions(1e-10))
    assert bool(found.converged.all())
    assert float(found.residual.max()) <= 1e-10
    alone = solve(system, system, right, CGOptions(1e-10))
    assert bool((found.iterations > alone.iterations).all())


def test_what_rounding_does_not_allow_is_given_up() -> None:
    """Corrections that do not halve the residual end the solve; the best so far is returned."""
    system = InFloat32(dense_schur(plan(30, 20, spread=1.0), damping=0.1))
    right = right_sides(system.times(torch.eye(20, dtype=torch.float64)))
    found = solve(system, system, right, CGOptions(1e-12))
    assert not bool(found.converged.any())
    assert float(found.residual.max()) <= 1e-5
    assert int(found.iterations.max()) < 100


def test_every_direction_stops_by_itself() -> None:
    entries = plan(30, 20)
    matrix = dense_schur(entries)
    system = SchurSystem(KeptPlan(entries))
    right = right_sides(matrix)
    right[:, 1] = 0
    together = solve(system, system, right, CGOptions(1e-9))
    assert int(together.iterations[1]) == 0
    assert float(together.values[:, 1].abs().max()) == 0
    for k in range(3):
        alone = solve(system, system, right[:, [k]], CGOptions(1e-9))
        torch.testing.assert_close(alone.values[:, 0], together.values[:, k], rtol=1e-9, atol=1e-12)
        assert int(alone.iterations) == int(together.iterations[k])


def test_no_more_iterations_than_asked_for() -> None:
    entries = plan(60, 50)
    system = SchurSystem(KeptPlan(entries))
    found = solve(system, system, right_sides(dense_schur(entries)), CGOptions(1e-12, 4))
    assert found.iterations.tolist() == [4, 4, 4]
    assert not bool(found.converged.any())


def test_groups_with_no_mass_between_them() -> None:
    """Their difference is in the kernel, and rounding cannot tell: no step is taken along it."""
    entries = torch.block_diag(plan(10, 8, spread=1.0), plan(10, 8, spread=1.0)) / 2
    system = SchurSystem(KeptPlan(entries))
    kernel = torch.cat((torch.ones(8), -torch.ones(8))).double()[:, None]
    right = system.metric.masses * kernel
    found = iterated(system, right, 1000)
    assert int(found.iterations) == 0
    assert float(found.correction.abs().max()) == 0
    matrix = dense_schur(entries)
    right = right_sides(matrix)
    found = solve(system, system, right, CGOptions(1e-9))
    assert bool(found.converged.all())
    assert float((matrix @ found.values - right).norm() / right.norm()) <= 1e-8


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


def test_steps_that_rounding_makes_long_are_not_taken() -> None:
    """Along a direction that the matrix takes to nearly 0, only rounding is left of a residual."""
    draw = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(6, 6, generator=draw, dtype=torch.float64))
    values = torch.tensor([1.0, 0.8, 0.6, 0.5, 0.3, 1e-9], dtype=torch.float64)
    matrix = basis @ values.diag() @ basis.T
    expected = basis[:, :5].sum(1, keepdim=True)
    right = matrix @ expected + 1e-7 * basis[:, 5:]
    found = iterated(InFloat32(matrix), right, 100).correction
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-5, 1e-7])
def test_tight_tolerances_where_many_directions_are_nearly_in_the_kernel(tolerance: float) -> None:
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
    system = SchurSystem(KeptPlan(entries))
    found = solve(system, system, right_sides(matrix), CGOptions(tolerance))
    assert float(found.residual.max()) <= max(tolerance, 1e-6)


def test_constants_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the projection rounding adds a part that nothing takes away."""
    entries = plan(40, 30, spread=2.0)
    system = SchurSystem(KeptPlan(entries))
    right = right_sides(dense_schur(entries)) + 1e-3 * system.metric.masses
    found = solve(system, system, right, CGOptions(1e-10))
    assert bool(found.converged.all())
    monkeypatch.setattr(system.metric, "constants", False)
    assert not bool(solve(system, system, right, CGOptions(1e-10)).converged.any())
    assert CGOptions() == schur.DEFAULTS
