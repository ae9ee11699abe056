"""Transport with relaxed marginals: values, bounds wherever a solve stops, closed forms, limits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import reference
import torch
from refusals import Refusals
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.formulas.decision import CROSS, SELF
from otdd_flash.formulas.marginals import Constraints, Exact, Marginal, RelaxedByKL
from otdd_flash.operators.given_costs import matrix_operator
from otdd_flash.solver.certificate import Certificate, certify, certify_self
from otdd_flash.solver.solve import solve_term
from otdd_flash.solver.term import TransportTerm

INFINITY = math.inf


def marginal(rho: float) -> Marginal:
    return Exact() if rho == INFINITY else RelaxedByKL(rho)


class Problem:
    """A random cost with masses over three orders, epsilon and penalties over seven."""

    def __init__(self, seed: int, most: int = 24) -> None:
        self.draw = draw = torch.Generator().manual_seed(seed)
        n, m = (1 + int(torch.randint(most, (1,), generator=draw)) for _ in range(2))
        x, y = (torch.randn(k, 2, generator=draw).double() for k in (n, m))
        self.x, self.cost = x, torch.cdist(x, y + 1).square() / 2
        self.a, self.b = self.masses(n), self.masses(m)
        self.mean = float(self.a @ self.cost @ self.b)
        self.epsilon = self.mean * self.power(-2.3, 0.5)
        rho = [self.mean * self.power(-3, 4) for _ in range(2)]
        sides = seed % 4
        if sides < 2:
            rho[sides] = INFINITY
        self.rho = (rho[0], rho[0] if sides == 2 else rho[1])

    def masses(self, count: int) -> Tensor:
        masses = torch.rand(count, generator=self.draw).double() ** 3 + 1e-3
        return masses / masses.sum()

    def power(self, low: float, high: float) -> float:
        return 10 ** (low + (high - low) * float(torch.rand(1, generator=self.draw)))

    @property
    def constraints(self) -> Constraints:
        return Constraints(*map(marginal, self.rho))

    def truth(self) -> float:
        return reference.unbalanced_transport(self.cost, self.a, self.b, self.epsilon, self.rho)[0]

    def self_truth(self, rho: float) -> float:
        cost = torch.cdist(self.x, self.x).square() / 2
        penalties = rho, rho
        return reference.unbalanced_transport(cost, self.a, self.a, self.epsilon, penalties)[0]


def assert_proved(
    found: Certificate | TransportTerm,
    problem: Problem,
    truth: float,
    cost: Tensor,
    b: Tensor,
    rho: tuple[float, float],
) -> None:
    low, high = found.bounds
    slack = 1e-11 * abs(truth)
    assert low - slack <= truth <= high + slack
    f, g = found.f.double(), found.g.double()
    plan = reference.plan(cost, problem.a, b, f, g, problem.epsilon)
    owed = problem.a * (-f / rho[0]).exp(), b * (-g / rho[1]).exp()
    errors = (float((plan.sum(1 - k) - owed[k]).abs().sum()) for k in (0, 1))
    assert max(errors) / float(plan.sum()) <= found.marginal_error * (1 + 1e-9) + 1e-12


STOPS = [
    otdd.Converged(max_iterations=1),
    otdd.Converged(max_iterations=4),
    otdd.Converged(),
    otdd.Converged(1e-8),
]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seeds", [range(20), range(20, 200), range(200, 500)])
def test_bounds_hold_wherever_a_solve_stops(seeds: range) -> None:
    for seed in seeds:
        problem = Problem(seed)
        operator = matrix_operator(problem.cost, problem.a, problem.b)
        truth, form = problem.truth(), CROSS._replace(constraints=problem.constraints)
        for options in STOPS:
            term = solve_term(operator, problem.epsilon, options, form)
            given = truth, problem.cost, problem.b, problem.rho
            assert_proved(term, problem, *given)
            assert term.converged or options.max_iterations <= 4


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seeds", [range(15), range(15, 150)])
def test_bounds_of_self_terms(seeds: range) -> None:
    for seed in seeds:
        problem = Problem(seed)
        rho = min(problem.rho)
        cost = torch.cdist(problem.x, problem.x).square() / 2
        operator, truth = matrix_operator(cost, problem.a, problem.a), problem.self_truth(rho)
        form = SELF._replace(constraints=Constraints(RelaxedByKL(rho), RelaxedByKL(rho)))
        for options in STOPS:
            term = solve_term(operator, problem.epsilon, options, form)
            assert_proved(term, problem, truth, cost, problem.a, (rho, rho))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seeds", [range(40), range(40, 1000)])
def test_bounds_of_any_potentials(seeds: range) -> None:
    """As far from the optimum as a plan can be computed."""
    refusals = Refusals("overflow|no mass moves")
    for seed in seeds:
        problem = Problem(seed, most=5)
        operator = matrix_operator(problem.cost, problem.a, problem.b)
        spread = operator.costs.spread
        f, g = (
            (torch.randn(n, generator=problem.draw).double() * problem.power(-3, 0.3) * spread)
            .clamp_max(200 * problem.epsilon)
            .clamp_min(-200 * min(problem.rho))
            for n in operator.shape
        )
        truth = problem.truth()
        for updated in (None, g):
            found = refusals.outcome(
                lambda updated=updated, problem=problem, f=f, g=g, operator=operator: certify(
                    operator, f, g, problem.epsilon, updated, problem.constraints
                )
            )
            if found is not None:
                assert_proved(found, problem, truth, problem.cost, problem.b, problem.rho)
        rho = min(problem.rho)
        same = Constraints(RelaxedByKL(rho), RelaxedByKL(rho))
        cost = torch.cdist(problem.x, problem.x).square() / 2
        own = matrix_operator(cost, problem.a, problem.a)
        found = refusals.outcome(
            lambda own=own, f=f, problem=problem, same=same: certify_self(
                own, f, problem.epsilon, same
            )
        )
        if found is not None:
            truth = problem.self_truth(rho)
            assert_proved(found, problem, truth, cost, problem.a, (rho, rho))
    refusals.check()


@pytest.mark.parametrize("precision", ["fast", "double"])
@pytest.mark.parametrize("rho", [1e-3, 0.1, 1.0, 30.0, 1e4])
def test_clouds_are_solved_as_densely(rho: float, precision: str) -> None:
    """With labels and masses, and both sides relaxed or one alone."""
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(33, 4, generator=draw), torch.randn(70, 4, generator=draw) + 0.5
    labels = torch.arange(33) % 3, torch.arange(70) % 2
    a, b = (torch.rand(len(side), generator=draw) + 0.1 for side in (x, y))
    table = torch.rand(5, 5, generator=draw).double()
    table = (table + table.T).fill_diagonal_(0)
    sides = [
        otdd.LabeledSamples(points, of, tuple(map(str, range(int(of.max()) + 1))), masses)
        for points, of, masses in zip((x, y), labels, (a, b), strict=True)
    ]
    compute = otdd.ComputeOptions("cpu", precision=precision)
    costs = [
        reference.dense_cost(p, q, 0.5, table[i, j] / 2, k, h)
        for p, q, k, h, i, j in (
            (x, y, *labels, slice(3), slice(3, 5)),
            (x, x, labels[0], labels[0], slice(3), slice(3)),
            (y, y, labels[1], labels[1], slice(3, 5), slice(3, 5)),
        )
    ]
    a, b = (side.masses.double() for side in sides)
    mean = float(a @ costs[0] @ b)
    epsilon, penalty = 0.05 * mean, rho * mean
    found = otdd.sinkhorn_divergence(
        *sides, epsilon=epsilon, class_table=table, unbalanced=penalty, compute=compute
    )
    masses = (a, b), (a, a), (b, b)
    xy, xx, yy = (
        reference.unbalanced_transport(cost, *pair, epsilon, (penalty, penalty))[0]
        for cost, pair in zip(costs, masses, strict=True)
    )
    truth = xy - (xx + yy) / 2
    assert found.bounds[0] - 1e-12 <= truth <= found.bounds[1] + 1e-12
    assert found.bounds[1] - found.bounds[0] <= 2e-3 * abs(truth)
    for penalties in ((penalty, None), (None, penalty)):
        term = otdd.sinkhorn(
            *sides, epsilon=epsilon, class_table=table, unbalanced=penalties, compute=compute
        )
        dense = tuple(INFINITY if each is None else each for each in penalties)
        truth = reference.unbalanced_transport(costs[0], a, b, epsilon, dense)[0]
        assert term.bounds[0] - 1e-12 <= truth <= term.bounds[1] + 1e-12
        assert term.converged


@pytest.mark.parametrize("rho", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 100.0])
def test_two_points(rho: float, epsilon: float) -> None:
    """(epsilon + 2 rho) (1 - e^(-c / (epsilon + 2 rho))) at the cost c."""
    cost, options = torch.tensor([[0.7]], dtype=torch.float64), otdd.Converged(1e-9)
    found = otdd.matrix_transport(cost, epsilon=epsilon, unbalanced=rho, options=options)
    whole = epsilon + 2 * rho
    assert found.value == pytest.approx(-whole * math.expm1(-0.7 / whole), rel=1e-11)
    assert found.term.mass == pytest.approx(math.exp(-0.7 / whole), rel=1e-8)


@pytest.mark.parametrize("rho", [(1e-2, 1e-2), (0.5, 2.0), (100.0, 100.0)])
def test_far_clusters(rho: tuple[float, float]) -> None:
    """Of K clusters of one point a side each moves its own m, in closed form."""
    draw, epsilon = torch.Generator().manual_seed(0), 0.1
    a, b, costs = (torch.rand(6, generator=draw).double() + 0.1 for _ in range(3))
    a, b, whole = a / a.sum(), b / b.sum(), epsilon + sum(rho)
    logs = (epsilon + rho[0]) * a.log() + (epsilon + rho[1]) * b.log() - costs
    mass = (logs / whole).exp().sum()
    cost = torch.full((6, 6), 1e4).double()
    cost.diagonal().copy_(costs)
    options = otdd.Converged(1e-8)
    found = otdd.matrix_transport(cost, a, b, epsilon=epsilon, unbalanced=rho, options=options)
    assert found.converged
    assert found.term.mass == pytest.approx(float(mass), rel=1e-7)
    assert found.value == pytest.approx(float(whole * (1 - mass)), rel=1e-8)
    # They may as well be forbidden: every plan of the other pairs is admissible.
    forbidden = torch.where(torch.eye(6) > 0, cost, INFINITY)
    found = otdd.matrix_transport(forbidden, a, b, epsilon=epsilon, unbalanced=rho, options=options)
    assert found.bounds[0] <= float(whole * (1 - mass)) <= found.bounds[1] < INFINITY


def test_without_a_penalty_nothing_moves_for_its_own_sake() -> None:
    """At rho -> 0 the value is epsilon (1 - <a b^T, e^(-C / epsilon)>)."""
    problem = Problem(5)
    a, b, epsilon = problem.a, problem.b, problem.mean / 5
    found = otdd.matrix_transport(
        problem.cost, a, b, epsilon=epsilon, unbalanced=1e-9 * problem.mean
    )
    limit = epsilon * (1 - float(a @ (-problem.cost / epsilon).exp() @ b))
    assert found.value == pytest.approx(limit, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_large_penalty_is_an_exact_marginal(seed: int) -> None:
    problem = Problem(seed)
    given = problem.cost, problem.a, problem.b
    options = otdd.Converged(1e-9)
    exact = otdd.matrix_transport(*given, epsilon=problem.epsilon, options=options)
    for penalties in (1e9, [1e9, None], [None, 1e9]):
        found = otdd.matrix_transport(
            *given, epsilon=problem.epsilon, unbalanced_relative=penalties, options=options
        )
        assert found.value == pytest.approx(exact.value, rel=2e-8)
        assert found.term.mass == pytest.approx(1, abs=2e-8)


def test_of_a_cloud_and_itself() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=draw)
    given = {"epsilon": 0.1, "unbalanced": 0.5}
    assert otdd.sinkhorn_divergence(x, x.clone(), **given).bounds == (0, 0)
    low, high = otdd.sinkhorn_divergence(x, x.flip(0), **given).bounds
    assert low <= 0 <= high
    assert high - low < 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_it_is_positive_without_labels(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for rho in (0.01, 1.0, 100.0):
        x, y = (torch.randn(n, 2, generator=draw) for n in (30, 20))
        assert otdd.sinkhorn_divergence(x, y, epsilon=0.5, unbalanced=rho).bounds[1] > 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"unbalanced": 1.0, "unbalanced_relative": 1.0}, "one of them"),
        ({"unbalanced": [1.0, 2.0]}, "debias=false"),
        ({"unbalanced": [1.0, None]}, "debias=false"),
        ({"unbalanced": 0.0}, "positive"),
        ({"unbalanced": [1.0]}, "list of 2"),
        ({"unbalanced": "1"}, "number"),
        ({"unbalanced": 1.0, "ground": "inner", "labels": "none"}, "ground=inner"),
        ({"unbalanced": 1.0, "solver": otdd.GeomlossSchedule()}, "exact marginals"),
    ],
)
def test_refusals(given: dict[str, object], words: str) -> None:
    x, y = torch.randn(9, 2), torch.randn(8, 2)
    sides = (x, torch.arange(9) % 2), (y, torch.arange(8) % 2)
    with pytest.raises(otdd.InputError, match=words):
        otdd.dataset_distance(*sides, **given)  # type: ignore[arg-type]


def test_where_no_mass_moves_is_said() -> None:
    with pytest.raises(otdd.InputError, match="no mass moves"):
        otdd.matrix_transport(torch.full((3, 2), 1e4), epsilon=1.0, unbalanced=1.0)


def test_results_keep_their_penalties(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=draw), torch.randn(30, 3, generator=draw)
    sides = (x, torch.arange(40) % 3), (y, torch.arange(30) % 2)
    found = otdd.dataset_distance(*sides, unbalanced=[0.5, None], debias=False)
    found.save(tmp_path)
    loaded = otdd.DistanceResult.load(tmp_path)
    assert loaded.constraints == found.constraints == Constraints(RelaxedByKL(0.5), Exact())
    assert loaded.divergence.xy.mass == found.divergence.xy.mass
    assert float(loaded.class_coupling().sum()) == pytest.approx(found.divergence.xy.mass, rel=1e-3)
    with pytest.raises(otdd.InputError, match="unmatched"):
        loaded.contributions()
    cost = torch.rand(5, 4)
    transport = otdd.matrix_transport(cost, epsilon=0.1, unbalanced=0.2)
    transport.save(tmp_path / "matrix")
    again = otdd.MatrixTransport.load(tmp_path / "matrix", cost)
    torch.testing.assert_close(again.f, transport.f)
    torch.testing.assert_close(again.plan(), transport.plan())


def test_costs_that_are_off_widen_bounds_by_the_mass_that_moves() -> None:
    term = otdd.sinkhorn(torch.zeros(1, 1), torch.ones(1, 1), epsilon=1.0, unbalanced=1.0)
    low, high = term.bounds
    wide = term.widened(0.5)
    assert wide.bounds[0] <= low - 0.5
    assert wide.bounds[1] >= high + 0.5
    assert replace(term, mass=4.0).widened(0.5).bounds[1] == pytest.approx(high + 2)
