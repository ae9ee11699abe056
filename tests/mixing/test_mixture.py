"""`otdd.mixture`: weights, bounds, limits, what it tells, and the rows that it draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import InputError, NotConvergedWarning
from tests.mixing.dense import mixed, problem, value, weights
from tests.refusals import naming


def cloud(n, centre, seed, name="cloud", wide=1.0, labels=None):
    """Normal points about a centre."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=draw) * wide + torch.tensor(centre, dtype=torch.float32)
    names = () if labels is None else tuple(sorted({str(one) for one in labels}))
    found = None if labels is None else torch.tensor([names.index(str(one)) for one in labels])
    return otdd.LabeledSamples(x, found, names, name=name)


@pytest.mark.parametrize("seed", [0, 6, 7])
def test_two_sources_against_a_line_search(seed):
    """The least value over t of OT(t mu_1 + (1 - t) mu_2), dense float64."""
    target, (*_,) = problem(seed)
    each = problem(seed)[1][:2]
    found = mixed(target, each, epsilon=0.2)
    low, high = 0.0, 1.0
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(25):
        first, second = high - ratio * (high - low), low + ratio * (high - low)
        ends = [value(target, each, (t, 1 - t), 0.2) for t in (first, second)]
        low, high = (low, second) if ends[0] < ends[1] else (first, high)
    best = min(value(target, each, (t, 1 - t), 0.2) for t in (0.0, (low + high) / 2, 1.0))
    assert found.bounds[0] - 1e-9 <= best <= found.bounds[1] + 1e-9
    assert found.bound_width <= 1e-3
    w = weights(found)
    assert value(target, each, w, 0.2) <= found.value + 1e-9
    assert value(target, each, w, 0.2) <= best + 1e-3 * abs(best)


def checked(seed, **given):
    """Solve a random problem; check its bounds at its weights and along lines from them."""
    draw = np.random.default_rng(seed)
    target, each = problem(seed)
    epsilon = float(draw.choice([0.03, 0.3, 3.0]))
    found = mixed(target, each, epsilon=epsilon, **given)
    lower, upper = found.bounds
    w = weights(found)
    at = value(target, each, w, epsilon)
    size = 1e-9 * max(abs(at), 1.0)
    assert lower - size <= at <= upper + size
    for k in range(len(each)):
        for t in (0.02, 0.2):
            other = (1 - t) * w + t * np.eye(len(each))[k]
            assert lower <= value(target, each, other, epsilon) + size
    return found


@pytest.mark.slow(after=2)
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
@pytest.mark.parametrize("block", range(12))
def test_bounds_hold_in_500_problems_also_early(block):
    for seed in range(50 * block, 50 * (block + 1) if block > 1 else 50 * block + 8):
        with naming(seed):
            early = {"max_seconds": 1e-3} if seed % 3 == 0 else {}
            found = checked(seed, **early)
            assert found.converged or early


def test_half_and_half_is_found_and_the_pull_of_epsilon_is_told():
    narrow, wide = cloud(150, (-3, 0), 0, "narrow", 0.3), cloud(150, (3, 0), 1, "wide", 1.5)
    x = torch.cat(
        (cloud(150, (-3, 0), 2, wide=0.3).features, cloud(150, (3, 0), 3, wide=1.5).features)
    )
    target = otdd.LabeledSamples(x, None, (), name="both")
    plain = mixed(target, [narrow, wide])
    assert plain.weights["narrow"] == pytest.approx(0.5, abs=0.02)
    debiased = mixed(target, [narrow, wide], debias=True)
    assert debiased.weights["narrow"] == pytest.approx(0.5, abs=0.02)
    assert any("draw" in said for said in plain.sentences())
    assert any("no lower bound" in said for said in debiased.sentences())
    # The debiased optimum has no pull at a large epsilon either.
    pulled = mixed(target, [narrow, wide], epsilon=8.0)
    free = mixed(target, [narrow, wide], epsilon=8.0, debias=True)
    assert abs(pulled.weights["narrow"] - 0.5) > 2 * abs(free.weights["narrow"] - 0.5)


