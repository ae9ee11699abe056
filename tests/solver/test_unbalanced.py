"""Transport with relaxed marginals: values, bounds wherever a solve stops, closed forms, limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from refusals import Refusals
from spying import calls_of
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.engine.few_problems import FewVectors
from otdd_flash.formulas.decision import CROSS, SELF
from otdd_flash.formulas.evidence import CostNumbers, PassErrors, evaluate_cross
from otdd_flash.formulas.marginals import (
    LEAST_MOVING,
    Constraints,
    Exact,
    Marginal,
    RelaxedByKL,
)
from otdd_flash.operators.base import Marginals
from otdd_flash.operators.given_costs import matrix_operator
from otdd_flash.operators.one_problem import OneTorchProblem, problem_of
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver import solve
from otdd_flash.solver.certificate import (
    MOST_UNMOVED,
    Certificate,
    CrossNumbers,
    _sizes,
    certify,
    certify_self,
    check_moving,
    cross_evidence,
    cross_plan,
    read_numbers,
)
from otdd_flash.solver.evidence import Filling, filled_value
from otdd_flash.solver.solve import solve_term
from otdd_flash.solver.term import TransportTerm
from tests.tiers import slow

INFINITY = math.inf
Term = tuple[Tensor, Tensor, tuple[float, float], float]


def marginal(rho: float) -> Marginal:
    return Exact() if rho == INFINITY else RelaxedByKL(rho)


class Problem:
    """A random cost with masses over three orders, epsilon and penalties over seven."""

    def __init__(self, seed: int, most: int = 24) -> None:
        self.draw = draw = torch.Generator().manual_seed(seed)
        n, m = (1 + int(torch.randint(most, (1,), generator=draw)) for _ in range(2))
        x, y = (torch.randn(k, 2, generator=draw).double() for k in (n, m))
        self.x, self.y, self.cost = x, y + 1, torch.cdist(x, y + 1).square() / 2
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

    def cross(self) -> Term:
        """Cost, masses of the columns, penalties and value."""
        return self._term(self.cost, self.b, self.rho)

    def own(self) -> Term:
        """Likewise of x with itself, at the smaller penalty."""
        return self._term(torch.cdist(self.x, self.x).square() / 2, self.a, (min(self.rho),) * 2)

    def _term(self, cost: Tensor, b: Tensor, rho: tuple[float, float]) -> Term:
        truth, *_ = reference.unbalanced_transport(cost, self.a, b, self.epsilon, rho)
        return cost, b, rho, truth


def assert_proved(found: Certificate | TransportTerm, problem: Problem, given: Term) -> None:
    (cost, b, rho, truth), (low, high) = given, found.bounds
    slack = 1e-11 * abs(truth)
    assert low - slack <= truth <= high + slack
    f, g = found.f.double(), found.g.double()
    plan = reference.plan(cost, problem.a, b, f, g, problem.epsilon)
    if float(plan.sum()) < LEAST_MOVING:
        # Relative to a mass that underflows no error is known.
        assert found.marginal_error == 1 / LEAST_MOVING
        return
    owed = problem.a * (-f / rho[0]).exp(), b * (-g / rho[1]).exp()
    errors = (float((plan.sum(1 - k) - owed[k]).abs().sum()) for k in (0, 1))
    assert max(errors) / float(plan.sum()) <= found.marginal_error * (1 + 1e-9) + 1e-12


STOPS = [
    otdd.Converged(max_iterations=1),
    otdd.Converged(max_iterations=4),
    otdd.Converged(),
    otdd.Converged(1e-8),
]


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("seeds", "own"),
    [
        *((range(20), False), (range(15), True)),
        *((range(20, 200), False), (range(200, 500), False), (range(15, 150), True)),
    ],
)
def test_bounds_hold_wherever_a_solve_stops(seeds: range, own: bool) -> None:
    for seed in seeds:
        problem = Problem(seed)
        cost, b, rho, _ = given = problem.own() if own else problem.cross()
        form = (SELF if own else CROSS)._replace(constraints=Constraints(*map(marginal, rho)))
        operator = matrix_operator(cost, problem.a, b)
        for options in STOPS:
            term = solve_term(operator, problem.epsilon, options, form)
            assert_proved(term, problem, given)
            assert own or term.converged or options.max_iterations <= 4


def long_error(
    term: TransportTerm,
    cost: np.ndarray,
    masses: Sequence[Tensor],
    epsilon: float,
    penalties: Sequence[float | None],
) -> float:
    """The marginal error of the potentials that a term returns, computed in long double."""
    long = np.longdouble
    a, b, f, g = (part.double().numpy().astype(long) for part in (*masses, term.f, term.g))
    plan = a[:, None] * b * np.exp((f[:, None] + g - cost) / long(epsilon))
    sides = zip((a, b), (f, g), (plan.sum(1), plan.sum(0)), penalties, strict=True)
    errors = (
        np.abs(sums - (mass if rho is None else mass * np.exp(-potential / long(rho)))).sum()
        for mass, potential, sums, rho in sides
    )
    return float(max(errors) / plan.sum())


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
@pytest.mark.slow(after=1)
@pytest.mark.parametrize("precision", ["fast", "high", "double"])
@pytest.mark.parametrize("seeds", [range(60), range(60, 400)])
def test_no_marginal_error_is_below_that_of_the_potentials_returned(
    seeds: range, precision: otdd.Precision
) -> None:
    compute = otdd.ComputeOptions(device="cpu", precision=precision)
    found = 0
    for seed in seeds:
        # Single pairs, whose masses hide no sign of an error, and clouds.
        problem = Problem(seed, 1 if seed % 3 == 0 else 12)
        x, y = problem.x.float(), problem.y.float()
        penalties = [None if rho == INFINITY else rho for rho in problem.rho]
        options = otdd.Converged(max_iterations=(1, 2, 4, 10_000, 10_000)[seed % 5])
        given = {"epsilon": problem.epsilon, "compute": compute, "options": options}
        long_x, long_y = x.numpy().astype(np.longdouble), y.numpy().astype(np.longdouble)
        cost = ((long_x[:, None] - long_y) ** 2).sum(-1) / 2
        uniform = [torch.full((k,), 1 / k, dtype=torch.float64) for k in cost.shape]
        terms = [(otdd.sinkhorn(x, y, unbalanced=penalties, **given), cost, uniform, penalties)]
        matrix = torch.tensor(cost.astype(np.float32))
        masses = [problem.a, problem.b]
        term = otdd.matrix_transport(matrix, *masses, unbalanced=penalties, **given).term
        terms.append((term, matrix.numpy().astype(np.longdouble), masses, penalties))
        if penalties[0] is not None:
            both = otdd.sinkhorn_divergence(x, y, unbalanced=penalties[0], **given)
            cost = ((long_x[:, None] - long_x) ** 2).sum(-1) / 2
            terms.append((both.xx, cost, [uniform[0]] * 2, [penalties[0]] * 2))
        for term, *others in terms:
            if term.mass >= LEAST_MOVING:
                truth = long_error(term, others[0], others[1], problem.epsilon, others[2])
                assert truth <= term.marginal_error, seed
                found += 1
    assert found > 2 * len(seeds)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seeds", [range(20), range(20, 1000)])
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
        at, cross, own = (operator, f, g, problem.epsilon), problem.cross(), problem.own()
        for updated in (None, g):
            found = refusals.outcome(partial(certify, *at, updated, problem.constraints))
            if found is not None:
                assert_proved(found, problem, cross)
        cost, a, rho, _ = own
        at = matrix_operator(cost, a, a), f, problem.epsilon
        found = refusals.outcome(partial(certify_self, *at, Constraints(*map(marginal, rho))))
        if found is not None:
            assert_proved(found, problem, own)
    refusals.check()


@pytest.mark.parametrize("precision", ["fast", "double"])
@pytest.mark.parametrize("rho", [1e-3, 1.0, 1e4, *slow([0.1, 30.0])])
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
        ({"unbalanced": 1e-300}, r"unbalanced=1e-300 .* vanish"),
        ({"unbalanced": 1e300}, r"unbalanced=1e.300 .* leave it out"),
        ({"unbalanced_relative": 1e-40}, r"unbalanced_relative=1e-40 .* vanish"),
        ({"unbalanced": 1.0, "ground": "inner", "labels": "none"}, "ground=inner"),
        ({"unbalanced": 1.0, "solver": otdd.GeomlossSchedule()}, "exact marginals"),
    ],
)
def test_refusals(given: dict[str, object], words: str) -> None:
    x, y = torch.randn(9, 2), torch.randn(8, 2)
    sides = (x, torch.arange(9) % 2), (y, torch.arange(8) % 2)
    with pytest.raises(otdd.InputError, match=words):
        otdd.dataset_distance(*sides, **given)  # type: ignore[arg-type]


POINTS = torch.arange(18.0).reshape(9, 2), torch.arange(16.0).reshape(8, 2)
DATASETS = [otdd.LabeledSamples(each, None, ()) for each in POINTS]


@pytest.mark.parametrize(
    ("function", "arguments", "options"),
    [
        (otdd.dataset_distance, DATASETS, "solver"),
        (otdd.pairwise_distances, [DATASETS], "solver"),
        (otdd.sinkhorn, POINTS, "options"),
        (otdd.sinkhorn_divergence, POINTS, "options"),
        (otdd.matrix_transport, [torch.cdist(*POINTS)], "options"),
    ],
)
@pytest.mark.parametrize("penalty", ["unbalanced", "unbalanced_relative"])
def test_epsilon_0_takes_exact_marginals(
    function: Callable[..., object], arguments: Sequence[object], options: str, penalty: str
) -> None:
    for solver in ({}, {options: otdd.Exact()}):
        with pytest.raises(otdd.InputError, match=r"epsilon=0.* exact marginals; leave out unbal"):
            function(*arguments, epsilon=0, **{penalty: 1.0}, **solver)


@pytest.mark.parametrize(
    ("function", "arguments", "options"),
    [
        (otdd.sinkhorn_loss, POINTS, "options"),
        (otdd.sinkhorn_losses, [each[None] for each in POINTS], "options"),
        (otdd.matrix_loss, [torch.cdist(*POINTS)], "options"),
        (otdd.gradient_flow, DATASETS, "solver"),
    ],
)
def test_losses_and_flows_refuse_epsilon_0_first(
    function: Callable[..., object], arguments: Sequence[object], options: str
) -> None:
    with pytest.raises(otdd.InputError, match="epsilon must be positive"):
        function(*arguments, epsilon=0, unbalanced=1.0)
    with pytest.raises(otdd.InputError, match=r"solver=exact .* exact marginals; leave out unbal"):
        function(*arguments, epsilon=1.0, unbalanced=1.0, **{options: otdd.Exact()})


@pytest.mark.parametrize("rho", [1e-30, 1e-9, 1e14])
def test_the_least_and_the_largest_penalty(rho: float) -> None:
    """Nothing moves for its own sake, or all of the masses does.

    At rho -> 0 the value is epsilon (1 - <a b^T, e^(-C / epsilon)>).
    """
    problem = Problem(5)
    a, b, epsilon, cost = problem.a, problem.b, problem.mean / 5, problem.cost
    found = otdd.matrix_transport(cost, a, b, epsilon=epsilon, unbalanced=rho * problem.mean)
    assert found.converged
    alone = epsilon * (1 - float(a @ (-cost / epsilon).exp() @ b))
    balanced = otdd.matrix_transport(cost, a, b, epsilon=epsilon, options=otdd.Converged(1e-5))
    assert found.value == pytest.approx(alone if rho < 1 else balanced.value, rel=1e-6)


def test_a_row_without_a_partner_costs_its_penalty() -> None:
    """It is refused; a finite cost far above all others says the same."""
    cost = torch.rand(5, 4, generator=torch.Generator().manual_seed(3)).double()
    cost[0] = INFINITY
    with pytest.raises(otdd.InputError, match=r"row 0.* units of the cost"):
        otdd.matrix_transport(cost, epsilon=0.1, unbalanced=1.0)
    a = torch.tensor([0.3, 0.2, 0.2, 0.2, 0.1]).double()
    found = []
    for far in (1e3, 1e6):
        cost[0] = far
        found.append(otdd.matrix_transport(cost, a, epsilon=0.1, unbalanced=1.0))
    assert found[0].value == pytest.approx(found[1].value, rel=1e-9)
    # The row costs rho a_0, and epsilon a_0 in the KL of the plan; the others are as without it.
    f, g = found[1].f[1:], found[1].g
    b = torch.full((4,), 0.25).double()
    plan = reference.plan(cost[1:], a[1:], b, f, g, 0.1)
    others = a[1:] @ -torch.expm1(-f) + b @ -torch.expm1(-g) + 0.1 * (0.7 - plan.sum())
    assert found[1].value == pytest.approx(0.3 * 1.1 + float(others), rel=1e-6)


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


# What the iterations decide by, and what bounds are made of.


@pytest.mark.parametrize("seed", range(6))
def test_the_numbers_of_an_evaluation(seed: int) -> None:
    """Dual value, gain of the columns' update and marginal error are those of dense plans."""
    problem = Problem(seed)
    operator = matrix_operator(problem.cost, problem.a, problem.b)
    form = CROSS._replace(constraints=problem.constraints)
    one = problem_of(operator, form)
    assert isinstance(one, OneTorchProblem)
    g = torch.randn(len(problem.b), generator=problem.draw).double() * problem.epsilon
    vectors = FewVectors(one, g[None])
    (found,) = vectors.evaluate([problem.epsilon], [True])
    assert vectors.rows is not None
    f, epsilon, rho = vectors.rows[0], problem.epsilon, problem.rho
    masses = problem.cost, problem.a, problem.b
    damping = [1 / (1 + epsilon / each) for each in rho]
    expected = damping[0] * reference.softmin_rows(problem.cost, problem.b, g, epsilon)
    torch.testing.assert_close(f, expected)
    updated = damping[1] * reference.softmin_rows(problem.cost.T, problem.a, f, epsilon)
    t = reference.translation(problem.a, problem.b, f, updated, rho)
    torch.testing.assert_close(vectors._fresh[0], updated - t - g)
    before, after = (
        float(reference.unbalanced_dual(*masses, f, each, epsilon, rho)) for each in (g, updated)
    )
    zero = PassErrors(*[0.0] * 9)
    evidence = evaluate_cross(CostNumbers(1.0, 1.0, 0.0, zero, 0.0, 0.0), found, epsilon)
    assert evidence.dual == pytest.approx(before, rel=1e-10)
    assert evidence.gain == pytest.approx(after - before, rel=1e-6, abs=1e-12 * abs(before))
    columns = reference.plan(*masses, f, g, epsilon).sum(0)
    owed = problem.b * (-g / rho[1]).exp()
    assert found.gap == pytest.approx(float((columns - owed).abs().sum() / owed.sum()), rel=1e-9)
    assert evidence.upper == INFINITY


