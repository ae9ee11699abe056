"""Bounds by moments and of terms hold against dense float64 formulas, and nearly attain them."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from ranking.libraries import class_costs, cost, dataset, term

import otdd_flash as otdd
from otdd_flash.cost.ground import GroundCost
from otdd_flash.formulas.marginals import EXACT
from otdd_flash.labels import metric_of
from otdd_flash.ranking import bounds
from otdd_flash.ranking.bounds import (
    MOST_FEATURES,
    Problem,
    Terms,
    class_tables,
    lowest_by_moments,
    moments_of,
    self_terms,
)

COMPUTE = otdd.ComputeOptions("cpu")
METRICS = ("gaussian", "means", "upper_bound", "exact", "sinkhorn", "none")


def cross(table, x):
    """The block of W between the classes of x and those of the other dataset."""
    return table[: x.class_total, x.class_total :]


def lowest(query, members, cost, name):
    metric = metric_of(name)
    found = moments_of([query, *members], metric, cost)
    return lowest_by_moments(found[0], found[1:], cost, metric)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("weighted", [False, True])
def test_moments_bound_exact_transport_from_below(name, weighted):
    rng = np.random.default_rng(3)
    for dim in (1, 2, 5):
        query, *members = (dataset(rng, dim, weighted=weighted) for _ in range(6))
        given = GroundCost(0.7, 0.4)
        found = lowest(query, members, given, name)
        metric = metric_of(name)
        if name == "sinkhorn":
            metric = otdd.labels.Sinkhorn(0.5)
        for one, bound in zip(members, found.tolist(), strict=True):
            (table,) = class_tables([query, one], [(0, 1)], metric)
            block = cross(table, query)
            costs = 0.7 * torch.cdist(query.features.double(), one.features.double()) ** 2
            costs += 0.4 * block.double()[query.labels][:, one.labels]
            value = ot.emd2(query.masses.numpy(), one.masses.numpy(), costs.numpy())
            assert bound <= value + 1e-9, (name, dim)


def test_moments_attain_what_translations_cost():
    """Of a translated copy the bound is the distance itself: of features, and of its classes."""
    rng = np.random.default_rng(0)
    query = dataset(rng, 3)
    moved = otdd.LabeledSamples(query.features + 2, query.labels, query.class_names)
    (of_points,) = lowest(query, [moved], GroundCost(1.0, 0.0), "gaussian").tolist()
    assert of_points == pytest.approx(12, rel=1e-5)
    only = otdd.LabeledSamples(query.features, torch.zeros(len(query)), ("a",))
    there = otdd.LabeledSamples(query.features + 2, torch.zeros(len(query)), ("a",))
    (of_classes,) = lowest(only, [there], GroundCost(0.0, 1.0), "gaussian").tolist()
    assert of_classes == pytest.approx(12, rel=1e-5)
    # Class masses that have to move: half of the mass, from one class to the other.
    apart = torch.tensor([[0.0], [0.0], [4.0], [4.0]])
    two = otdd.LabeledSamples(apart, [0, 0, 1, 1], ("a", "b"))
    one = otdd.LabeledSamples(apart[:2], [0, 0], ("a",))
    (moving,) = lowest(two, [one], GroundCost(0.0, 1.0), "means").tolist()
    assert moving == pytest.approx(8, rel=1e-9)


def test_moments_of_many_features_bound_too(monkeypatch):
    rng = np.random.default_rng(1)
    query, member = (dataset(rng, MOST_FEATURES + 9) for _ in range(2))
    (bound,) = lowest(query, [member], GroundCost(), "gaussian").tolist()
    assert 0 < bound <= term(query, member, 0.5)


def test_moments_far_from_the_origin_and_of_one_point_stay_below():
    """Where the mean is large, differences of it round: the bound gives way, not the truth."""
    rng = np.random.default_rng(2)
    for shift in (1e4, 1e6):
        one = dataset(rng, 2)
        x = otdd.LabeledSamples(one.features + shift, one.labels, one.class_names)
        points = x.features[:1].expand(5, -1)
        y = otdd.LabeledSamples(points, [0] * 5, ("a",))
        (bound,) = lowest(x, [y], GroundCost(), "gaussian").tolist()
        costs = cost(x, y)
        value = ot.emd2(x.masses.numpy(), y.masses.numpy(), costs.numpy())
        assert bound <= value


@pytest.mark.parametrize("weight", [1e6, 1e15, 1e17])
def test_moments_of_one_heavy_row_bound_too(weight):
    """1 - the sum of squared shares has no digits left there, and covariances divide by it."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        sides = []
        for heavy in (weight, 1.0):
            weights = rng.uniform(0.5, 1, 4) * [heavy, 1, 1, 1]
            sides.append(otdd.LabeledSamples(rng.normal(size=(4, 2)), [0] * 4, ("a",), weights))
        (bound,) = lowest(sides[0], [sides[1]], GroundCost(0.0, 1.0), "gaussian").tolist()
        (table,) = class_tables(sides, [(0, 1)], metric_of("gaussian"))
        assert bound <= float(table[0, 1])