def test_what_a_mixture_tells():
    each = [cloud(60, (0, 0), 0, "near"), cloud(80, (4, 0), 1, "far"), cloud(40, (0, 9), 2, "away")]
    x = torch.cat((cloud(60, (0, 0), 3).features, cloud(30, (4, 0), 4).features))
    found = mixed(otdd.LabeledSamples(x, None, (), name="t"), each)
    assert found.converged
    assert found.weights["near"] == pytest.approx(2 / 3, abs=0.05)
    assert found.weights["away"] == 0
    costs = found.marginal_costs
    assert max(abs(costs["near"]), abs(costs["far"])) < 1e-2 * found.value
    assert costs["away"] > 1
    names = [other.name for other in found.others]
    assert names == ["near alone", "uniform", "proportional to size"]
    epsilon, target = found.details["epsilon"], otdd.LabeledSamples(x, None, ())
    for other in found.others:
        truth = value(target, each, other.weights, epsilon)
        assert other.lower - 1e-9 <= truth <= other.upper + 1e-9
        assert other.value > found.value
    assert other.weights == pytest.approx((60 / 180, 80 / 180, 40 / 180))
    assert "near" in repr(found)
    content = found.to_dict()
    assert content["weights"] == dict(found.weights)
    assert str(found).count("\n") > 3


def test_copies_share_a_weight_and_are_told_as_undetermined():
    each = [cloud(50, (0, 0), 0, "one"), cloud(50, (0, 0), 0, "one"), cloud(50, (5, 0), 1, "two")]
    x = torch.cat((cloud(50, (0, 0), 2).features, cloud(50, (5, 0), 3).features))
    found = otdd.mixture(x, each, labels="none")
    assert list(found.weights) == ["one", "one (2)", "two"]
    assert found.weights["one"] == pytest.approx(found.weights["one (2)"], abs=1e-6)
    assert found.weights["one"] + found.weights["one (2)"] == pytest.approx(0.5, abs=0.05)
    (moves,) = found.undetermined
    assert set(moves) == {"one", "one (2)"}
    assert abs(moves["one"]) == pytest.approx(0.25, abs=0.05)
    assert sum(moves.values()) == pytest.approx(0, abs=1e-9)
    assert any("undetermined" in said for said in found.sentences())


def test_different_sources_are_determined():
    each = [cloud(50, (0, 0), 0, "one"), cloud(50, (5, 0), 1, "two")]
    x = torch.cat((cloud(50, (0, 0), 2).features, cloud(50, (5, 0), 3).features))
    assert otdd.mixture(x, each, labels="none").undetermined == ()


LIMITED = [
    ({"max_weights": {"near": 0.25}}, {"near": 0.25}),
    ({"max_weights": {"near": 0.0, "far": 0.1}}, {"near": 0.0, "far": 0.1}),
    ({"max_rows": 150}, {"near": 0.4}),
    ({"max_rows": 180}, {"near": 1 / 3, "far": 80 / 180, "away": 40 / 180}),
]


@pytest.mark.parametrize(("given", "expected"), LIMITED, ids=lambda one: str(one)[:30])
def test_limits_are_tight(given, expected):
    each = [cloud(60, (0, 0), 0, "near"), cloud(80, (4, 0), 1, "far"), cloud(40, (0, 9), 2, "away")]
    target = cloud(90, (0, 0), 5, "t")
    found = mixed(target, each, **given)
    assert found.converged
    for name, weight in expected.items():
        assert found.weights[name] == pytest.approx(weight, abs=1e-6)
        assert found.weights[name] <= found.limits[name] + 1e-12
    assert sum(found.weights.values()) == pytest.approx(1, abs=1e-12)
    # A source at its limit would have more.
    if found.limits["near"] < 1:
        assert found.marginal_costs["near"] < 0
    # The bounds are those of allowed weights: uniform ones are, at max_rows=120.
    at = value(target, each, weights(found), found.details["epsilon"])
    assert found.bounds[0] - 1e-9 <= at <= found.bounds[1] + 1e-9