@pytest.mark.parametrize("mass", [1e-3, 0.4, 1.0, 3.0])
def test_a_filled_plan_of_any_mass(mass: float) -> None:
    """The bound is attained where what is filled in is in proportion to the plan."""
    draw, epsilon, cost, share = torch.Generator().manual_seed(0), 0.3, 1.7, 0.6
    a, b, p, q = (torch.rand(k, generator=draw).double() + 0.1 for k in (5, 4, 5, 4))
    a, b, p, q = (each / each.sum() for each in (a, b, p, q))
    f = epsilon * (share * mass * p / a).log()
    g = epsilon * (q / b).log() + cost
    filling = Filling(
        (1 - share) * mass,
        (1 - share) * mass,
        cost * ((1 - share) * mass) ** 2,
        float(torch.xlogy(p, (1 - share) * mass * p / a).sum() * (1 - share) * mass)
        + float(torch.xlogy(q, (1 - share) * mass * q / b).sum() * (1 - share) * mass),
    )
    paid = float(share * mass * (p @ f + q @ g))
    found = filled_value(filling, paid, share * mass, epsilon, mass)
    whole = mass * p[:, None] * q
    exact = INFINITY, INFINITY
    costs = torch.full((5, 4), cost, dtype=torch.float64)
    truth = reference.unbalanced_primal(costs, a, b, whole, epsilon, exact)
    assert found == pytest.approx(float(truth), rel=1e-12)


