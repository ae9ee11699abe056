"""A sample of both sides says where to start, and never how a solve ends."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import reference
import torch
from labelled_costs import cost_between, dense_labelled_cost
from spying import calls_of
from torch import Tensor

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.points import LabelledCost
from otdd_flash.operators.point_scores import streamed_operator
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_term
from otdd_flash.solver.solving import sinkhorn

N, M = 400, 333
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a few points, so that small problems have one too."""
    monkeypatch.setattr("otdd_flash.solver.solve.FEWEST", 24)
    monkeypatch.setattr("otdd_flash.solver.solve.SCORES_PER_SAMPLED", 1)


def masses(size: int, draw: torch.Generator) -> Tensor:
    drawn = torch.rand(size, generator=draw).double() ** 2
    drawn[::5] = 0
    return drawn / drawn.sum()


def labelled_cost(*, uniform: bool = False) -> LabelledCost:
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(N, 6, generator=draw), torch.randn(M, 6, generator=draw) + 0.7
    table = torch.rand(4, 4, generator=draw).double()
    given = () if uniform else (masses(size, draw) for size in (N, M))
    labels_x, labels_y = (torch.arange(size) % 4 for size in (N, M))
    return cost_between(x, y, *given, labels_x=labels_x, labels_y=labels_y, class_costs=table)


@pytest.mark.slow
@pytest.mark.parametrize(("relative", "uniform"), [(0.07, False), (1e-3, True)])
def test_the_solution_is_that_of_dense_newton(
    relative: float, uniform: bool, small_samples: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass is counted, those of the sample by their share."""
    cost = labelled_cost(uniform=uniform)
    names = "softmin_rows", "softmin_columns", "marginals"
    calls = [calls_of(monkeypatch, TorchOperator, name) for name in names]
    operator = streamed_operator(cost, torch.float64)
    epsilon = relative * operator.costs.mean
    term = solve_term(operator, epsilon, Converged(1e-8))
    passes = [math.prod(given.shape) / (N * M) for given, *_ in chain(*calls)]
    assert min(passes) < 1 == max(passes)
    assert term.passes == pytest.approx(sum(passes))
    value, _, _ = reference.entropic_transport(dense_labelled_cost(cost), cost.a, cost.b, epsilon)
    assert term.converged
    assert term.bounds[0] - 1e-10 <= value <= term.bounds[1] + 1e-10
    assert term.value == pytest.approx(value, rel=1e-7)


@pytest.mark.usefixtures("small_samples")
@pytest.mark.parametrize("options", [Converged(max_seconds=1e-9), Converged(max_iterations=2)])
def test_what_a_sample_knows_is_not_lost_where_nothing_is_left(options: Converged) -> None:
    operator = streamed_operator(labelled_cost(), torch.float64)
    term = solve_term(operator, operator.costs.mean, options)
    assert term.stopped_by in ("max_seconds", "max_iterations")
    assert term.iterations == 2
    once = Converged(1e-9, max_iterations=1)
    nothing = solve_term(operator, operator.costs.mean, once)
    assert (nothing.iterations, nothing.converged) == (1, False)
    assert 3 * term.marginal_error < nothing.marginal_error


@pytest.mark.usefixtures("small_samples")
@pytest.mark.parametrize(
    ("precision", "units"), [("fast", (1e-10, 1e15)), ("double", (1e-70, 1e70))]
)
def test_a_unit_changes_nothing(precision: str, units: tuple[float, float]) -> None:
    """Most columns are too light to be drawn."""
    draw = torch.Generator().manual_seed(4)
    x, y = (torch.randn(size, 3, generator=draw).double() for size in (N, M))
    b = torch.where(torch.arange(M) < 280, 1e-12, 1.0).double()
    given = {"options": Converged(1e-2), "compute": ComputeOptions("cpu", precision=precision)}
    one, *others = (
        sinkhorn(
            LabeledSamples(unit * x, None, ()),
            LabeledSamples(unit * y, None, (), b),
            epsilon=0.3 * unit**2,
            **given,
        )
        for unit in (1.0, *units)
    )
    for unit, found in zip(units, others, strict=True):
        assert abs(found.iterations - one.iterations) <= 1
        assert found.value / unit**2 == pytest.approx(one.value, rel=1e-3)