def test_a_penalty_draws_to_given_weights():
    each = [cloud(60, (0, 0), 0, "near"), cloud(80, (4, 0), 1, "far")]
    target = cloud(90, (0, 0), 5, "t")
    epsilon, last = 0.3, 1.0
    for penalty in (2.0, 8.0, 200.0):
        given = {"penalty": penalty, "towards": {"near": 0.3, "far": 0.7}, "epsilon": epsilon}
        found = mixed(target, each, **given)
        assert found.weights["near"] < last
        last = found.weights["near"]
        # A dense line search of the value with the penalty.
        ends = []
        for t in np.linspace(0.001, 0.999, 60):
            w = np.array([t, 1 - t])
            charge = penalty * float(np.sum(w * np.log(w / [0.3, 0.7])))
            ends.append(value(target, each, w, epsilon) + charge)
        assert found.bounds[0] <= min(ends) + 1e-9
        assert found.value <= min(ends) * (1 + 2e-3)
        assert found.transport <= found.value + 1e-12
    assert last == pytest.approx(0.3, abs=0.02)
    even = mixed(target, each, penalty=200.0, epsilon=epsilon)
    assert even.weights["near"] == pytest.approx(0.5, abs=0.02)


def test_classes_of_sources_stay_apart_and_labels_count():
    y = [k % 2 for k in range(60)]
    right = cloud(60, (0, 0), 0, "right", labels=[f"c{k}" for k in y])
    right.features[:, 0] += 6 * torch.tensor(y)
    target = cloud(60, (0, 0), 1, "t", labels=[f"c{k}" for k in y])
    target.features[:, 0] += 6 * torch.tensor(y)
    # The same points, but names that say nothing: classes by geometry.
    wrong = otdd.LabeledSamples(
        right.features + 0.01, torch.arange(60) // 30, ("c0", "c1"), name="wrong"
    )
    found = otdd.mixture(target, [wrong, right])
    assert found.weights["right"] > 0.9
    table = otdd.class_distances([wrong, right, target])
    again = otdd.mixture(target, [wrong, right], class_distances=table)
    assert again.weights == pytest.approx(found.weights, abs=1e-9)
    plain = otdd.mixture(target, [wrong, right], labels="none")
    assert plain.weights["right"] < 0.9


def test_unlabelled_targets_cosine_and_numbers():
    labelled = [
        cloud(40, (2, 1), 0, "a", labels=[0, 1] * 20),
        cloud(40, (1, 3), 1, "b", labels=[0, 1] * 20),
    ]
    target = cloud(30, (2, 1), 2, "t")
    found = mixed(target, labelled, ground="cosine")
    assert found.weights["a"] > 0.8
    with pytest.raises(InputError, match="no labels"):
        otdd.mixture(target, labelled)
    numbers = [
        otdd.LabeledSamples(
            one.features, None, (), name=one.name, targets=torch.full((40,), k) + one.features[:, 0]
        )
        for k, one in enumerate(labelled)
    ]
    aim = otdd.LabeledSamples(
        target.features, None, (), targets=torch.ones(30) + target.features[:, 0]
    )
    assert sum(otdd.mixture(aim, numbers, labels="continuous").weights.values()) == pytest.approx(1)