def drawn() -> tuple[torch.Generator, Tensor, Tensor, Tensor]:
    """Masses of six rows and five columns and a cost, and what draws more."""
    draw = torch.Generator().manual_seed(4)
    a, b = (torch.rand(k, generator=draw).double() + 0.2 for k in (6, 5))
    return draw, a / a.sum(), b / b.sum(), torch.rand(6, 5, generator=draw).double()


@pytest.mark.parametrize("rows", [0.3, INFINITY])
def test_the_upper_bound_is_the_cost_of_a_plan(rows: float) -> None:
    """Of the plan that is filled up, where moving mass anywhere would cost far more."""
    draw, a, b, cost = drawn()
    epsilon, cost[0, 0] = 0.5, 1e3
    rho = (rows, 0.4 if rows == INFINITY else INFINITY)
    constraints = Constraints(*map(marginal, rho))
    f, g = (0.3 * torch.randn(k, generator=draw).double() for k in (6, 5))
    # So far off that what the relaxed side owes has to shrink to the other's mass.
    g = g + (0.0 if rows == INFINITY else 1.5)
    operator = matrix_operator(cost, a, b)
    plan = cross_plan(operator, f, g, epsilon, constraints, accurate=True)
    evidence = cross_evidence(operator, plan, epsilon)
    numbers = read_numbers(CrossNumbers, evidence.numbers.tolist())
    coupling = reference.plan(cost, a, b, f, g, epsilon)
    p = a * (-evidence.f / rho[0]).exp()
    q = b * (-evidence.g / rho[1]).exp()
    assert float(p.sum()) == pytest.approx(float(q.sum()), rel=1e-12)
    kept = numbers.kappa * numbers.penalties.fit * coupling
    u, v = p - kept.sum(1), q - kept.sum(0)
    assert min(float(u.min()), float(v.min())) > -1e-12
    filled = kept + u[:, None] * v / u.sum()
    truth = float(reference.unbalanced_primal(cost, a, b, filled, epsilon, rho))
    # Without the bound by the plan whose exact side alone is updated.
    others = numbers._replace(penalties=numbers.penalties._replace(primal=INFINITY))
    upper = others.upper(operator.costs, evidence.sums, epsilon)
    assert numbers.upper(operator.costs, evidence.sums, epsilon) == numbers.penalties.primal < upper
    assert truth <= upper + 1e-9 * abs(truth)
    assert float(numbers.penalties.fit) < 0.9
    # Each of both parts by itself, and what their mixture may cost beside.
    parts = kept, u[:, None] * v / u.sum()
    mixed = sum(float(part.sum() * (part.sum() / p.sum()).log()) for part in parts)
    alone = sum(
        float((part * cost + epsilon * torch.xlogy(part, part / (a[:, None] * b))).sum())
        for part in parts
    )
    paid = sum(
        float(each * (torch.xlogy(s, s / w) - s + w).sum())
        for each, s, w in ((rho[0], p, a), (rho[1], q, b))
        if each < INFINITY
    )
    expected = alone - epsilon * mixed + epsilon * (1 - float(p.sum())) + paid
    assert upper == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("rows", [0.3, INFINITY])
