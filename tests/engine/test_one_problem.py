"""An operator as the only problem: its evaluations and its iterations, in PyTorch and Triton."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.engine.problems import Start
from otdd_flash.formulas.decision import CROSS, SELF, Goal, Levels
from otdd_flash.operators.given_costs import matrix_operator
from otdd_flash.operators.one_problem import problem_of
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_term

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class InTriton:
    """An operator of which all but its passes runs in kernels."""

    def __init__(self, operator: TorchOperator[Any]) -> None:
        self.inner = operator
        self.passes = operator.passes._replace(in_triton=True)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double().to(DEVICE)


def masses(n: int, seed: int = 1, *, zeros: bool = False) -> Tensor:
    weights = draw(n, seed=seed).abs() + 0.1
    if zeros and n > 2:
        weights[::3] = 0
    return weights / weights.sum()


def problem(
    n: int, m: int | None = None, dtype: torch.dtype = torch.float32, *, zeros: bool = False
) -> TorchOperator[Any]:
    """Between two clouds, or of one with itself without m."""
    x, a = draw(n, 3, seed=n), masses(n, zeros=zeros)
    y, b = (x, a) if m is None else (draw(m, 3, seed=m + 1) + 1, masses(m, 2, zeros=zeros))
    return matrix_operator(reference.dense_cost(x, y).to(dtype), a, b)


ONE = torch.ones(1, dtype=torch.float64)
GOAL, START = Goal(1.0, 1e-3, 0.1, 100), Start(Levels.descending(ONE), 0 * ONE)
SOLVES = {own: partial(solve_term, form=SELF if own else CROSS) for own in (False, True)}


@pytest.mark.parametrize(("symmetric", "in_triton"), [(False, False), (True, False), (False, True)])
def test_before_any_evaluation_the_start_is_what_there_is(symmetric, in_triton) -> None:
    """A term that has one iteration left proves what it is given."""
    operator = problem(30, None if symmetric else 40, torch.float32)
    solve, whole = SOLVES[symmetric], InTriton(operator) if in_triton else operator
    first = solve(operator, 0.5, Converged(1e-3))
    again = solve(whole, 0.5, Converged(1e-4, max_iterations=1), start=first.g)
    assert again.iterations == 1
    assert again.marginal_error <= first.marginal_error * (1 + 1e-9)
    one = problem_of(whole, SELF if symmetric else CROSS)
    iterations = one.iterations(first.g, GOAL, SELF if symmetric else CROSS, START)
    last = one.evaluated(iterations.vectors, 0.5)
    assert torch.equal(last.g, first.g)
    assert torch.equal(last.updated, first.g)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("constant", "far"), [(True, 1e4), (False, 1e3), (True, -1e3)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_solve_may_start_from_anywhere(symmetric, constant, far) -> None:
    """Masses of the first plans are infinite or 0."""
    operator = problem(30, None if symmetric else 40, torch.float64)
    epsilon, solve = 0.03 * operator.costs.mean, SOLVES[symmetric]
    near = solve(operator, epsilon, Converged(1e-6))
    start = far * (torch.ones_like(near.g) if constant else draw(len(near.g)))
    term = solve(operator, epsilon, Converged(1e-6), start=start)
    assert term.converged
    assert term.value == pytest.approx(near.value, rel=1e-5)
    if constant:
        assert term.iterations <= near.iterations + 3


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("size", "relative"), [((270, 300), 30.0), ((40, 33), 0.05), ((300, None), 0.3)]
)
def test_whole_solves_in_triton_are_those_of_the_reference(size, relative) -> None:
    """A block of the kernels has 256 points."""
    operator, symmetric = problem(*size, zeros=True), size[1] is None
    solve, epsilon = SOLVES[symmetric], relative * operator.costs.mean
    expected = solve(operator, epsilon, Converged(1e-3))
    found = solve(InTriton(operator), epsilon, Converged(1e-3))
    assert found.converged
    assert found.iterations <= expected.iterations + 2
    assert max(found.bounds[0], expected.bounds[0]) <= min(found.bounds[1], expected.bounds[1])
    if not symmetric:
        # Points without mass end with their softmin.
        softmin, without = operator.softmin_rows(found.g, epsilon), operator.a == 0
        off = (found.f - softmin)[without].abs().max()
        assert float(off) < 1e-3 * epsilon


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pass_may_be_off_by_half_a_unit_of_its_sums(dtype) -> None:
    """And by a unit of potentials; costs by half of what they may be off by together."""
    operator, unit = problem(30, 40, dtype), torch.finfo(dtype).eps / 2
    errors = problem_of(operator, CROSS).scalars[0].errors
    costs = operator.costs
    assert float(errors.mean) == float(errors.largest) == pytest.approx(costs.error / 2)
    assert float(errors.sums) == unit / 2
    assert float(errors.potentials) == unit
    assert float(errors.reach) == pytest.approx(unit * costs.magnitude)


@pytest.mark.parametrize("symmetric", [False, True])
def test_an_evaluation_of_a_cloud_with_itself_is_one_pass(symmetric, monkeypatch) -> None:
    operator, passes = problem(30, None if symmetric else 40, torch.float32), []
    for name in ("softmin_rows", "softmin_columns"):
        run = getattr(operator, name)
        monkeypatch.setattr(
            operator, name, lambda *given, run=run, name=name: passes.append(name) or run(*given)
        )
    one = problem_of(InTriton(operator), SELF if symmetric else CROSS)
    form = SELF if symmetric else CROSS
    one.iterations(0 * operator.b.float(), GOAL, form, START).step()
    assert passes == ["softmin_rows", "softmin_columns"][: 1 if symmetric else 2]