def test_the_rows_that_are_drawn():
    each = [
        cloud(60, (0, 0), 0, "a", labels=["x", "y"] * 30),
        cloud(60, (4, 0), 1, "b", labels=["y", "z"] * 30),
        cloud(60, (40, 0), 1, "c", labels=["y", "z"] * 30),
    ]
    target = cloud(60, (2, 0), 2, "t", labels=["x", "y"] * 30)
    found = otdd.mixture(target, each)
    rows = found.rows(50, seed=1)
    sizes = np.array([len(one) for one in rows.values()])
    assert sizes.sum() == 50
    assert np.abs(sizes - 50 * weights(found)).max() < 1
    assert all(len(set(one.tolist())) == len(one) for one in rows.values())
    dataset = found.dataset(50, seed=1)
    assert dataset.class_names == ("x", "y", "z")
    expected = torch.cat([one.features[rows[one.name]] for one in each])
    assert torch.equal(dataset.features, expected)
    drawn = [one.class_names[k] for one in each for k in one.labels[rows[one.name]]]
    assert [dataset.class_names[k] for k in dataset.labels] == drawn
    assert not torch.equal(found.dataset(50, seed=2).features, dataset.features)
    with pytest.raises(InputError, match=r"which has 60; draw \d+ or fewer, or .* max_rows=170"):
        found.rows(170)
    limited = otdd.mixture(target, each, max_rows=110)
    assert len(limited.dataset(110)) == 110


def test_rows_are_drawn_by_their_masses():
    masses = torch.tensor([1.0] * 20 + [0.0] * 20)
    one = otdd.LabeledSamples(torch.randn(40, 2), None, (), masses, name="half")
    found = otdd.mixture(torch.randn(30, 2), [one], labels="none")
    assert found.sizes == {"half": 20}
    assert found.rows(20)["half"].tolist() == list(range(20))


REFUSED = [
    ({"sources": []}, "1 to 200 sources, got 0"),
    ({"max_weights": {"c": 0.5}}, "max_weights names 'c', and the sources are a, b"),
    ({"max_weights": {"a": -1}}, "a weight, 0 or more"),
    ({"max_weights": {"a": 0.3, "b": 0.3}}, "sum to 0.6, and weights to 1"),
    ({"max_rows": 1000}, "80 rows are the most they allow"),
    ({"towards": {"a": 1}}, "towards= needs penalty="),
    ({"penalty": 1.0, "towards": {"a": 0}}, "towards must have a weight above 0"),
    ({"ground": "inner"}, "sqeuclidean or cosine, got inner"),
    ({"epsilon": 0.0}, "epsilon must be positive"),
    ({"subsample": 5}, "at least 39 subsamples"),
    ({"bound_width": 0}, "bound_width must be positive"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=lambda one: str(one)[:30])
def test_refusals(given, said):
    sources = {"a": cloud(40, (0, 0), 0), "b": cloud(40, (1, 0), 1)}
    arguments = {"sources": sources, "labels": "none"} | given
    with pytest.raises(InputError, match=said):
        otdd.mixture(cloud(30, (0, 0), 2), **arguments)


def test_time_that_is_over_is_told():
    target, each = problem(1)
    with pytest.warns(NotConvergedWarning, match="stopped by max_seconds"):
        found = mixed(target, each, max_seconds=1e-6)
    assert found.others == ()
    assert found.stopped_by == "max_seconds"


@pytest.mark.slow
def test_two_hundred_sources():
    each = [cloud(20, (math.cos(k) * 5, math.sin(k) * 5), k, f"s{k}", 0.4) for k in range(200)]
    target = cloud(200, (5, 0), 999, "t")
    found = mixed(target, each)
    assert found.converged
    assert found.bound_width <= 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("debias", [False, True])
def test_a_gpu_finds_the_same_mixture(debias):
    each = [cloud(300, (3 * k, 0), k, f"s{k}", labels=[0, 1] * 150) for k in range(4)]
    target = cloud(400, (1.5, 0), 9, "t", labels=[0, 1] * 200)
    given = {"debias": debias, "epsilon": 0.2}
    there = otdd.mixture(target, each, compute="cuda", **given)
    here = otdd.mixture(target, each, compute="cpu", **given)
    assert weights(there) == pytest.approx(weights(here), abs=0.01)
    assert there.value == pytest.approx(here.value, rel=3e-3)
    assert there.bounds[0] <= here.value * (1 + 1e-9) + 1e-9
