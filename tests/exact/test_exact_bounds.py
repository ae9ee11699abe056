"""The interval of exact transport holds the true value, for any problem and after any round."""

import itertools
import math
import warnings
from fractions import Fraction

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from spying import calls_of

import otdd_flash as otdd
from otdd_flash.operators.given_costs import matrix_operator
from otdd_flash.solver.exact import pricing, program, solve
from otdd_flash.solver.exact.bounds import common_rounding, marginals_of, upper_bound

# Of the truth, which POT computes in float64, over the largest cost.
TRUTH = 1e-11


@pytest.fixture
def few_arcs(monkeypatch):
    """Small problems take the way of large ones: entropic potentials, and few arcs at first."""
    monkeypatch.setattr(solve, "FEW_ENTRIES", 0)
    monkeypatch.setattr(solve, "FIRST_ARCS", 2)
    monkeypatch.setattr(solve, "MORE_ARCS", 2)
    monkeypatch.setattr(pricing, "BLOCK_ELEMENTS_CPU", 1 << 10)


def masses_of(kind, size, rng):
    if kind == "equal":
        return np.full(size, 1 / size)
    found = rng.random(size) + 1e-3
    if kind == "zeros" and size > 2:
        found[rng.random(size) < 0.3] = 0
        found[0] += 1
    if kind == "tiny":
        found *= 10.0 ** rng.uniform(-25, 0, size)
    return found / found.sum()


