"""What is proved of potentials: of random ones, and of those that rounding spoils."""

from __future__ import annotations

import math
from functools import partial

import pytest
import reference
import torch
from operation_counts import OperationCounts
from refusals import Refusals
from torch import Tensor

from otdd_flash.engine.evidence.primal import filled_value, filling_of
from otdd_flash.operators.base import Marginals
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.alternating import solve_alternating
from otdd_flash.solver.term.certificate import Certificate, certify, certify_self
from otdd_flash.solver.term.symmetric import solve_symmetric


def cost_between(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> LabelledCost:
    """Without labels, and with lambda_x = 1."""
    labels = [torch.zeros(len(side), dtype=torch.int64) for side in (x, y)]
    none = torch.zeros(1, 1, dtype=torch.float64)
    return LabelledCost(
        x, y, a, b, labels_x=labels[0], labels_y=labels[1], class_costs=none, lambda_x=1.0
    )


def few_points(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two or three points on a line, (n, 1), and masses over seven orders of magnitude."""
    n = int(torch.randint(2, 4, (1,), generator=draw))
    masses = torch.rand(n, generator=draw).double() ** 4 + 1e-6
    return torch.randn(n, 1, generator=draw).double(), masses / masses.sum()


def log_uniform(draw: torch.Generator, low: float, high: float) -> float:
    return float(10 ** (low + (high - low) * torch.rand(1, generator=draw).double()))


def assert_proved(found: Certificate, cost: Tensor, a: Tensor, b: Tensor, epsilon: float) -> None:
    truth, _, _ = reference.entropic_transport(cost, a, b, epsilon)
    slack = 1e-10 * (1 + abs(truth))
    assert found.bounds[0] - slack <= truth <= found.bounds[1] + slack
    plan = reference.plan(cost, a, b, found.f, found.g, epsilon)
    error = max(float((plan.sum(1) - a).abs().sum()), float((plan.sum(0) - b).abs().sum()))
    assert error <= found.marginal_error + 1e-9


def one_potential(seed: int) -> tuple[StreamedOperator, Tensor, Tensor, float]:
    """A few points' cost with itself, their masses, a potential and epsilon."""
    draw = torch.Generator().manual_seed(seed)
    x, a = few_points(draw)
    operator = StreamedOperator(cost_between(x, x, a, a), torch.float64)
    epsilon = log_uniform(draw, -2, 2) * operator.costs.mean
    f = torch.randn(len(x), generator=draw).double() * log_uniform(draw, -2, 1)
    return operator, a, (f * operator.costs.spread).clamp_max(300 * epsilon), epsilon


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seeds", [range(15), range(15, 100)])
def test_of_one_potential(seeds: range) -> None:
    """In a third of these the bound by oscillation is less than three times what it has to be."""
    for seed in seeds:
        operator, a, f, epsilon = one_potential(seed)
        cost = -next(operator.negative_costs())[1]
        assert_proved(certify_self(operator, f, epsilon), cost, a, a, epsilon)


@pytest.mark.parametrize("seed", [308, 397, 443])
def test_above_the_costs_the_bound_by_oscillation_is_the_lesser(seed: int) -> None:
    operator, a, f, epsilon = one_potential(seed)
    cost = -next(operator.negative_costs())[1]
    rows = reference.plan(cost, a, a, f, f, epsilon).sum(1)
    total = float(rows.sum())
    # Of the plan of mass 1.
    dual = 2 * float(a @ f) - epsilon * math.log(total)
    swing = float(f.max() - f.min()) + operator.costs.spread
    upper = dual + float((rows / total - a).abs().sum()) * swing
    found = certify_self(operator, f, epsilon).bounds[1]
    assert found == pytest.approx(upper, rel=1e-9, abs=1e-9)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seeds", [range(10), range(10, 80)])
def test_of_two_potentials(seeds: range) -> None:
    refusals = Refusals("overflow")
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        (x, a), (y, b) = few_points(draw), few_points(draw)
        operator = StreamedOperator(cost_between(x, y, a, b), torch.float64)
        epsilon = log_uniform(draw, -2, 2) * operator.costs.mean
        f, g = (
            (torch.randn(n, generator=draw).double() * log_uniform(draw, -2, 1)).clamp_max(
                300 * epsilon
            )
            for n in operator.shape
        )
        cost = reference.dense_cost(x, y, 1.0)
        assert_proved(certify(operator, f, g, epsilon), cost, a, b, epsilon)
        # As they are, without the updates that a solve ends with.
        found = refusals.outcome(partial(certify, operator, f, g, epsilon, updated=g))
        if found is not None:
            assert_proved(found, cost, a, b, epsilon)
    refusals.check()


@pytest.mark.parametrize("own", [False, True])
def test_converged_is_a_marginal_error_within_the_tolerance(own: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 2, generator=draw), torch.randn(30, 2, generator=draw) + 1
    y = x if own else y
    a, b = (torch.full((len(side),), 1 / len(side)).double() for side in (x, y))
    operator = StreamedOperator(cost_between(x, y, a, b), torch.float64)
    solve = solve_symmetric if own else solve_alternating
    epsilon, near = 0.05 * operator.costs.mean, 0
    for iterations in (2, 3, 4):
        error = solve(operator, epsilon, Converged(1e-9, iterations)).marginal_error
        for tolerance in (0.4 * error, 0.9 * error, 1.1 * error):
            term = solve(operator, epsilon, Converged(tolerance, iterations))
            assert term.converged == (term.marginal_error <= tolerance)
            near += tolerance < term.marginal_error <= 3 * tolerance
    assert near >= 3


# What rounding adds to the bounds of a cross term, and when its plan is evaluated once more.

EPSILON = 0.1


def masses(*shares: float) -> Tensor:
    return torch.tensor(shares, dtype=torch.float64) / sum(shares)


class Summed(StreamedOperator):
    """Entries without errors, of which sums are off by a share that shows in the bounds."""

    share = 1e-3

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: float, *, accurate: bool = False
    ) -> Marginals:
        found = super().marginals(f, g, epsilon, accurate=accurate)
        none = torch.zeros_like(found.rows), torch.zeros_like(found.columns)
        return found._replace(
            row_errors=none[0], column_errors=none[1], relative_error=self.share, lost=0.0
        )


def test_bounds_move_by_what_sums_may_be_off() -> None:
    """Far points of little mass: the bound by the filled plan is the lesser."""
    x = torch.tensor([[0.0], [0.1], [3.0]], dtype=torch.float64)
    y = torch.tensor([[0.0], [0.2], [4.0]], dtype=torch.float64)
    a, b = masses(1, 1, 0.01), masses(1, 0.5, 0.02)
    operator, relative = Summed(cost_between(x, y, a, b), torch.float64), Summed.share
    cost = reference.dense_cost(x, y, 1.0)
    value, f, g = reference.entropic_transport(cost, a, b, EPSILON)
    f, g = f + 2.0, g - 2.0
    found = certify(operator, f, g, EPSILON, updated=g)
    size, spread = float(a @ f.abs() + b @ g.abs()), operator.costs.spread
    additions = (sum(operator.shape) + 16) * 2.0**-53 * (size + EPSILON)
    rounding = relative * EPSILON + additions
    assert found.bounds[0] == pytest.approx(value - rounding, rel=1e-9)
    kappa = 1 / (1 + relative)
    both, scale = torch.cat((a, b)), torch.tensor(kappa, dtype=torch.float64)
    filling = filling_of(operator, both, both == 0, both, scale)
    paid = kappa * float(a @ f + b @ g + EPSILON * math.log(kappa))
    primal = filled_value(filling._make(map(float, filling)), paid, kappa, EPSILON)
    added = relative * (size + 4 * spread + 2 * EPSILON * (1 - math.log(relative)))
    assert found.bounds[1] == pytest.approx(primal + added + rounding, rel=1e-8)


def test_additions_are_of_the_size_of_both_potentials() -> None:
    """At 1e9 and -1e9 the sums over points are off, where their entries would not be."""
    points, half = torch.zeros(2, 1).double(), masses(1, 1)
    operator = Summed(cost_between(points, points.clone(), half, half.clone()), torch.float64)
    large = torch.full((2,), 1e9, dtype=torch.float64)
    found = certify(operator, large, -large, EPSILON, updated=-large)
    additions = (4 + 16) * 2.0**-53 * (2e9 + EPSILON)
    rounding = Summed.share * EPSILON + additions
    assert found.value - found.bounds[0] == pytest.approx(rounding, rel=1e-3)


@pytest.mark.parametrize(
    ("columns", "passes"),
    [
        pytest.param((1.0, 1.0), 1, id="exact"),
        pytest.param((1.0, 0.5), 1, id="too small"),
        pytest.param((1.25, 0.73), 3, id="one too large"),
        pytest.param((1.001, 0.999), 3, id="one a little too large"),
    ],
)
def test_a_plan_whose_columns_are_too_large_is_corrected_by_exact_sums(
    columns: tuple[float, float], passes: int
) -> None:
    """One pass is enough where scaling the plan down costs little beside what is missing."""
    points, a = torch.zeros(2, 1), masses(1, 1)
    cost = cost_between(points, points.clone(), a, a.clone())
    g = EPSILON * torch.tensor(columns).log()
    found = certify(StreamedOperator(cost, torch.float32), torch.zeros(2), g, EPSILON, updated=g)
    assert found.passes == passes
    assert found.bounds[0] <= 0 <= found.bounds[1]
    if columns == (1.0, 1.0):
        assert found.bounds[1] - found.bounds[0] < 1e-6


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
@pytest.mark.parametrize(("own", "operations", "launches"), [(False, 140, 3), (True, 95, 2)])
def test_what_a_certificate_asks_of_a_device(
    own: bool, operations: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all that is found once is known: it reads once, with few operations and launches."""
    draw, epsilon = torch.Generator().manual_seed(0), 4.0
    x, y = (torch.randn(count, 8, generator=draw) for count in (48, 33))
    a, b = (torch.full((len(side),), 1 / len(side), dtype=torch.float64) for side in (x, y))
    labels = [torch.arange(len(side)) % 2 for side in (x, y)]
    table = torch.ones(2, 2, dtype=torch.float64).fill_diagonal_(0)
    cost = LabelledCost(
        *((x, x, a, a) if own else (x, y, a, b)),
        labels_x=labels[0],
        labels_y=labels[0 if own else 1],
        class_costs=table,
        lambda_x=0.5,
    )
    dense = reference.dense_cost(*cost.points, 0.5, table, *cost.labels)
    _, f, g = reference.entropic_transport(dense, cost.a, cost.b, epsilon)
    operator, f, g = KernelOperator(cost, "high"), f.float(), g.float()
    prove = (
        partial(certify_self, operator, (f + g) / 2, epsilon)
        if own
        else partial(certify, operator, f, g, epsilon, updated=g)
    )
    prove()
    with OperationCounts(monkeypatch) as counts:
        found = prove()
    assert found.passes == 1
    assert 0.8 * operations <= counts.operations <= operations
    assert sum(counts.launches.values()) == launches
    assert counts.reads == 1
