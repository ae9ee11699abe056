"""Slopes at epsilon 0 where groups of points have equal masses, which rounding hides."""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import otdd_flash as otdd
from otdd_flash.solver.exact import slopes
from otdd_flash.solver.term import ExactTerm

PROVEN = {"epsilon": 0, "solver": otdd.Exact(bound_width=0), "lambda_x": 1.0, "lambda_y": 0.0}


def samples(points, labels, masses=None):
    names = tuple(str(label) for label in range(int(max(labels)) + 1))
    return otdd.LabeledSamples(points, np.asarray(labels), names, masses)


def transport(costs, a, b):
    """The value by HiGHS."""
    n, m = costs.shape
    sums = np.vstack((np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))))
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    found = linprog(costs.ravel(), A_eq=sums, b_eq=np.r_[a, b], options=tight)
    assert found.status == 0
    return found.fun


def one_sided(costs, a, b, labels, c, step=1e-4):
    """The slopes to both sides as class c falls and grows, by differences."""
    share = a[labels == c].sum()
    direction = (np.where(labels == c, a / share, 0) - a) / (1 - share)
    at, below, above = (transport(costs, a + t * direction, b) for t in (0, -step, step))
    return [(at - below) / step, (above - at) / step]


def test_a_unit_of_rounding_links_no_groups():
    x, y = np.array([[0.0], [10.0]]), np.array([[0.0], [1.0], [5.0], [9.0]])
    source = samples(x, [0, 1], np.array([1.0, 2.0]))
    target = samples(y, [0] * 4, np.array([2.0, 1.0, 1.0, 5.0]))
    found = otdd.dataset_distance(source, target, labels="none", **PROVEN)
    expected = torch.tensor([[-80.0, 0.0], [0.0, 80.0]], dtype=torch.float64)
    torch.testing.assert_close(found.contributions().slopes, expected, atol=1e-9, rtol=0)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seeds", [range(20), range(20, 60)])
def test_balanced_classes_have_the_slopes_of_differences(seeds):
    kinks = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        sizes = rng.integers(2, 8, rng.integers(2, 4))
        labels = np.repeat(np.arange(len(sizes)), sizes)
        weights = 1 / sizes[labels]
        m = len(sizes) * int(rng.integers(2, 8))
        x, y = rng.standard_normal((len(labels), 2)), rng.standard_normal((m, 2))
        a, b = weights / weights.sum(), np.full(m, 1 / m)
        costs = ((x[:, None] - y) ** 2).sum(-1)
        found = otdd.dataset_distance(
            samples(x, labels, weights), samples(y, [0] * m), labels="none", **PROVEN
        )
        ends = found.contributions().slopes
        for c in range(len(sizes)):
            expected = one_sided(costs, a, b, labels, c)
            assert ends[:, c].tolist() == pytest.approx(expected, abs=1e-5), seed
            kinks += expected[1] > expected[0] + 1e-3
    assert kinks > len(seeds) / 2


def test_masses_below_rounding_have_no_slopes():
    x, y = np.array([[0.0], [1.0], [3.0]]), np.array([[0.0], [1.0]])
    for tiny, known in ((1e-3, True), (1e-9, True), (1e-16, False), (1e-300, False)):
        source = samples(x, [0, 0, 1], np.array([0.5, 0.6, tiny]))
        found = otdd.dataset_distance(source, samples(y, [0, 0]), labels="none", **PROVEN)
        values, _, ends = found.contributions()
        a, b = source.masses.numpy(), np.array([0.5, 0.5])
        assert values[:2].isfinite().all()
        assert bool(ends[:, 1].isfinite().all()) == bool(values[2].isfinite()) == known, tiny
        assert bool(found.barycentric_map()[2].isfinite()) == known
        if known:
            expected = one_sided((x - y.T) ** 2, a, b, np.array([0, 0, 1]), 1, 0.9 * a[2])
            assert ends[:, 1].tolist() == pytest.approx(expected, rel=1e-3), tiny


@pytest.mark.parametrize(
    ("stopped_by", "way_out"),
    [
        ("bound_width", "solve with solver.bound_width=0"),
        ("max_seconds", "solver.bound_width=0, and raise solver.max_seconds"),
        ("rounding", "rounding leaves no more of it: lower costs"),
        ("infeasible", "change a and b"),
    ],
)
def test_what_an_unproven_plan_needs_is_said(stopped_by, way_out):
    none, empty = torch.zeros(2, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    term = ExactTerm(
        none,
        none,
        epsilon=0.0,
        value=0.0,
        bounds=(0.0, 0.0),
        marginal_error=0.0,
        tolerance=None,
        iterations=1,
        passes=1.0,
        converged=False,
        stopped_by=stopped_by,
        rows=empty,
        columns=empty,
        masses=none[:0],
    )
    with pytest.raises(otdd.InputError) as raised:
        slopes.slopes_of(None, term, torch.zeros(2, 1))
    assert way_out in str(raised.value)