def test_beside_an_exact_side_the_primal_value_bounds_that_of_the_updated_plan(rows: float) -> None:
    (draw, a, b, cost), epsilon = drawn(), 0.5
    rho = (rows, 0.4 if rows == INFINITY else INFINITY)
    f, g = (0.3 * torch.randn(k, generator=draw).double() for k in (6, 5))
    for step in range(4):
        plan = reference.plan(cost, a, b, f, g, epsilon)
        both, potentials = [plan.sum(1), plan.sum(0)], [f, g]
        given = [a, b], both, potentials, epsilon, 1e-15, 0.0
        bound, _ = Constraints(*map(marginal, rho)).primal(*given)
        exact = int(rows < INFINITY)
        factors = ((a, b)[exact] / both[exact]).unsqueeze(1 - exact)
        truth = reference.unbalanced_primal(cost, a, b, plan * factors, epsilon, rho)
        assert float(truth) <= float(bound) * (1 + 1e-12)
        if step > 2:
            assert float(bound) == pytest.approx(float(truth), rel=1e-4)
        f = -epsilon * (b.log() + (g - cost) / epsilon).logsumexp(1)
        f = f * (1 if rows == INFINITY else rows / (rows + epsilon))
        g = -epsilon * (a.log()[:, None] + (f[:, None] - cost) / epsilon).logsumexp(0)
        g = g * (1 if rho[1] == INFINITY else rho[1] / (rho[1] + epsilon))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("own", [False, True])