def test_rounding_of_means_makes_no_bound_above_zero():
    """Copies of one point are at distance 0 from it, whatever their mean rounds to."""
    draw = torch.Generator().manual_seed(0)
    for count in (3, 7, 11):
        points = 1e6 * torch.rand(1, 3, generator=draw)
        one = otdd.LabeledSamples(points, [0], ("a",))
        many = otdd.LabeledSamples(points.expand(count, -1), [0] * count, ("a",))
        (bound,) = lowest(one, [many], GroundCost(), "means").tolist()
        assert bound <= 0


@pytest.mark.parametrize("together", [False, True])
def test_intervals_of_every_budget_hold(together, monkeypatch):
    rng = np.random.default_rng(5)
    epsilon = 0.3
    terms = Terms(GroundCost(), epsilon, EXACT, COMPUTE)
    if together:
        monkeypatch.setattr(Terms, "takes_many", lambda self, x, y: True)
    query, *members = (dataset(rng, 2) for _ in range(5))
    pairs = [(0, k) for k in range(1, 5)]
    tables = class_tables([query, *members], pairs, metric_of("gaussian"))
    for one, table in zip(members, tables, strict=True):
        assert torch.allclose(cross(table, query), class_costs(query, one), atol=1e-9)
    problems = [Problem(query, y, w) for y, w in zip(members, tables, strict=True)]
    values = [term(query, one, epsilon) for one in members]
    widths, last = [], False
    for level in range(20):
        raised = terms.raised(problems)
        for (found, _), value in zip(raised, values, strict=True):
            assert found.bounds[0] - 1e-9 <= value <= found.bounds[1] + 1e-9, level
        widths.append(max(found.bounds[1] - found.bounds[0] for found, _ in raised))
        problems = [
            one._replace(before=found.term, level=level + 1)
            for one, found in zip(problems, raised, strict=True)
        ]
        if last := any(found.last for found in raised):
            break
    assert last
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 1e-4 < widths[0]


@pytest.mark.parametrize("width", [bounds.SELF_WIDTH, 0.0])
def test_errors_below_rounding_are_not_sought_for_long(width, monkeypatch):
    """In double precision nothing says that rounding is reached; equal points have the value 0."""
    most = []
    real = bounds.solve_identical

    def solve(compared, options, *, start=None):
        most.append(options.max_iterations)
        assert len(most) == 1 or most[-1] <= bounds.MOST_CONTINUED
        return real(compared, options, start=start)

    monkeypatch.setattr(bounds, "solve_identical", solve)
    monkeypatch.setattr(bounds, "SELF_WIDTH", width)
    weights = [0.23, 0.29, 0.24, 0.2, 0.04]
    side = otdd.LabeledSamples(torch.ones(5, 3, dtype=torch.float64), None, (), weights)
    (table,) = class_tables([side], [(0, 0)], metric_of("none"))
    compute = otdd.ComputeOptions("cpu", precision="double")
    terms = Terms(GroundCost(), 0.04, EXACT, compute)
    (found,) = self_terms(terms, [Problem(side, side, table)])
    assert found.bounds[0] <= found.value <= found.bounds[1]
    assert (len(most) == 1) == (width > 0)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("alone", [False, True])
def test_self_terms_are_those_of_each_dataset_and_narrow(count, alone, monkeypatch):
    if alone:
        monkeypatch.setattr(Terms, "takes_many", lambda self, x, y: False)
    rng = np.random.default_rng(8)
    sides = [dataset(rng, 2, weighted=k % 2 == 1) for k in range(count)]
    tables = class_tables(sides, [(k, k) for k in range(count)], metric_of("gaussian"))
    terms = Terms(GroundCost(), 0.2, EXACT, COMPUTE)
    found = self_terms(terms, [Problem(x, x, w) for x, w in zip(sides, tables, strict=True)])
    for side, (value, (lower, upper)) in zip(sides, found, strict=True):
        true = term(side, side, 0.2)
        assert lower - 1e-9 <= true <= upper + 1e-9
        assert lower <= value <= upper
        assert upper - lower < 1e-5 * true
