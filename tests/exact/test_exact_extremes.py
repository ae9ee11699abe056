"""Exact transport at its edges: tight masses, spread costs, the ends of float64, no plan at all."""

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
from otdd_flash.solver.exact import bounds, pricing, program, solve

TO_THE_END = otdd.Exact(bound_width=0)


def solved(costs, a=None, b=None, options=TO_THE_END):
    """The result, and what it warned of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = otdd.matrix_transport(costs, a, b, epsilon=0, options=options)
    return found, [str(each.message) for each in seen]


def best_permutation(costs):
    """The value for equal masses, as a rational number."""
    pairs = linear_sum_assignment(costs)
    return sum((Fraction(float(cost)) for cost in costs[pairs]), Fraction()) / len(costs)


def blocks(of_rows, of_columns, rng):
    shape = len(of_rows), len(of_columns)
    return np.where(of_rows[:, None] == of_columns, rng.random(shape), math.inf)


def test_blocks_that_rounding_parts_have_a_plan():
    rng = np.random.default_rng(0)
    a, b = np.full(10, 0.1), np.array([0.3, 0.7])
    costs = blocks(np.arange(10) < 3, np.array([True, False]), rng)
    found, said = solved(costs, a, b)
    expected = np.where(np.isfinite(costs), costs, 0).sum() / 10
    assert not said
    assert found.stopped_by == "optimal"
    assert found.value == pytest.approx(expected, rel=1e-14)
    assert found.bounds[0] <= found.value <= found.bounds[1]
    plan = found.plan().to_dense().numpy()
    assert np.abs(plan.sum(1) - a).sum() <= found.marginal_error < 1e-14
    for size in (2, 4, 20, 60):
        labels = np.repeat(np.arange(4), size)
        a, b = rng.random(4 * size), rng.random(4 * size)
        for label in range(4):
            b[labels == label] *= a[labels == label].sum() / b[labels == label].sum()
        a, b = a / a.sum(), b / b.sum()
        found, said = solved(blocks(labels, labels, rng), a, b)
        assert found.converged, said
        assert found.marginal_error < 1e-13
        assert found.bounds[1] - found.bounds[0] < 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_permuted_masses_with_ties_have_their_plan(seed):
    rng = np.random.default_rng(seed)
    a, order = rng.random(8), rng.permutation(8)
    a[:4] = a.max()
    a /= a.sum()
    costs = np.full((8, 8), math.inf)
    costs[order, np.arange(8)] = 1.0
    supply, demand, _ = program.integer_masses(a, a[order])
    assert (supply[order] == demand).all()
    found, said = solved(costs, a, a[order])
    assert not said
    assert found.value == pytest.approx(1, abs=1e-15)


def test_masses_that_allowed_pairs_cannot_hold_are_said_to_be_infeasible():
    costs = np.array([[1.0, math.inf], [1.0, math.inf], [1.0, 1.0]])
    found, said = solved(costs, [0.1, 0.2, 0.7], [0.3 - 1e-12, 0.7 + 1e-12])
    assert (found.value, found.bounds[1]) == (math.inf, math.inf)
    assert found.stopped_by == "infeasible"
    assert "no plan without forbidden pairs was found" in said[0]
    assert "change a and b so that allowed pairs can hold them" in said[0]
    assert "nan" not in said[0]


@pytest.mark.parametrize("high", [1e2, 1e6, 1e12])
@pytest.mark.parametrize("lowest", [0.0, -7.0])
def test_the_one_pair_between_two_blocks_is_found_whatever_it_costs(high, lowest, monkeypatch):
    monkeypatch.setattr(solve, "FEW_ENTRIES", 0)
    rng = np.random.default_rng(10)
    labels = np.repeat([0, 1], 60)
    costs = blocks(labels, labels, rng) + lowest
    costs[0, 60] = high
    a, b = np.full((2, 120), 1 / 120)
    a[0], b[60] = a[0] + 0.005, b[60] + 0.005
    found, said = solved(costs, a / a.sum(), b / b.sum())
    assert not said
    assert found.stopped_by == "optimal"
    truth = ot.emd2(a / a.sum(), b / b.sum(), np.where(np.isfinite(costs), costs, 1e3 * high))
    assert found.value == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize(("code", "succeeding"), [(0, 0), (2, 0), (3, 0), (2, 1), (3, 1)])
def test_a_simplex_that_fails_is_no_answer(code, succeeding, monkeypatch):
    monkeypatch.setattr(solve, "FEW_ENTRIES", 0)
    monkeypatch.setattr(solve, "FIRST_ARCS", 2)
    nothing = np.zeros(40), np.zeros(40), 0.0
    monkeypatch.setattr(solve, "first_potentials", lambda *_: nothing)
    emd, solved_before = ot.emd, []

    def failing(*args, **settings):
        plan, log = emd(*args, **settings)
        if log["result_code"] == program.OPTIMAL:
            solved_before.append(log)
        failed = len(solved_before) > succeeding
        return plan, log | ({"result_code": code} if failed else {})

    monkeypatch.setattr(ot, "emd", failing)
    costs = np.random.default_rng(0).random((40, 40))
    with pytest.raises(program.ProgramError, match=f"with code {code}$"):
        solved(costs)


def test_a_result_without_a_plan_is_saved(tmp_path):
    costs = torch.full((4, 4), math.inf, dtype=torch.float64)
    costs[range(4), [3, 2, 1, 0]] = 1.0
    found, _ = solved(costs, options=otdd.Exact(max_seconds=1e-9))
    assert found.stopped_by == "max_seconds"
    found.save(tmp_path)
    loaded = otdd.MatrixTransport.load(tmp_path, costs)
    assert loaded.plan().values().numel() == 0
    assert loaded.bounds == found.bounds


@pytest.mark.parametrize("outlier", [1e9, 1e14, 1e20, 1e30])
@pytest.mark.parametrize("n", [6, 60, 200])
def test_an_outlier_leaves_equal_masses_their_optimum(outlier, n):
    costs = np.random.default_rng(0).random((n, n))
    costs[0, n - 1] = outlier
    found, said = solved(costs, options=otdd.Exact())
    truth = best_permutation(costs)
    assert not said
    assert Fraction(found.bounds[0]) <= truth <= Fraction(found.bounds[1])
    assert found.value == pytest.approx(float(truth), rel=1e-13)
    assert found.bounds[1] - found.bounds[0] <= 1e-4 * found.value
    plan = found.plan().to_dense().numpy()
    assert found.transport_cost == pytest.approx((plan * costs).sum(), rel=1e-13)


@pytest.mark.slow(after=4)
@pytest.mark.parametrize("kind", ["big M", "log-normal", "outlier", "far point"])
@pytest.mark.parametrize("masses", ["random", "equal"])
def test_optimal_is_said_of_narrow_intervals_alone(kind, masses):
    rng = np.random.default_rng(1)
    said_rounding = 0
    for case in range(12):
        n = int(rng.integers(3, 40))
        costs = rng.random((n, n))
        if kind == "big M":
            costs[rng.random((n, n)) < 0.4] = 10.0 ** rng.uniform(6, 20)
        elif kind == "log-normal":
            costs = np.exp(20 * rng.standard_normal((n, n)))
        elif kind == "outlier":
            costs[0, 1] = 10.0 ** rng.uniform(9, 25)
        else:
            costs[0] += 1e9
        a, b = (np.full(n, 1 / n) if masses == "equal" else rng.dirichlet(np.ones(n)) for _ in "ab")
        for width in (0.0, 1e-4):
            found, _ = solved(costs, a, b, otdd.Exact(bound_width=width))
            low, high = found.bounds
            plan = found.plan().to_dense().numpy()
            cost = (plan * costs).sum()
            assert found.value == pytest.approx(cost, rel=1e-12), case
            assert low <= found.value <= high
            if masses == "equal":
                truth = best_permutation(costs)
                assert Fraction(low) <= truth <= Fraction(high)
            assert found.converged == (found.stopped_by != "rounding")
            said_rounding += found.stopped_by == "rounding"
            common = max(float(np.median(costs)), abs(high))
            if found.converged:
                assert high - low <= max(width * high, 1e-11 * common), (case, width)
    # Equal masses have exact marginals, and few costs far above the others are no part of a plan.
    assert (said_rounding > 0) == (kind in ("big M", "log-normal") and masses == "random")


def test_a_tiny_mass_with_a_huge_cost_is_not_called_optimal():
    rng = np.random.default_rng(2)
    costs, a, b = rng.random((20, 30)), rng.random(20), rng.random(30)
    a[5] = 0
    a, b = a / a.sum(), b / b.sum()
    a[5], costs[5] = 1e-17, 1e17
    found, said = solved(costs, a, b, otdd.Exact())
    assert found.stopped_by == "rounding"
    assert not found.converged
    assert "Lower costs that are far above the others" in said[0]
    # Its mass is lost to rounding, and not the 1 that it costs.
    assert found.bounds[0] < found.value + 0.9 < found.bounds[1]


def test_a_residual_takes_the_detour_by_a_hub():
    """Optimal plans for masses that are then changed: the bound is of the changed ones."""
    rng = np.random.default_rng(3)
    none, tight, n = (np.zeros(4), np.zeros(4)), 0, 4
    for _ in range(2000):
        costs = np.rint(10 * rng.random((n, n)))
        costs[rng.random((n, n)) < 0.2] = 1e3
        r, c = (rng.integers(0, 3, n) * 10.0 for _ in "rc")
        # The hub, most often of a row and a column that nothing else uses.
        r[0], c[0] = r[0] + 1000, c[0] + 1000
        r[1] += max(0, c.sum() - r.sum())
        c[1] += max(0, r.sum() - c.sum())
        plan = ot.emd(r, c, costs)
        a, b = r.copy(), c.copy()
        for side in (a, b):
            to, of = rng.permutation(n)[:2]
            moved = min(side[of], rng.integers(0, 6))
            side[to] += moved
            side[of] -= moved
        rows, columns = plan.nonzero()
        arcs, masses = pricing.Arcs(rows, columns, costs[rows, columns]), plan[rows, columns]
        marginals = bounds.marginals_of(a, b, arcs, masses)
        pairs = bounds.hub_arcs(arcs, masses, n, n)
        hubs = pricing.Arcs(*pairs, costs[pairs])
        # A spread beyond any detour leaves the hub alone.
        bound = bounds.upper_bound(arcs, masses, marginals, 1e9, none, hubs)
        truth = ot.emd2(a, b, costs) / a.sum()
        assert bound.marginal_cost < 1e5
        assert truth <= bound.value + bound.rounding + 1e-12
        tight += abs(truth - bound.value - bound.rounding) < 1e-9 and bound.marginal_cost > 1e-6
    assert tight > 0


def test_equal_masses_are_exact_and_others_add_up():
    equal = np.where(np.arange(12) % 3 > 0, 0.3, 0.0)
    supply, demand, exact = program.integer_masses(equal, np.ones(6))
    assert exact
    assert set(supply) == {0.0, 3.0}
    assert set(demand) == {4.0}
    rng = np.random.default_rng(4)
    supply, demand, exact = program.integer_masses(rng.random(50), rng.random(70))
    assert not exact
    assert supply.sum() == demand.sum()


@pytest.mark.parametrize("block", [1 << 8, 1 << 20])
def test_potentials_are_feasible_at_points_without_mass(block, monkeypatch):
    monkeypatch.setattr(pricing, "BLOCK_ELEMENTS_CPU", block)
    rng = np.random.default_rng(5)
    for n, m in ((5, 6), (60, 50)):
        costs, a, b = rng.random((n, m)), rng.random(n), rng.random(m)
        a[n // 2] = b[m - 1] = b[0] = 0
        costs[:, m - 1] = -3
        costs[n // 2, 0] = -7
        a, b = a / a.sum(), b / b.sum()
        found, _ = solved(costs, a, b)
        reduced = costs - found.f.numpy()[:, None] - found.g.numpy()
        assert reduced.min() >= -1e-14
        assert np.abs(reduced[:, [0, m - 1]].min(0)).max() <= 1e-14


@pytest.mark.parametrize(("epsilon", "relative"), [(0, 0.01), (0, 0), (0.1, 0)])
def test_both_epsilons_are_refused(epsilon, relative):
    with pytest.raises(otdd.InputError, match="got both"):
        otdd.matrix_transport(torch.eye(3), epsilon=epsilon, epsilon_relative=relative)


@pytest.mark.parametrize("largest", [1e302, -1e308, 1.7e308])
def test_costs_near_the_end_of_float64_are_refused(largest):
    costs = np.full((3, 2), largest)
    costs[0, 0] = -largest
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(otdd.InputError, match=r"takes costs up to 1e\+301 in size, got .*down"):
            otdd.matrix_transport(costs, epsilon=0)
    found, said = solved(np.random.default_rng(6).random((7, 9)) * 1e300)
    assert not said
    assert found.stopped_by == "optimal"


@pytest.mark.parametrize("scale", [5e-324, 1e-322, 1e-310])
def test_costs_that_underflow_are_in_the_interval(scale):
    rng = np.random.default_rng(7)
    for n in (2, 5, 9):
        costs = rng.integers(1, 4, (n, n)) * scale
        found, said = solved(costs)
        truth = best_permutation(costs)
        assert not [each for each in said if "divide" in each]
        assert Fraction(found.bounds[0]) <= truth <= Fraction(found.bounds[1])


# Numbers that are chosen for speed, each with two others that are far too small and too large.
CHOSEN = {
    (solve, "FEW_ENTRIES"): (1, 10**9),
    (solve, "FIRST_LEVEL"): (1e-9, 1.0),
    (solve, "FIRST_ERROR"): (1e-5, 1.0),
    (solve, "FIRST_ARCS"): (1, 10**9),
    (solve, "MORE_ARCS"): (1, 10**9),
    (solve, "NEAR"): (1.0, 1e9),
    (solve, "MOST_STALLED"): (1, 10),
    (solve, "DOUBLED"): (1, 10**9),
    (solve, "TWELVE_DIGITS"): (1.0, 1e9),
    (solve, "common_rounding"): (lambda *_: 1.0, lambda *_: 1e9),
    (bounds, "HUBS"): (1, 10**9),
    (program, "COST_BITS"): (1, 40),
    (program, "SLACK_COST"): (0.1, 1e9),
    (program, "FORBIDDEN_COST"): (1e-9, 1e9),
    (pricing, "POOLED"): (1, 10**9),
}


@pytest.mark.slow(after=len(CHOSEN))
@pytest.mark.parametrize(
    ("where", "value"),
    [(where, values[which]) for which in (0, 1) for where, values in CHOSEN.items()],
    ids=lambda each: each[1] if isinstance(each, tuple) else "",
)
def test_no_chosen_number_makes_an_interval_false(where, value, monkeypatch):
    monkeypatch.setattr(solve, "FEW_ENTRIES", 0)
    monkeypatch.setattr(*where, value)
    rng = np.random.default_rng(8)
    for kind in ("normal", "ties", "far", "forbidden", "masses"):
        n, m = (30, 30) if kind != "masses" else (25, 31)
        costs = rng.random((n, m)) if kind != "ties" else rng.integers(0, 3, (n, m)) + 0.0
        if kind == "far":
            costs[0] += 1e9
            costs[1, 3] = 1e14
        if kind == "forbidden":
            costs[rng.random((n, m)) < 0.6] = math.inf
            costs[np.arange(n), rng.permutation(n)] = 2.0
        a, b = (rng.dirichlet(np.ones(s)) if kind == "masses" else None for s in (n, m))
        found, _ = solved(costs, a, b)
        low, high = found.bounds
        assert math.isfinite(low), kind
        assert math.isfinite(high), kind
        if kind == "masses":
            truth = ot.emd2(a, b, costs)
            assert low - 1e-13 <= truth <= high + 1e-13
        else:
            assert Fraction(low) <= best_permutation(costs) <= Fraction(high), kind


def copied():
    x, labels = np.random.default_rng(1).standard_normal((12, 2)), np.arange(12) % 3
    return (x, labels), (x.copy(), labels), {"labels": "means", "debias": False}


def shuffled():
    """Two places, one of which has most rows, so that most costs are 0."""
    rng = np.random.default_rng(0)
    y = np.array([[0.1, 0.3], [0.7, 0.9]])[(rng.random(400) > 0.9).astype(int)]
    return y, y[rng.permutation(400)], {"labels": "none"}


def inner():
    """The transport costs 0, and the value is that of the terms of one side."""
    rng = np.random.default_rng(0)
    x = None
    for n in (2, 3):
        x = rng.standard_normal((2, 2))[rng.permutation(np.arange(n) % 2)]
    return x, x[::-1].copy(), {"labels": "none", "ground": "inner", "debias": False}


@pytest.mark.parametrize("width", [0.0, 1e-4])
@pytest.mark.parametrize("case", [copied, shuffled, inner])
def test_values_of_0_are_optimal(case, width):
    source, target, settings = case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = otdd.dataset_distance(
            source, target, epsilon=0, solver=otdd.Exact(bound_width=width), **settings
        )
    assert found.converged
    low, high = found.bounds
    assert low <= found.value <= high
    assert high - low < 1e-13


@pytest.mark.parametrize("share", [0.3, 0.05])
def test_matrices_of_0_and_1_are_optimal_at_a_value_of_0(share):
    rng = np.random.default_rng(5)
    for _ in range(10):
        costs = (rng.random((30, 30)) < share).astype(float)
        np.fill_diagonal(costs, 0)
        a = rng.dirichlet(np.ones(30))
        found, said = solved(costs, a, a * (1 + 1e-13 * rng.random(30)))
        assert not said
        assert found.stopped_by == "optimal"
        assert found.bounds[1] - found.bounds[0] < 1e-12


def test_permuted_masses_that_forbidden_pairs_allow_are_optimal_at_a_value_of_0():
    """Their sums differ by rounding, which then moves a unit at a cost."""
    for seed in range(3, 120, 4):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 40))
        costs = np.where(rng.random((n, n)) < 0.6, math.inf, rng.random((n, n)))
        np.fill_diagonal(costs, 0)
        a, order = rng.dirichlet(np.ones(n)), rng.permutation(n)
        for width in (0.0, 1e-4):
            found, said = solved(costs[:, order], a, a[order], otdd.Exact(bound_width=width))
            assert not said, seed
            assert found.bounds[1] - found.bounds[0] < 1e-12


def test_a_column_without_mass_or_costs_warns_of_nothing():
    costs = np.array([[1.0, math.inf], [1.0, math.inf]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = otdd.matrix_transport(costs, [0.5, 0.5], [1.0, 0.0], epsilon=0)
    assert found.value == 1


def true_distance(x, y, ground, lambda_x):
    """The least mean cost of a permutation, as a rational number."""
    x, y = ([list(map(Fraction, point)) for point in side.tolist()] for side in (x, y))

    def cost(p, q):
        if ground == "inner":
            return -Fraction(lambda_x) * sum(s * t for s, t in zip(p, q, strict=True))
        return Fraction(lambda_x) * sum((s - t) ** 2 for s, t in zip(p, q, strict=True))

    costs = [[cost(p, q) for q in y] for p in x]
    orders = itertools.permutations(range(len(x)))
    return min(sum(map(list.__getitem__, costs, order)) for order in orders) / len(x)


def assert_holds(x, y, ground, lambda_x):
    settings = {"labels": "none", "lambda_x": lambda_x, "lambda_y": 0.0, "ground": ground}
    with warnings.catch_warnings():
        # Few digits may be left.
        warnings.simplefilter("ignore", otdd.NotConvergedWarning)
        found = otdd.dataset_distance(x, y, epsilon=0, debias=False, **settings)
    low, high = map(Fraction, found.bounds)
    assert low <= true_distance(x, y, ground, lambda_x) <= high
    return found


@pytest.mark.parametrize(
    ("scale", "dim", "lambda_x"), [(1e-162, 1, 1e300), (1e-160, 3, 1e300), (6e-162, 2000, 1.0)]
)
def test_squares_that_underflow_are_in_the_interval(scale, dim, lambda_x):
    x, y = np.random.default_rng(0).standard_normal((2, 1, dim)) * scale
    assert assert_holds(x, y, "sqeuclidean", lambda_x).converged


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("ground", ["sqeuclidean", "inner"])
@pytest.mark.parametrize("magnitudes", [(-170, -150, -10, 300), (-3, 149, -323, -300)])
def test_products_that_underflow_are_in_the_interval(ground, magnitudes):
    """Small features with any weight, and large ones with one that is subnormal or near it."""
    least, most, lightest, heaviest = magnitudes
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n, dim = int(rng.integers(1, 4)), int(rng.choice([1, 5, 100]))
        x, y = rng.standard_normal((2, n, dim)) * 10.0 ** rng.uniform(least, most)
        # One side may be far smaller than the other one.
        y *= 10.0 ** -rng.uniform(0, 4 * (seed % 3))
        assert_holds(x, y, ground, 10.0 ** rng.uniform(lightest, heaviest))


def test_the_width_is_that_of_the_value_with_its_offset(monkeypatch):
    ended = calls_of(monkeypatch, solve._Solve, "term")
    x, y = np.random.default_rng(8).standard_normal((2, 40, 3)) + 10
    found = otdd.dataset_distance(x, y, epsilon=0, labels="none", ground="inner", debias=False)
    assert ended[-1][0].relative_width == pytest.approx(found.divergence.bound_width, rel=1e-6)
    assert abs(found.divergence.offset.value) > 10 * found.divergence.xy.value


def test_terms_whose_difference_is_small_go_on_from_where_they_were(monkeypatch):
    monkeypatch.setattr(solve, "FEW_ENTRIES", 0)
    monkeypatch.setattr(solve, "FIRST_ARCS", 1)
    nothing = np.zeros(60), np.zeros(60), 0.0
    monkeypatch.setattr(solve, "first_potentials", lambda *_: nothing)
    starts = calls_of(monkeypatch, solve, "first_potentials")
    passes = calls_of(monkeypatch, pricing.PointCosts, "price")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 60, 4)) + 5 * rng.normal(size=(60, 1))
    labels = np.arange(60) % 2
    sides = [otdd.LabeledSamples(each, labels, ("a", "b")) for each in x]
    table = torch.tensor([[90.0, 0.0], [0.0, 90.0]], dtype=torch.float64)
    found = otdd.dataset_distance(
        *sides,
        epsilon=0,
        class_distances=otdd.ClassDistances(table, table, table),
        debias=True,
        solver=otdd.Exact(bound_width=0.2),
    )
    assert len(starts) == 3
    assert found.divergence.passes == len(passes)
    assert found.divergence.bound_width < 0.2