def test_bounds_allow_for_errors_of_costs(sign: int, own: bool) -> None:
    """Of a plan of other costs, as far off as they may be: so far that first orders do not do."""
    draw, epsilon, rho = torch.Generator().manual_seed(7), 0.2, 0.5
    x = torch.randn(9, 2, generator=draw).double()
    y = x if own else torch.randn(7, 2, generator=draw).double()
    a, b = (torch.full((len(each),), 1 / len(each)).double() for each in (x, y))
    cost, off = torch.cdist(x, y).square(), 0.2 * epsilon
    given = matrix_operator(cost + 2 * sign * off, a, b)

    class OffBy:
        """A cost whose sums are those of another."""

        passes, costs, a, b = given.passes, given.costs, given.a, given.b
        expected_costs = staticmethod(given.expected_costs)

        def marginals(self, *at: object, **settings: object) -> Marginals:
            sums = given.marginals(*at, **settings)  # type: ignore[arg-type]
            rows, columns = sums.row_errors + off, sums.column_errors + off
            return sums._replace(row_errors=rows, column_errors=columns)

    same = Constraints(RelaxedByKL(rho), RelaxedByKL(rho))
    truth, f, g = reference.unbalanced_transport(cost, a, b, epsilon, (rho, rho))
    _, near_f, near_g = reference.unbalanced_transport(
        cost + 2 * sign * off, a, b, epsilon, (rho, rho)
    )
    for one, other in ((f, g), (near_f, near_g)):
        if own:
            found = certify_self(OffBy(), (one + other) / 2, epsilon, same)  # type: ignore[arg-type]
        else:
            found = certify(OffBy(), one, other, epsilon, other, same)  # type: ignore[arg-type]
        assert found.bounds[0] <= truth <= found.bounds[1]
        # What is lost by the errors is not much more than they are.
        assert found.bounds[1] - found.bounds[0] < 12 * off


