"""The interval of exact transport holds the true value, for any problem and after any round."""

import numpy as np
import ot
import pytest

import otdd_flash as otdd
from otdd_flash.solver.exact import pricing, solve

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
MASSES = ("equal", "random", "zeros", "tiny")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masses", MASSES)
@pytest.mark.parametrize("few", [False, True], ids=("all arcs", "few arcs"))
def test_bounds_hold_the_true_value(kind, masses, few, request):
    if few:
        request.getfixturevalue("few_arcs")
    rng = np.random.default_rng(7)
    for case in range(10):
        n, m = rng.integers(1, 61, 2) if case else (40, 40)
        n = 3 if case == 1 else n
        costs, a, b = (
            costs_of(kind, n, m, rng),
            masses_of(masses, n, rng),
            masses_of(masses, m, rng),
        )
        truth = true_value(costs, a, b)
        slack = TRUTH * np.abs(costs).max()
        found = otdd.matrix_transport(costs, a, b, options=otdd.Exact(bound_width=0))
        low, high = found.bounds
        assert low <= truth + slack, (case, n, m)
        assert high >= truth - slack, (case, n, m)
        assert found.stopped_by == "optimal", (case, n, m, high - low)
        assert high - low <= slack, (case, n, m)
        assert found.value == high
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