def costs_of(kind, n, m, rng):
    if kind == "grid":
        x, y = (rng.integers(0, 4, (size, 2)) for size in (n, m))
        return ((x[:, None] - y) ** 2).sum(2).astype(float)
    x, y = rng.normal(size=(n, 3)), rng.normal(size=(m, 3))
    if kind == "duplicates":
        x, y = x[rng.integers(0, max(1, n // 3), n)], y[rng.integers(0, max(1, m // 3), m)]
    costs = ((x[:, None] - y) ** 2).sum(2)
    if kind == "offset":
        return costs + 1e4 * rng.normal(size=(n, 1)) + 1e4 * rng.normal(size=m) - 3e4
    if kind == "classes":
        return (
            1e-3 * costs
            + 1e3
            * rng.integers(0, 3, (5, 4))[rng.integers(0, 5, n)[:, None], rng.integers(0, 4, m)]
        )
    return costs


KINDS = ("normal", "grid", "duplicates", "offset", "classes")
MASSES = ("random", "tiny", "equal", "zeros")


@pytest.mark.slow(after=20)
@pytest.mark.parametrize(
    ("few", "most"),
    [(False, 60), (True, 60), pytest.param(True, 400, marks=pytest.mark.slow)],
    ids=("all arcs", "few arcs", "hundreds of points"),
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masses", MASSES)
def test_bounds_hold_the_true_value(kind, masses, few, most, request):
    """Ten random problems of up to so many points, solved to the end."""
    if few:
        request.getfixturevalue("few_arcs")
    rng = np.random.default_rng(7 + most)
    for case in range(10):
        n, m = rng.integers(1, most + 1, 2) if case else (most, most)
        n = 3 if case == 1 else n
        costs = costs_of(kind, n, m, rng)
        a, b = masses_of(masses, n, rng), masses_of(masses, m, rng)
        truth = true_value(costs, a, b)
        slack = TRUTH * np.abs(costs).max()
        found = otdd.matrix_transport(costs, a, b, options=otdd.Exact(bound_width=0))
        low, high = found.bounds
        assert low <= truth + slack, (case, n, m)
        assert high >= truth - slack, (case, n, m)
        assert found.stopped_by == "optimal", (case, n, m, high - low)
        assert high - low <= slack, (case, n, m)
        assert low <= found.value <= high
        check_plan(found.term, costs, a, b)


def true_value(costs, a, b):
    """POT's value; it takes no large offsets of rows and columns, which are added back."""
    p = costs.min(1)
    q = (costs - p[:, None]).min(0)
    reduced = np.ascontiguousarray(costs - p[:, None] - q)
    b = b * (a.sum() / b.sum())
    return (a @ p + b @ q + ot.emd2(a, b, reduced, numItermax=10**7)) / a.sum()


def check_plan(term, costs, a, b):
    plan = term.plan()
    assert plan.is_coalesced()
    assert plan.values().numel() <= len(a) + len(b) - 1
    assert bool((plan.values() > 0).all())
    dense = plan.to_dense().numpy()
    assert np.abs(dense.sum(1) - a).sum() <= term.marginal_error + 1e-15
    assert np.abs(dense.sum(0) - b).sum() <= term.marginal_error + 1e-15
    assert term.marginal_error < 1e-12
    assert (dense * costs).sum() == pytest.approx(term.value, abs=1e-11 * np.abs(costs).max())


def exactly(costs, a=None, b=None, **options):
    """The result without a warning where the width is not reached."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otdd.NotConvergedWarning)
        return otdd.matrix_transport(costs, a, b, options=otdd.Exact(**options))


@pytest.mark.parametrize("n", range(1, 8))
def test_assignments_have_the_value_of_the_best_permutation(n):
    rng = np.random.default_rng(n)
    orders = np.array(list(itertools.permutations(range(n))))
    for case in range(20):
        costs = rng.integers(-50, 50, (n, n)) if case % 2 else rng.normal(size=(n, n))
        sums = [
            sum((Fraction(float(costs[i, order[i]])) for i in range(n)), Fraction()) / n
            for order in orders[np.argsort(costs[np.arange(n), orders].sum(1))[:3]]
        ]
        found = otdd.matrix_transport(costs.astype(float), options=otdd.Exact(bound_width=0))
        low, high = found.bounds
        assert Fraction(low) <= min(sums) <= Fraction(high), case
        assert high - low <= 1e-12 * np.abs(costs).max(), case


def rational_value(costs, a, b):
    """The value for masses a / sum a and b / sum b; None if POT's plan has no optimal tree."""
    plan = ot.emd(a, b * (a.sum() / b.sum()), costs, check_marginals=False)
    arcs = [(int(i), int(j)) for i, j in zip(*plan.nonzero(), strict=True)]
    if len(arcs) != len(a) + len(b) - 1:
        return None
    costs = {arc: Fraction(float(costs[arc])) for arc in np.ndindex(costs.shape)}
    left, masses, known = {}, {}, {("row", 0): Fraction(0)}
    for name, side in (("row", a), ("column", b)):
        exact = [Fraction(float(each)) for each in side]
        left |= {(name, place): each / sum(exact) for place, each in enumerate(exact)}
    # Masses from the leaves of the tree, potentials from a row.
    tree = {arc: (("row", arc[0]), ("column", arc[1])) for arc in arcs}
    while len(masses) < len(arcs):
        ends = [end for arc in arcs if arc not in masses for end in tree[arc]]
        leaf = next(end for end in ends if ends.count(end) == 1)
        arc = next(each for each in arcs if each not in masses and leaf in tree[each])
        masses[arc] = left[leaf]
        for end in tree[arc]:
            left[end] -= masses[arc]
    while len(known) < len(left):
        for arc, ends in tree.items():
            for one, other in (ends, ends[::-1]):
                if one in known and other not in known:
                    known[other] = costs[arc] - known[one]
    slack = min(cost - known["row", i] - known["column", j] for (i, j), cost in costs.items())
    if min(masses.values()) < 0 or slack < 0:
        return None
    return sum(masses[arc] * costs[arc] for arc in arcs)


# Where POT's sums differ by rounding it has no plan, and the problem does not count.
@pytest.mark.filterwarnings("ignore:Problem infeasible")
def test_intervals_of_unequal_masses_hold_the_value_in_rational_arithmetic():
    rng, known = np.random.default_rng(11), 0
    for case in range(150):
        n, m = rng.integers(2, 7, 2)
        costs = costs_of(KINDS[case % len(KINDS)], n, m, rng)
        a, b = masses_of(MASSES[case % 3], n, rng), masses_of("random", m, rng)
        truth = rational_value(costs, a, b)
        if truth is not None:
            low, high = exactly(costs, a, b, bound_width=0).bounds
            assert Fraction(low) <= truth <= Fraction(high), case
            known += 1
    assert known > 75


def test_ties_everywhere_and_unequal_sizes_are_solved_to_the_end():
    rng = np.random.default_rng(0)
    costs = rng.integers(0, 3, (300, 300)).astype(float)
    rows, columns = linear_sum_assignment(costs)
    found = otdd.matrix_transport(costs, options=otdd.Exact(bound_width=0))
    assert found.stopped_by == "optimal"
    assert found.value == pytest.approx(costs[rows, columns].mean(), abs=1e-12)
    for n, m in ((2, 3000), (3000, 2), (1, 700), (400, 7)):
        costs = rng.random((n, m))
        found = otdd.matrix_transport(costs, options=otdd.Exact(bound_width=0))
        truth = true_value(costs, np.full(n, 1 / n), np.full(m, 1 / m))
        assert found.value == pytest.approx(truth, abs=1e-12), (n, m)


@pytest.mark.usefixtures("few_arcs")
def test_separable_terms_add_their_means():
    rng = np.random.default_rng(1)
    costs, p, q = rng.random((50, 40)), rng.normal(size=(50, 1)), rng.normal(size=40)
    a, b = rng.dirichlet(np.ones(50)), rng.dirichlet(np.ones(40))
    base, found = (exactly(each, a, b, bound_width=0) for each in (costs, costs + p + q))
    assert found.value == pytest.approx(base.value + a @ p[:, 0] + b @ q, abs=1e-12)
    assert torch.equal(found.plan().indices(), base.plan().indices())


@pytest.mark.usefixtures("few_arcs")
@pytest.mark.parametrize("rounds", range(4))
def test_the_interval_holds_after_any_round(rounds, monkeypatch):
    rng = np.random.default_rng(2)
    stopped = solve._Solve.stopped
    late = lambda self: "max_seconds" if self.rounds >= rounds else stopped(self)  # noqa: E731
    monkeypatch.setattr(solve._Solve, "stopped", late)
    widths = []
    for kind in KINDS:
        costs, a, b = (
            costs_of(kind, 45, 60, rng),
            masses_of("random", 45, rng),
            masses_of("equal", 60, rng),
        )
        low, high = exactly(costs, a, b, bound_width=0, max_seconds=60).bounds
        truth, slack = true_value(costs, a, b), TRUTH * np.abs(costs).max()
        assert low <= truth + slack
        assert high >= truth - slack
        widths.append((high - low) / slack)
    assert rounds > 1 or max(widths) > 1e3


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("masses", MASSES)
def test_rounding_is_within_that_of_costs_as_large_as_the_largest(masses, monkeypatch):
    """`common_rounding` is derived; where no cost is above its scale it always holds."""
    ended = calls_of(monkeypatch, solve._Solve, "term")
    rng = np.random.default_rng(12)
    for case in range(60):
        n, m = rng.integers(1, 40, 2)
        costs = costs_of(KINDS[case % len(KINDS)], n, m, rng)
        exactly(costs, masses_of(masses, n, rng), masses_of("random", m, rng), bound_width=0)
        last = ended[-1][0]
        apart = last.upper.bound.rounding + last.lower.bound.rounding
        most = common_rounding(n + m, np.abs(costs).max(), last.mean_error)
        assert 0.001 * most < apart <= most, case


@pytest.mark.usefixtures("few_arcs")
def test_no_round_gives_up_what_an_earlier_one_proved(monkeypatch):
    rng, ends = np.random.default_rng(3), []
    stopped = solve._Solve.stopped

    def watch(self):
        ends.append((self.lower_end, -self.upper_end))
        return stopped(self)

    monkeypatch.setattr(solve._Solve, "stopped", watch)
    for kind in KINDS:
        costs = costs_of(kind, 80, 90, rng)
        ends.clear()
        exactly(costs, bound_width=0)
        slack = TRUTH * np.abs(costs).max()
        assert len(ends) > 2
        for earlier, later in itertools.pairwise(ends):
            assert later[0] >= earlier[0] - slack
            assert later[1] >= earlier[1] - slack


def test_no_time_leaves_a_plan_and_an_interval():
    costs = np.random.default_rng(3).random((30, 40))
    found = exactly(costs, bound_width=0, max_seconds=1e-9)
    truth = true_value(costs, np.full(30, 1 / 30), np.full(40, 1 / 40))
    assert not found.converged
    assert found.stopped_by == "max_seconds"
    assert found.bounds[0] <= truth <= found.bounds[1]
    check_plan(found.term, costs, np.full(30, 1 / 30), np.full(40, 1 / 40))
    with pytest.raises(
        otdd.ConvergenceError, match=r"within solver.max_seconds=1e-09 in xy: .*wide"
    ):
        otdd.matrix_transport(
            costs, options=otdd.Exact(bound_width=0, max_seconds=1e-9, require_convergence=True)
        )


@pytest.mark.parametrize("kind", ["held", "blocks", "float16"])
def test_forbidden_pairs_are_not_used(kind):
    rng = np.random.default_rng(5)
    costs = torch.from_numpy(rng.random((30, 30)))
    costs[torch.from_numpy(rng.random((30, 30)) < 0.8)] = math.inf
    costs.fill_diagonal_(2.0)
    given = costs.half() if kind == "float16" else costs
    blocks = otdd.CostBlocks(30, 30, lambda rows, columns: costs[rows, columns])
    found = otdd.matrix_transport(blocks if kind == "blocks" else given, epsilon=0)
    rows, columns = linear_sum_assignment(given.double().numpy())
    assert found.value == pytest.approx(given.double().numpy()[rows, columns].mean(), abs=1e-9)
    plan = found.plan().to_dense()
    assert bool((plan[given == math.inf] == 0).all())
    costs[0:2] = math.inf
    costs[0:2, 0] = 1.0
    with pytest.raises(otdd.InputError, match=r"no plan has these masses: 2 rows \(0, 1\)"):
        otdd.matrix_transport(costs, epsilon=0)


@pytest.mark.usefixtures("few_arcs")
@pytest.mark.parametrize("seed", range(3, 9))
def test_forbidden_arcs_of_the_corner_are_given_up(seed, monkeypatch):
    nothing = np.zeros(70), np.zeros(70), 0.0
    monkeypatch.setattr(solve, "first_potentials", lambda *_: nothing)
    rng = np.random.default_rng(seed)
    costs = rng.random((70, 70))
    costs[rng.random((70, 70)) < 0.9] = math.inf
    # The one permutation that is sure to be allowed is far from the cheapest arcs.
    costs[np.arange(70), rng.permutation(70)] = 5.0
    found = otdd.matrix_transport(costs, epsilon=0, options=otdd.Exact(bound_width=0))
    rows, columns = linear_sum_assignment(costs)
    assert found.value == pytest.approx(costs[rows, columns].mean(), abs=1e-12)
    assert found.stopped_by == "optimal"


@pytest.mark.parametrize("block", [1 << 6, 1 << 9, 1 << 20])
def test_a_pass_finds_the_least_reduced_costs(block, monkeypatch):
    monkeypatch.setattr(pricing, "BLOCK_ELEMENTS_CPU", block)
    rng = np.random.default_rng(9)
    n, m, k = 40, 33, 4
    costs, f, g = rng.random((n, m)), rng.normal(size=n), rng.normal(size=m)
    a, b = masses_of("zeros", n, rng), masses_of("zeros", m, rng)
    operator = matrix_operator(torch.from_numpy(costs), torch.from_numpy(a), torch.from_numpy(b))
    wanted = np.array([0, 0, 3, 39]), np.array([5, 32, 0, 1])
    found = pricing.MatrixCosts(operator).price(f, g, k, wanted=wanted)
    reduced = np.where((a > 0)[:, None] & (b > 0), costs - f[:, None] - g, math.inf)
    least = np.zeros((n, m), bool)
    np.put_along_axis(least, np.argsort(reduced, 1)[:, :k], True, 1)
    np.put_along_axis(least, np.argsort(reduced, 0)[:k], True, 0)
    expected = np.nonzero(least & np.isfinite(reduced))
    assert np.array_equal(found.arcs.rows, expected[0])
    assert np.array_equal(found.arcs.columns, expected[1])
    assert np.array_equal(found.arcs.costs, costs[expected])
    assert np.array_equal(found.wanted.costs, costs[wanted])
    assert np.array_equal(found.row_least, np.where(b > 0, costs - g, math.inf).min(1))
    below = pricing.MatrixCosts(operator).price(f, g, k, below=0.0).arcs
    assert np.array_equal(below.rows, np.nonzero(least & (reduced < 0))[0])


# What is left out of a proof shows in the interval.


def test_an_arc_left_out_widens_the_interval_alone(monkeypatch):
    rng = np.random.default_rng(7)
    costs = rng.random((40, 40))
    truth = true_value(costs, np.full(40, 1 / 40), np.full(40, 1 / 40))
    joined = pricing.Arcs.joined.__func__

    def fewer(cls, m, *parts):
        arcs = joined(cls, m, *parts)
        return arcs.some(np.arange(len(arcs.rows)) % 7 > 0) if len(arcs.rows) > 120 else arcs

    monkeypatch.setattr(solve.Arcs, "joined", classmethod(fewer))
    low, high = exactly(costs, bound_width=0).bounds
    assert low <= truth + TRUTH
    assert high >= truth - TRUTH
    assert high - low > 1e-6


def exact_value(x, y):
    """Half the squared distance of every point (2, d) to its partner, a rational number."""
    pairs = zip(x.flatten().tolist(), y.flatten().tolist(), strict=True)
    return sum((Fraction(s) - Fraction(t)) ** 2 for s, t in pairs) / 4


def missed(monkeypatch, share):
    """How many of 100 intervals of two far pairs of points miss the true cost.

    The rounding of costs counts with a share.
    """
    errors = pricing.CentredProducts

    class Less(errors):
        def __init__(self, cost):
            super().__init__(cost)
            self.errors = tuple(share * each for each in self.errors)

    monkeypatch.setattr(pricing, "CentredProducts", Less)
    draw, count = torch.Generator().manual_seed(0), 0
    for _ in range(100):
        x, y = (torch.randn(2, 9, dtype=torch.float64, generator=draw) for _ in range(2))
        x, y = (each + torch.tensor([[1000.0], [-1000.0]]) for each in (x, y))
        low, high = otdd.sinkhorn(x, y, epsilon=0).bounds
        count += not Fraction(low) <= exact_value(x, y) <= Fraction(high)
    monkeypatch.setattr(pricing, "CentredProducts", errors)
    return count


def test_rounding_of_costs_is_in_the_interval(monkeypatch):
    assert missed(monkeypatch, 1) == 0
    assert missed(monkeypatch, 0) > 20


def test_a_residual_is_paid_for():
    """A plan of 0.5 each between equal points, for masses of which 2 t must move at a cost of 1."""
    arcs = pricing.Arcs(np.array([0, 1]), np.array([0, 1]), np.array([0.0, 0.0]))
    masses, none = np.array([0.5, 0.5]), (np.zeros(2), np.zeros(2))
    for t in (0.0, 1e-3, 0.2):
        a, b = np.array([0.5 + t, 0.5 - t]), np.array([0.5 - t, 0.5 + t])
        marginals = marginals_of(a, b, arcs, masses)
        bound = upper_bound(arcs, masses, marginals, 1.0, none)
        assert bound.value + bound.rounding >= 2 * t
        assert marginals.error == pytest.approx(2 * t, abs=1e-14)
        assert bound.rounding <= 2.00001 * t + 1e-14


def test_masses_become_integers_of_equal_sums():
    rng = np.random.default_rng(8)
    for kind in MASSES:
        a, b = masses_of(kind, 70, rng), masses_of(kind, 31, rng)
        sides = program.integer_masses(a, b)[:2]
        for masses, integers in zip((a, b), sides, strict=True):
            assert (integers == np.rint(integers)).all()
            assert (integers >= 0).all()
            total = integers.sum()
            assert total <= 2.0**53
            assert np.abs(integers / total - masses).max() <= 40 * 2.0**-52
        assert math.fsum(sides[0]) == math.fsum(sides[1])
        rows, columns, plan = program.corner_tree(*sides)
        assert len(plan) <= 100
        assert (np.bincount(rows, plan, 70) == sides[0]).all()
        assert (np.bincount(columns, plan, 31) == sides[1]).all()