def test_costs_of_little_mass_are_bounded() -> None:
    """Sizes bound <|C|, P> of plans that move 1e-9 and less, where all exponents are negative."""
    for exponent in (-0.5, -3.0, -20.0, -200.0):
        a, b = (torch.full((k,), 1 / k).double() for k in (3, 2))
        cost = torch.full((3, 2), -exponent).double()
        operator, zero = matrix_operator(cost, a, b), torch.zeros(3).double()
        coupling = reference.plan(cost, a, b, zero, zero[:2], 1.0)
        rows, columns = coupling.sum(1), coupling.sum(0)
        relaxed = Constraints(RelaxedByKL(1.0), RelaxedByKL(1.0))
        x, y = _sizes(operator, zero, zero[:2], rows, 1.0, relaxed)
        assert float((cost * coupling).sum()) <= float(rows @ x + columns @ y)


def test_intervals_of_no_penalty_are_those_of_exact_marginals() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 2, generator=draw), torch.randn(60, 2, generator=draw)
    given = {"count": 39, "size": 12, "epsilon": 0.5, "seed": 1, "labels": "none"}
    exact = otdd.subsample_interval(x, y, 1.0, **given)
    assert otdd.subsample_interval(x, y, 1.0, unbalanced=[None, None], **given) == exact
    relaxed = otdd.subsample_interval(x, y, 1.0, unbalanced=[None, 1.0], debias=False, **given)
    assert relaxed.values != exact.values


@pytest.mark.parametrize("relative", [0.1, 10.0, 1e12, *slow([1.0, 100.0, 1e3, 1e4])])
def test_penalties_take_few_more_iterations(relative: float) -> None:
    """At most 1.5 times those of exact marginals, in all of eight problems.

    Not of as many points of equal masses on both sides: where epsilon is so small that a plan is
    nearly a permutation, many potentials will do for exact marginals, and one for relaxed ones.
    """
    taken = {None: 0, relative: 0}
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(k, 3, generator=draw).double() for k in (40, 47))
        cost = torch.cdist(x, y + 1).square() / 2
        for epsilon in (0.01, 0.002):
            for penalty in taken:
                given = {"epsilon_relative": epsilon, "unbalanced_relative": penalty}
                taken[penalty] += otdd.matrix_transport(cost, **given).term.iterations
    assert taken[relative] <= 1.5 * taken[None], taken


@pytest.mark.parametrize("rho", [(0.3, 0.3), (0.3, INFINITY), (INFINITY, 0.3), (2.0, 0.1)])
@pytest.mark.parametrize("t", [-0.2, 0.0, 0.4])
def test_a_translated_update_is_taken_back(rho: tuple[float, float], t: float) -> None:
    (draw, a, b, cost), epsilon = drawn(), 0.5
    constraints = Constraints(*map(marginal, rho))
    b[2], b[3] = 0, b[2] + b[3]
    operator = matrix_operator(cost, a, b)
    g = 0.3 * torch.randn(5, generator=draw).double()
    f = constraints.rows.updated(operator.softmin_rows(g, epsilon), epsilon)
    updated = constraints.columns.updated(operator.softmin_columns(f, epsilon), epsilon)
    found = constraints.untranslated(a, f, b, g, updated - t, epsilon)
    torch.testing.assert_close(found, updated, rtol=1e-6, atol=1e-6)
    # So no column has too much mass, and one evaluation is enough.
    assert certify(operator, f, g, epsilon, updated - t, constraints).passes == 1


