"""`otdd.mixture`: weights, bounds, limits, what it tells, and the rows that it draws."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import t as student

import otdd_flash as otdd
from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.mixing.mixture import weight_intervals
from otdd_flash.mixing.weights import Allowed
from otdd_flash.solver.solving import solve
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
    target, each = problem(seed)
    each = each[:2]
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
    assert next(iter(content)) == "target"
    assert not {"details", "sources"} & {*content}
    # What a property may keep is no field.
    vars(found)["kept"] = object()
    assert found.to_dict() == content
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


def test_copies_are_told_beside_a_source_at_its_limit():
    each = [cloud(50, (0, 0), 0, "one"), cloud(50, (0, 0), 0, "two"), cloud(50, (5, 0), 1, "three")]
    x = torch.cat((cloud(50, (0, 0), 2).features, cloud(50, (5, 0), 3).features))
    found = otdd.mixture(
        x, [*each, cloud(50, (0, 5), 4, "no")], labels="none", max_weights={"no": 0.0}
    )
    (moves,) = found.undetermined
    assert set(moves) == {"one", "two"}


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
    # The bounds are those of allowed weights.
    at = value(target, each, weights(found), found.details["epsilon"])
    assert found.bounds[0] - 1e-9 <= at <= found.bounds[1] + 1e-9


def test_limits_hold_where_epsilon_is_small():
    each = [cloud(30, (0, 0), 0, "near"), *(cloud(30, (30 + k, 0), k) for k in range(1, 4))]
    target = cloud(40, (0, 0), 9, "t")
    limits = {"near": 0.4, "cloud": 0.3, "cloud (2)": 0.3, "cloud (3)": 0.3}
    found = otdd.mixture(target, each, labels="none", epsilon=0.1, max_weights=limits)
    assert found.weights["near"] == pytest.approx(0.4)
    assert all(w <= limits[name] + 1e-12 for name, w in found.weights.items())
    assert found.bounds[0] <= found.bounds[1]
    assert found.converged


def test_a_penalty_draws_to_given_weights():
    each = [cloud(60, (0, 0), 0, "near"), cloud(80, (4, 0), 1, "far")]
    target = cloud(90, (0, 0), 5, "t")
    epsilon, last = 0.3, 1.0
    for penalty in (2.0, 8.0, 200.0):
        given = {"penalty": penalty, "towards": {"near": 0.3, "far": 0.7}, "epsilon": epsilon}
        found = mixed(target, each, **given)
        assert found.weights["near"] < last
        last = found.weights["near"]

        def charged(t, penalty=penalty):
            w = np.array([t, 1 - t])
            charge = penalty * float(np.sum(w * np.log(w / [0.3, 0.7])))
            return value(target, each, w, epsilon) + charge

        # A line search of the value with the penalty, which is convex.
        least = minimize_scalar(charged, bounds=(0.001, 0.999), options={"xatol": 1e-4}).fun
        assert found.bounds[0] <= least + 1e-9
        assert found.value <= least * (1 + 2e-3)
        assert found.transport <= found.value + 1e-12
    assert last == pytest.approx(0.3, abs=0.02)
    even = mixed(target, each, penalty=200.0, epsilon=epsilon)
    assert even.weights["near"] == pytest.approx(0.5, abs=0.02)


def test_a_penalty_makes_no_source_cheap_that_has_no_weight():
    each = [cloud(60, (0, 0), 0, "near"), cloud(60, (9, 0), 1, "far")]
    found = mixed(cloud(90, (0, 0), 5, "t"), each, penalty=0.3, epsilon=0.5)
    assert found.weights["far"] == 0
    assert found.marginal_costs["near"] == pytest.approx(0, abs=1e-9)
    assert found.marginal_costs["far"] > 1


def test_a_debiased_value_is_that_of_its_weights():
    """Sources far away have some mass in the search, and none in what is told."""
    each = [cloud(40, (0, 0), 0, "near"), cloud(40, (50, 0), 1, "far")]
    found = mixed(cloud(60, (0, 0), 5, "t"), each, debias=True, epsilon=0.5)
    assert found.weights["near"] == 1
    alone = found.others[0]
    assert alone.name == "near alone"
    assert found.value == pytest.approx(alone.value, abs=1e-4)
    assert found.bounds[0] <= alone.upper
    assert alone.lower <= found.bounds[1]


def test_a_source_too_far_for_the_precision_is_not_compared():
    each = {"a": cloud(30, (0, 0), 0), 1: cloud(30, (1000, 0), 1)}
    target = cloud(40, (0, 0), 5, "t")
    given = {"labels": "none", "epsilon": 0.1, "debias": True}
    found = otdd.mixture(target, each, max_weights={1: 0.9}, **given)
    assert found.weights == pytest.approx({"a": 1.0, "1": 0.0})
    assert found.others[0].name == "a alone"
    assert found.limits["1"] == 0.9
    assert any("not looked for" in said for said in found.sentences())


def test_subsamples_are_measured_as_the_whole(monkeypatch, tmp_path):
    """The epsilon between classes is that of the whole, and nothing of a subsample is cached."""
    used = []

    def intervals(compare, given, *_):
        used.append(compare.keywords)
        return [(0.0, 1.0)] * (len(given) - 1)

    monkeypatch.setattr("otdd_flash.mixing.mixture.weight_intervals", intervals)
    each = [cloud(20, (k, 0), k, f"s{k}", labels=[0, 1] * 10) for k in range(2)]
    metric = otdd.labels.Sinkhorn()
    target = cloud(20, (0, 0), 5, "t", labels=[0, 1] * 10)
    otdd.mixture(target, each, labels=metric, subsample=39, cache_dir=tmp_path)
    (one,) = used
    points = torch.cat([side.features for side in (*each, target)]).double()
    mean = float(torch.cdist(points, points).square().mean())
    assert one["metric"].epsilon == pytest.approx(0.01 * mean)
    assert one["cache_dir"] is None


def test_intervals_are_as_long_as_the_deviations_say(monkeypatch):
    """Half of the rows: weights deviate as those of all rows, sqrt((1/2) / (1 - 1/2)) = 1."""
    draw, drawn = np.random.default_rng(0), []

    def searched(*_):
        t = float(draw.normal(0.5, 0.03))
        drawn.append(t)
        return SimpleNamespace(w=np.array([t, 1 - t])), None

    monkeypatch.setattr("otdd_flash.mixing.mixture.searched", searched)
    given = [cloud(40, (0, 0), k) for k in range(3)]
    limits = Allowed(np.ones(2), 0.0, np.full(2, 0.5))
    sizes = set()

    def compare(parts):
        sizes.update(len(part) for part in parts)
        return None, None

    found = weight_intervals(compare, given, limits, 1e-3, np.array([0.98, 0.02]), 39, 0)
    reach = student.ppf(0.975, 38) * np.std(drawn, ddof=1)
    assert sizes == {20}
    assert found[0] == pytest.approx((0.98 - reach, 1.0))
    assert found[1] == pytest.approx((0.0, 0.02 + reach))


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
    # Numbers of the near source are 30 off.
    numbers = [
        otdd.LabeledSamples(
            one.features, None, (), name=one.name, targets=one.features[:, 0] + 30 * (1 - k)
        )
        for k, one in enumerate(labelled)
    ]
    aim = otdd.LabeledSamples(target.features, None, (), targets=target.features[:, 0])
    assert otdd.mixture(aim, numbers, labels="continuous").weights["b"] > 0.5
    assert otdd.mixture(aim, numbers, labels="none").weights["b"] < 0.5


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
    found = otdd.mixture(torch.randn(30, 2), [one, cloud(60, (9, 9), 0, "far")], labels="none")
    assert found.sizes == {"half": 20, "far": 60}
    assert found.weights["half"] == 1
    assert found.rows(20)["half"].tolist() == list(range(20))
    # Rows without mass count nowhere.
    assert found.others[-1].weights == (0.25, 0.75)
    with pytest.raises(InputError, match=r"draw 20 or fewer, or ask .* max_rows=80$"):
        found.rows(80)
    with pytest.raises(InputError, match=r"or add sources, as all together have 80$"):
        found.rows(81)


REFUSED = [
    ({"sources": []}, "1 to 200 sources, got 0"),
    ({"max_weights": {"c": 0.5}}, "max_weights names 'c', and the sources are a, b"),
    ({"max_weights": {"a": -1}}, "a weight, 0 to 1, got -1"),
    ({"max_weights": {"a": 50}}, "a weight, 0 to 1, got 50"),
    ({"penalty": 1.0, "towards": {"a": -1}}, "a weight, 0 or more, got -1"),
    ({"max_weights": {"a": 0.3, "b": 0.3}}, "sum to 0.6, and weights to 1"),
    ({"max_rows": 1000}, "weights to 1: lower max_rows to 80$"),
    # b gives 40 rows, which are nine tenths of 44.
    (
        {"max_rows": 1000, "max_weights": {"a": 0.1}},
        "weights to 1: lower max_rows to 44$",
    ),
    (
        {"max_rows": 50, "max_weights": {"a": 0.1}},
        "weights to 1: raise max_weights or lower max_rows to 44$",
    ),
    ({"max_weights": {"a": 0.3, "b": 0.2}, "max_rows": 90}, "max_weights, max_rows and towards"),
    (
        {"max_weights": {"a": 0.5}, "penalty": 1.0, "towards": {"a": 1}},
        "raise max_weights or give more sources a weight in towards$",
    ),
    ({"sources": cloud(40, (0, 0), 0)}, "sources must be a list of datasets.* LabeledSamples"),
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


def test_comparisons_end_when_the_time_is_over(monkeypatch):
    """One whose solves were cut short is not called the best."""
    target, each = problem(1)
    now = 0.0
    monkeypatch.setattr("otdd_flash.mixing.mixture.time.monotonic", lambda: now)

    def solved(*given, **options):
        nonlocal now
        now += 50.0
        assert given[1].max_seconds > 0
        return solve(*given, **options)

    monkeypatch.setattr("otdd_flash.mixing.mixture.solve", solved)
    assert len(mixed(target, each, max_seconds=1000.0).others) == 3
    now = 0.0
    assert mixed(target, each, max_seconds=120.0).others == ()


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