def test_small_relaxed_problems_are_solved_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve_again(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("otdd_flash.solver.solving.solve_divergence", solve_again)
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(k, 8, generator=draw) for k in (20, 25))
    for rho in (0.3, 1.0, 8.0):
        assert float(otdd.sinkhorn_loss(x, y, epsilon=0.5, unbalanced=rho)) > 0


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
@pytest.mark.parametrize(("seed", "one_exact"), [(52, True), (71, False)])
def test_a_stop_before_any_mass_moves_has_bounds(seed: int, one_exact: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    cost = torch.rand(4, 3, generator=draw).double()
    rho, epsilon = (float(10 ** (-torch.rand(1, generator=draw) * most)) for most in (5.0, 4.0))
    given = {"epsilon": epsilon, "unbalanced": [rho, None] if one_exact else rho}
    found = otdd.matrix_transport(cost, **given, options=otdd.Converged(max_iterations=1))
    assert found.marginal_error > 1e200
    assert not found.converged
    # Without an exact side all mass is left, also at the end.
    truth = otdd.matrix_transport(cost, **given).value if one_exact else 2 * rho + epsilon
    assert 0 <= found.bounds[0] <= truth <= found.bounds[1] <= cost.max() * (1 + 1e-12)
    assert found.bounds[0] <= found.value <= found.bounds[1]


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
@pytest.mark.parametrize("precision", ["fast", "double"])
def test_a_plan_that_moves_nothing_is_refused_once_it_is_solved(precision: otdd.Precision) -> None:
    """In float32, where small problems are solved side by side, as alone in float64."""
    x, y = torch.zeros(3, 2), torch.full((2, 2), 4.0) + torch.eye(2)
    compute = otdd.ComputeOptions(device="cpu", precision=precision)
    given = {"epsilon": 0.01, "unbalanced": 0.005, "compute": compute}
    found = otdd.sinkhorn(x, y, **given, options=otdd.Converged(max_iterations=1))
    assert not found.converged
    assert found.marginal_error == 1 / LEAST_MOVING
    assert found.bounds[0] <= 0.02 <= found.bounds[1] < math.inf
    taken: list[int] = []
    with pytest.raises(otdd.InputError, match="no mass moves"):
        otdd.sinkhorn(x, y, **given, progress=lambda name, taking, _: taken.append(taking))
    assert max(taken) <= MOST_UNMOVED


def test_passes_of_the_bound_of_the_mass_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two before the first iteration, where the costs leave open whether mass moves."""
    names = "softmin_rows", "softmin_columns", "marginals"
    calls = [calls_of(monkeypatch, TorchOperator, name) for name in names]
    cost = torch.tensor([[6.0, 60.0], [60.0, 6.0]]).double()
    found = otdd.matrix_transport(
        cost, epsilon=0.01, unbalanced=0.02, options=otdd.Converged(1e-6, 200)
    )
    assert found.term.passes == sum(map(len, calls))


OWN = [[16.0, 16.5, 16.2], [16.5, 16.3, 16.4], [16.2, 16.4, 16.1]]


@pytest.mark.parametrize(
    ("costs", "b", "epsilon", "unbalanced", "own"),
    [
        # Light columns are nearer, but too light: what their sums cost counts as well.
        ([[4.42, 18.6, 2.36]], [1e-38, 1.0, 1e-203], 3e-4, 2e-3, None),
        # The mean leaves forbidden pairs out.
        (
            [[INFINITY, INFINITY, 10.0], [10.1, 10.2, INFINITY]],
            [1e-200, 1.0, 1e-200],
            0.001,
            0.006,
            None,
        ),
        (torch.full((3, 1), 0.01).tolist(), [1.0], 0.01, 0.005, OWN),
    ],
)
def test_what_moves_nothing_is_refused_early_of_any_masses_and_pairs(
    costs: list[list[float]],
    b: list[float],
    epsilon: float,
    unbalanced: float,
    own: list[list[float]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = calls_of(monkeypatch, solve, "check_moving")
    with pytest.raises(otdd.InputError, match="no mass moves"):
        otdd.matrix_loss(
            torch.tensor(costs, dtype=torch.float64),
            None,
            torch.tensor(b, dtype=torch.float64) / sum(b),
            epsilon=epsilon,
            unbalanced=unbalanced,
            options=otdd.Converged(max_iterations=1000),
            self_costs=own and [torch.tensor(own).double(), torch.zeros(1, 1).double()],
        )
    assert max(iterations for _, _, iterations, *_ in checks) <= MOST_UNMOVED


@pytest.mark.parametrize(
    ("mass", "iterations", "settled", "refused"),
    [
        (0.0, 99, False, False),
        (0.0, 100, False, True),
        (0.0, 3, True, True),
        (1e-259, 100, True, False),
    ],
)
def test_when_a_plan_that_moves_nothing_is_refused(
    mass: float, iterations: int, settled: bool, refused: bool
) -> None:
    f = torch.zeros(1)
    plan = Certificate(f, f, 0.0, (0.0, 1.0), 0.0, 0.0, 1, mass)
    words = "no mass moves.* raise unbalanced or epsilon"
    with pytest.raises(otdd.InputError, match=words) if refused else nullcontext():
        check_moving(plan, 1.0, iterations, settled=settled)


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
@pytest.mark.parametrize("size", [1.0, 1e5, *slow([1e3])])
@pytest.mark.parametrize("most", [2, 10_000, *slow([1])])
def test_potentials_out_of_all_proportion_are_a_start(most: int, size: float) -> None:
    draw = torch.Generator().manual_seed(6)
    cost = torch.rand(6, 5, generator=draw).double()
    for sign in (-1, 1):
        start = {"xy": size * (sign + torch.randn(5, generator=draw).double())}
        for epsilon, rho, exact in product((0.0117, 0.5), (0.098, 0.0074), (None, 0, 1)):
            unbalanced = [None if side == exact else rho for side in (0, 1)]
            given = {"epsilon": epsilon, "unbalanced": unbalanced}
            cold = otdd.matrix_transport(cost, **given)
            options = otdd.Converged(max_iterations=most)
            found = otdd.matrix_transport(cost, **given, start=start, options=options)
            assert found.bounds[0] <= cold.bounds[1]
            assert cold.bounds[0] <= found.bounds[1]
            assert found.converged or most < 10_000


def test_balanced_potentials_are_a_start_in_float32() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 2, generator=draw), torch.randn(15, 2, generator=draw) + 1
    start = {"xy": otdd.sinkhorn(x, y, epsilon=0.1).g}
    for unbalanced in (1e-1, 1e-3):
        given = {"epsilon": 0.1, "unbalanced": unbalanced}
        warm = otdd.sinkhorn_divergence(x, y, **given, start=start)
        cold = otdd.sinkhorn_divergence(x, y, **given)
        assert warm.xy.converged
        assert warm.value == pytest.approx(cold.value, abs=2e-3 * unbalanced)


def test_penalties_beyond_the_digits_of_the_costs_are_refused() -> None:
    cost = torch.rand(5, 4, generator=torch.Generator().manual_seed(3)).double()
    for unbalanced in (1e30, [1e17, None]):
        with pytest.raises(otdd.InputError, match=r"leave unbalanced out.* exact to rounding"):
            otdd.matrix_transport(cost, epsilon=0.1, unbalanced=unbalanced)
    with pytest.raises(otdd.InputError, match="leave unbalanced out"):
        otdd.sinkhorn_divergence(cost, cost + 1, epsilon=0.1, unbalanced=1e18)
    # Pairs that are solved side by side, of which the second has costs to match.
    x, y = (torch.stack((part, 1e4 * part)).float() for part in (cost, cost + 1))
    with pytest.raises(otdd.InputError, match=r"pair 0: a penalty of 1e\+18 .* rounding"):
        otdd.sinkhorn_losses(x, y, epsilon=0.1, unbalanced=1e18)


def test_a_pair_of_penalties_may_be_an_array_and_the_mass_that_moves_is_told() -> None:
    cost = torch.rand(5, 4, generator=torch.Generator().manual_seed(3)).double()
    pair = torch.tensor([0.5, 0.25], dtype=torch.float64)
    found = [
        otdd.matrix_transport(cost, epsilon=0.1, unbalanced=given).mass
        for given in (pair.tolist(), pair, pair.numpy())
    ]
    assert found[0] == found[1] == found[2] < 1
    plan = otdd.matrix_transport(cost, epsilon=0.1, unbalanced=pair).plan()
    assert found[0] == pytest.approx(float(plan.sum()), rel=1e-3)
    assert otdd.matrix_transport(cost, epsilon=0.1).mass == 1
