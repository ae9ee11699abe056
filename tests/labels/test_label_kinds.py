"""Rows with several labels, and with numbers: their cost against dense float64 formulas."""

from __future__ import annotations

import warnings
from dataclasses import replace
from fractions import Fraction

import numpy as np
import ot
import pandas as pd
import pytest
import sklearn.datasets
import torch

import otdd_flash as otdd
from otdd_flash import memory
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.label_sets import LabelSets
from otdd_flash.labels import measure_classes, metric_of
from otdd_flash.operators import blocked
from otdd_flash.operators import comparison as comparisons
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.label_costs import (
    MOST_SETS,
    by_labels,
    embedding_of_sets,
    set_table,
    set_table_error,
)
from otdd_flash.samples import LabeledSamples
from tests.reference import entropic_transport
from tests.tiers import slow

DOUBLE = ComputeOptions("cpu", precision="double")
TIGHT = otdd.Converged(tolerance=1e-9)
EPSILON = 0.3
CLOSE = {"epsilon": EPSILON, "compute": DOUBLE, "solver": TIGHT}


def tagged(n, names, seed, *, weights=False, share=0.3, dim=3):
    """Points near the mean of the centres of their labels, one to all of them."""
    draw = torch.Generator().manual_seed(seed)
    count = len(names)
    indicator = torch.rand(n, count, generator=draw) < share
    indicator[torch.arange(n), torch.randint(count, (n,), generator=draw)] = True
    shares = indicator.double() / indicator.sum(1, keepdim=True)
    centres = 2 * torch.randn(count, dim, generator=draw, dtype=torch.float64)
    points = shares @ centres + torch.randn(n, dim, generator=draw, dtype=torch.float64)
    masses = torch.rand(n, generator=draw, dtype=torch.float64) + 0.1 if weights else None
    return LabeledSamples(points, indicator, tuple(names), masses, name=f"tagged {seed}")


SOURCE = tagged(40, "abcde", 1)
TARGET = tagged(30, "wxyz", 2, weights=True)


@pytest.fixture(params=["sets", "columns"])
def way(request, monkeypatch):
    """Compare sets of labels as classes, or as columns of points."""
    monkeypatch.setattr(comparisons, "MOST_SETS", 512 if request.param == "sets" else 0)
    return request.param


def label_cost(u, v, table):
    """u^T W v - u^T W_xx u / 2 - v^T W_yy v / 2, (n, m)."""
    k = u.shape[1]
    own, theirs = (((r @ w) * r).sum(1) for r, w in ((u, table[:k, :k]), (v, table[k:, k:])))
    return u @ table[:k, k:] @ v.T - own[:, None] / 2 - theirs / 2


def dense_costs(source, target, table, lambdas=(0.5, 0.5)):
    """The costs xy, xx and yy."""
    (u, v), k = (source.shares, target.shares), source.shares.shape[1]
    blocks = {
        "xy": (source, target, u, v, table),
        "xx": (source, source, u, u, table[:k, :k].repeat(2, 2)),
        "yy": (target, target, v, v, table[k:, k:].repeat(2, 2)),
    }
    return {
        name: lambdas[0] * torch.cdist(x.features, y.features).square()
        + lambdas[1] * label_cost(p, q, w)
        for name, (x, y, p, q, w) in blocks.items()
    }


def dense_value(costs, a, b, epsilon=EPSILON):
    cross = entropic_transport(costs["xy"], a, b, epsilon)[0]
    own = entropic_transport(costs["xx"], a, a, epsilon)[0]
    return cross - (own + entropic_transport(costs["yy"], b, b, epsilon)[0]) / 2


def no_euclidean():
    """Squared distances to the middle of a star whose tips are at distance 1 from each other."""
    table = torch.ones(9, 9, dtype=torch.float64) - torch.eye(9, dtype=torch.float64)
    table[0, 1:] = table[1:, 0] = 0.25
    return otdd.ClassDistances.from_full(5 * table, 5)


METRICS = {
    "means": {"labels": "means"},
    "gaussian": {"labels": "gaussian"},
    "not Euclidean": {"class_distances": no_euclidean()},
}


def table_of(source, target, labels="gaussian"):
    return measure_classes(source, target, metric_of(labels)).full


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("precision", ["double", "fast"])
def test_several_labels_cost_what_the_dense_formula_says(way, metric, precision):
    close = {"solver": TIGHT, "compute": DOUBLE} if precision == "double" else {}
    result = otdd.dataset_distance(SOURCE, TARGET, epsilon=EPSILON, **close, **METRICS[metric])
    costs = dense_costs(SOURCE, TARGET, result.class_distances.full)
    expected = dense_value(costs, SOURCE.masses, TARGET.masses)
    assert result.value == pytest.approx(expected, abs=1e-7 if close else 5e-3)
    assert result.bounds[0] - 1e-9 <= expected <= result.bounds[1] + 1e-9
    assert result.mean_cost == pytest.approx(float(SOURCE.masses @ costs["xy"] @ TARGET.masses))


def test_w_is_measured_between_clouds_of_labels():
    (names, counts), shares = (SOURCE.label_names, SOURCE.label_counts()), SOURCE.shares
    table = table_of(SOURCE, TARGET, "means")
    assert names == tuple("abcde")
    assert counts == (shares > 0).sum(0).tolist()
    mine = shares * SOURCE.masses[:, None]
    theirs = TARGET.shares * TARGET.masses[:, None]
    means = torch.cat(
        [(m / m.sum(0)).T @ s.features for m, s in ((mine, SOURCE), (theirs, TARGET))]
    )
    torch.testing.assert_close(table, torch.cdist(means, means).square())


def test_one_label_a_row_is_a_class(way):
    labels = torch.arange(40) % 5
    points = SOURCE.features
    classes = LabeledSamples(points, labels, tuple("abcde"))
    alone = LabelSets(tuple("abcde"), torch.eye(5, dtype=torch.bool))
    sets = LabeledSamples(points, labels, alone.set_names, label_sets=alone)
    other = LabeledSamples(TARGET.features, torch.arange(30) % 3, tuple("xyz"))
    found = [otdd.dataset_distance(side, other, **CLOSE) for side in (classes, sets)]
    assert found[0].value == pytest.approx(found[1].value, abs=1e-9)
    assert torch.equal(found[0].class_distances.full, found[1].class_distances.full)
    assert sets.label_names == classes.class_names


def test_an_indicator_of_one_label_a_row_is_of_classes():
    labels = torch.arange(40) % 5
    names = tuple("abcde")
    classes = LabeledSamples(SOURCE.features, labels, names)
    hot = torch.nn.functional.one_hot(labels)
    other = LabeledSamples(TARGET.features, torch.arange(30) % 3, tuple("xyz"))
    for given in (
        LabeledSamples(SOURCE.features, hot, names),
        LabeledSamples.from_arrays(SOURCE.features, [[names[label]] for label in labels]),
        LabeledSamples.from_arrays(SOURCE.features, pd.DataFrame(hot.numpy(), columns=list(names))),
        otdd.embed((SOURCE.features.numpy(), pd.DataFrame(hot.numpy() > 0, columns=list(names)))),
    ):
        assert given.label_sets is None
        assert given.fingerprint == classes.fingerprint
    sides = [(side, other) for side in (classes, LabeledSamples(SOURCE.features, hot, names))]
    slopes = [otdd.dataset_distance(*pair, **CLOSE).contributions() for pair in sides]
    assert slopes[0].through_classes
    assert slopes[1].through_classes
    assert torch.equal(slopes[0].values, slopes[1].values)
    assert torch.equal(*(otdd.sliced_distances(list(pair)).values for pair in sides))
    floors = [otdd.noise_floor(*pair, **CLOSE) for pair in sides]
    assert floors[0] == floors[1]
    # Rows that have one label when others are left out are of classes too.
    kept = SOURCE.keep_labels([0])
    assert kept.label_sets is None
    assert kept.class_names == ("a",)


def test_the_order_of_labels_changes_nothing(way):
    def distance(side):
        return otdd.dataset_distance(side, TARGET, **CLOSE)

    order = [3, 0, 4, 1, 2]
    indicator = SOURCE.shares > 0
    turned = LabeledSamples(SOURCE.features, indicator[:, order], tuple("abcde"[k] for k in order))
    assert distance(turned).value == pytest.approx(distance(SOURCE).value, abs=1e-9)


def test_a_doubled_label_changes_nothing_where_it_is_alone(way):
    """Rows that have it have then two labels, at distance 0 from each other."""
    labels = torch.nn.functional.one_hot(torch.arange(40) % 3)
    plain = LabeledSamples(SOURCE.features, labels, tuple("abc"))
    doubled = LabeledSamples(SOURCE.features, labels[:, [0, 1, 2, 2]], tuple("abcC"))
    values = [otdd.dataset_distance(side, TARGET, **CLOSE).value for side in (plain, doubled)]
    assert values[0] == pytest.approx(values[1], abs=1e-9)


def test_labels_that_are_all_alike_leave_features_alone(way):
    every = [
        LabeledSamples(side.features, torch.ones(len(side), 3), tuple("abc"), side.weights)
        for side in (SOURCE, TARGET)
    ]
    table = table_of(*every)
    found = otdd.dataset_distance(*every, **CLOSE)
    plain = otdd.dataset_distance(*every, labels="none", **CLOSE)
    assert float(table[:3, :3].abs().max()) == 0
    # The cost is larger by one number everywhere, which the self terms do not have.
    assert found.value == pytest.approx(plain.value + float(table[0, 3]) / 2, abs=1e-8)


def test_a_dataset_is_at_distance_0_from_itself_and_a_shuffled_copy_within_bounds(way):
    same = otdd.dataset_distance(SOURCE, SOURCE, epsilon=EPSILON, compute=DOUBLE)
    assert (same.value, same.bounds) == (0, (0, 0))
    shuffled = SOURCE.take(torch.randperm(40, generator=torch.Generator().manual_seed(0)))
    found = otdd.dataset_distance(SOURCE, shuffled, epsilon=EPSILON, compute=DOUBLE)
    assert found.bounds[0] <= 0 <= found.bounds[1]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("debias", [True, False])
def test_exact_transport_of_several_labels(way, debias, metric):
    result = otdd.dataset_distance(
        SOURCE, TARGET, epsilon=0, debias=debias, compute=DOUBLE, **METRICS[metric]
    )
    costs = dense_costs(SOURCE, TARGET, result.class_distances.full)
    a, b = SOURCE.masses.numpy(), TARGET.masses.numpy()
    expected = ot.emd2(a, b, costs["xy"].numpy())
    if debias:
        expected -= (ot.emd2(a, a, costs["xx"].numpy()) + ot.emd2(b, b, costs["yy"].numpy())) / 2
    assert result.value == pytest.approx(expected, abs=1e-8)
    assert result.bounds[0] - 1e-9 <= expected <= result.bounds[1] + 1e-9


@pytest.mark.parametrize("lambdas", [(0.0, 0.5), (0.5, 0.0), (2.0, 0.25)])
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("metric", ["gaussian", *slow(["not Euclidean"])])
def test_weights_of_both_parts(way, lambdas, debias, metric):
    lambda_x, lambda_y = lambdas
    result = otdd.dataset_distance(
        SOURCE,
        TARGET,
        lambda_x=lambda_x,
        lambda_y=lambda_y,
        debias=debias,
        **CLOSE,
        **METRICS[metric],
    )
    costs = dense_costs(SOURCE, TARGET, result.class_distances.full, lambdas)
    a, b = SOURCE.masses, TARGET.masses
    expected = (
        dense_value(costs, a, b) if debias else entropic_transport(costs["xy"], a, b, EPSILON)[0]
    )
    assert result.value == pytest.approx(expected, abs=1e-7)


def test_columns_are_the_table_and_their_error_is_bounded():
    """Where W is not Euclidean, columns of negative sign hold the rest."""
    for table, euclidean in (
        (table_of(SOURCE, TARGET, "means"), True),
        (no_euclidean().full, False),
    ):
        ground = otdd.GroundCost()
        found = embedding_of_sets(table, (SOURCE, TARGET), ground)
        assert (found.negative == 0) == euclidean
        z = torch.cat(found.tables)
        signs = torch.ones(z.shape[1], dtype=torch.float64)
        signs[len(signs) - found.negative :] = -1
        gaps = (z[:, None] - z).square() @ signs * found.lambda_x
        error = (gaps - ground.lambda_y * set_table(table, (SOURCE, TARGET))).abs().max()
        assert error <= found.error < 1e-9 * float(table.max())


def test_bounds_pay_for_the_rounding_of_label_costs(way):
    compared = Comparison.between(SOURCE, TARGET, EPSILON, no_euclidean().full, compute=DOUBLE)
    assert compared.cost_error == compared.label_error > 0
    assert (compared.embedding is None) == (way == "sets")


def test_rows_without_labels_are_refused_by_number():
    indicator = torch.tensor([[1, 0], [0, 0], [1, 1]])
    with pytest.raises(InputError, match="1 row has no label, at row 1; leave those rows out"):
        LabeledSamples(torch.zeros(3, 2), indicator, ("a", "b"))


@pytest.mark.parametrize(
    "labels",
    [
        [["cat"], ["dog", "cat"], ["dog"]],
        [{"cat"}, {"dog", "cat"}, {"dog"}],
        [("cat",), ("cat", "dog"), ("dog", "dog")],
        np.array([["cat"], ["dog", "cat"], ["dog"]], dtype=object),
    ],
)
def test_lists_and_sets_of_labels(labels):
    found = LabeledSamples.from_arrays(torch.zeros(3, 2), labels)
    assert found.label_names == ("cat", "dog")
    assert found.shares.tolist() == [[1, 0], [0.5, 0.5], [0, 1]]
    assert set(found.class_names) == {"cat", "cat+dog", "dog"}


def test_samples_keep_their_labels_where_rows_are_taken():
    rows = torch.tensor([5, 3, 11])
    taken = SOURCE.take(rows)
    assert torch.equal(taken.shares, SOURCE.shares[rows])
    kept = SOURCE.keep_labels([4, 0])
    mine = (SOURCE.shares[:, [4, 0]] > 0).any(1)
    assert kept.label_names == ("e", "a")
    assert torch.equal(kept.shares > 0, SOURCE.shares[mine][:, [4, 0]] > 0)
    assert SOURCE.fingerprint == SOURCE.to("cpu").fingerprint != taken.fingerprint


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("debias", [True, False])
def test_contributions_are_slopes_by_masses(way, metric, debias):
    settings = CLOSE | {"debias": debias}
    result = otdd.dataset_distance(SOURCE, TARGET, **settings, **METRICS[metric])
    found = result.contributions()
    assert not found.through_classes
    for row in (0, 11):
        values = []
        for step in (1e-4, -1e-4):
            weights = SOURCE.masses.clone()
            weights[row] *= 1 + step
            side = LabeledSamples(
                SOURCE.features,
                SOURCE.labels,
                SOURCE.class_names,
                weights,
                label_sets=SOURCE.label_sets,
            )
            moved = otdd.dataset_distance(
                side, TARGET, class_distances=result.class_distances, **settings
            )
            values.append(moved.value)
        mass = float(SOURCE.masses[row])
        # Along the simplex: the mass of a row grows by h a_i (1 - a_i), that of all others shrinks.
        slope = (values[0] - values[1]) / 2e-4 / mass / (1 - mass)
        assert float(found.values[row]) == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_gradients_by_w(way):
    """The table of sets is a differentiable function of W between labels."""
    sides = SOURCE, TARGET
    full = table_of(*sides).requires_grad_()
    loss = otdd.sinkhorn_loss(
        SOURCE.features,
        TARGET.features,
        b=TARGET.masses,
        epsilon=EPSILON,
        labels_x=SOURCE.labels,
        labels_y=TARGET.labels,
        class_table=otdd.labels.set_table(full, sides),
        class_totals=(SOURCE.class_total, TARGET.class_total),
        options=TIGHT,
    )
    loss.backward()
    for k, other in ((0, 6), (1, 3)):
        values = []
        for step in (1e-4, -1e-4):
            table = full.detach().clone()
            table[k, other] += step
            if (k < 5) == (other < 5):
                table[other, k] += step
            else:
                table[other, k] = table[k, other]
            given = otdd.ClassDistances.from_full(table, 5)
            moved = otdd.dataset_distance(*sides, class_distances=given, **CLOSE)
            values.append(moved.value)
        slope = float(full.grad[k, other] + full.grad[other, k])
        assert slope == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-5, abs=1e-9)


def test_pairwise_distances_are_those_of_pairs(way):
    third = tagged(25, "abw", 3)
    found = otdd.pairwise_distances([SOURCE, TARGET, third], **CLOSE)
    assert found.class_distances.class_names[0] == tuple("abcde")
    expected = otdd.dataset_distance(TARGET, third, **CLOSE)
    assert float(found.values[1, 2]) == pytest.approx(expected.value, abs=1e-8)


@pytest.mark.parametrize("epsilon", [0, *slow([EPSILON])])
def test_pairwise_distances_by_tables_of_no_points(way, epsilon):
    """The columns of each pair are other ones, and what they add on one side does not cancel."""
    sides = [SOURCE, TARGET, tagged(25, "abw", 3)]
    draw = torch.Generator().manual_seed(0)
    full = 5 * torch.rand(12, 12, generator=draw, dtype=torch.float64)
    full = (full + full.T).fill_diagonal_(0)
    names = [side.label_names for side in sides]
    table = otdd.JointClassDistances(full, tuple("xyz"), names)
    settings = {"epsilon": epsilon, "compute": DOUBLE}
    if epsilon:
        settings["solver"] = TIGHT
    found = otdd.pairwise_distances(sides, class_distances=table, **settings)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        block = table.between(i, j)
        one = otdd.dataset_distance(sides[i], sides[j], class_distances=block, **settings)
        assert float(found.values[i, j]) == pytest.approx(one.value, abs=1e-8)
        assert float(found.lower[i, j]) <= one.bounds[1] + 1e-12
        assert float(found.upper[i, j]) >= one.bounds[0] - 1e-12


def test_results_are_read_back(way, tmp_path):
    found = otdd.dataset_distance(SOURCE, TARGET, epsilon=EPSILON)
    read = otdd.DistanceResult.load(found.save(tmp_path / "run"))
    assert read.source.fingerprint == SOURCE.fingerprint
    assert read.value == found.value
    assert torch.equal(read.barycentric_map(), found.barycentric_map())
    assert read.mean_cost == pytest.approx(found.mean_cost)
    assert read.class_names == (tuple("abcde"), tuple("wxyz"))


def test_the_coupling_of_labels(way):
    found = otdd.dataset_distance(SOURCE, TARGET, **CLOSE)
    coupling = found.class_coupling()
    plan = found.apply_plan(torch.eye(30))
    expected = SOURCE.shares.T @ plan.double() @ TARGET.shares
    torch.testing.assert_close(coupling, expected / expected.sum(), atol=1e-6, rtol=0)


def test_small_labels_are_dropped():
    indicator = SOURCE.shares > 0
    indicator[:, 4] = False
    indicator[:, 0] |= ~indicator.any(1)
    indicator[0] = torch.tensor([False, False, False, False, True])
    side = LabeledSamples(SOURCE.features, indicator, tuple("abcde"), name="few")
    with pytest.warns(DataNotice, match=r"dropped classes of few with fewer .*e \(1\)"):
        found = otdd.dataset_distance(side, TARGET, epsilon=EPSILON, min_class_size=2)
    assert found.source.label_names == tuple("abcd")
    assert len(found.source) == 39


def test_subsamples_and_halves_of_rows_with_several_labels():
    settings = {"epsilon": EPSILON}
    found = otdd.dataset_distance(SOURCE, TARGET, **settings)
    interval = otdd.subsample_interval(SOURCE, TARGET, found.value, count=40, **settings)
    assert interval.lower < found.value < interval.upper
    floor = otdd.noise_floor(SOURCE, TARGET, **settings)
    assert floor.size == 15


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("drawn", [otdd.noise_floor, otdd.subsample_interval])
def test_parts_that_may_lack_a_label_are_told(drawn):
    hot = torch.cat((SOURCE.shares > 0, torch.zeros(40, 1).bool()), 1)
    hot[:3, 5] = True
    side = LabeledSamples(SOURCE.features, hot, (*"abcde", "rare"), name="tagged 1")
    given = {"epsilon": EPSILON}
    if drawn is otdd.subsample_interval:
        given |= {"value": otdd.dataset_distance(side, TARGET, **given).value, "count": 40}
    said = (
        r"parts of 1\d of the 40 rows of tagged 1 may lack labels .*: rare \(3\); min_class_size="
    )
    with pytest.warns(DataNotice, match=said):
        drawn(side, TARGET, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataNotice)
        drawn(SOURCE, TARGET, **given)


def test_a_sliced_distance_refuses_several_labels():
    with pytest.raises(InputError, match="tagged 1 has several labels a row"):
        otdd.sliced_distances([SOURCE, TARGET])


@pytest.mark.parametrize("kind", ["sets", "columns", "numbers"])
def test_points_of_files(kind, tmp_path, monkeypatch):
    """Few sets stream; columns need points in memory, and read them where they fit."""
    monkeypatch.setattr(comparisons, "MOST_SETS", 512 if kind == "sets" else 0)
    path = tmp_path / "x.npy"
    np.save(path, SOURCE.features.numpy())
    parts = {"labels": SOURCE.labels, "class_names": SOURCE.class_names}
    parts["label_sets"] = SOURCE.label_sets
    target, labels = TARGET, "means"
    if kind == "numbers":
        parts = {"labels": None, "class_names": (), "targets": torch.arange(40.0)}
        target = LabeledSamples(TARGET.features, None, (), targets=torch.arange(30.0))
        labels = "continuous"
    source = LabeledSamples(otdd.features_file(path), **parts)
    settings = {"epsilon": EPSILON, "labels": labels}
    fits = otdd.dataset_distance(source, target, **settings, compute=DOUBLE)
    monkeypatch.setattr(comparisons, "ASSUMED_FREE", 0)
    monkeypatch.setattr(blocked, "LEAST_POINTS", 16)
    small = ComputeOptions("cpu", precision="double", memory_budget=4096)
    if kind == "sets":
        found = otdd.dataset_distance(source, target, **settings, compute=small)
        assert found.streamed is not None
        assert found.value == pytest.approx(fits.value, abs=1e-6)
        return
    with pytest.raises(
        InputError, match=r"columns of points in memory .* where these are streamed"
    ):
        otdd.dataset_distance(source, target, **settings, compute=small)


def test_relaxed_marginals_of_several_labels(monkeypatch):
    settings = CLOSE | {"unbalanced": 1.0}
    found = []
    for most in (512, 0):
        monkeypatch.setattr(comparisons, "MOST_SETS", most)
        found.append(otdd.dataset_distance(SOURCE, TARGET, labels="means", **settings))
    assert found[0].value == pytest.approx(found[1].value, abs=1e-7)
    left = found[0].unmatched()
    assert [each.name for each in left.classes] == list("abcdewxyz")
    assert sum(each.mass for each in left.classes[:5]) == pytest.approx(1)
    for most in (512, 0):
        monkeypatch.setattr(comparisons, "MOST_SETS", most)
        with pytest.raises(InputError, match="class distances of several labels are below 0 here"):
            otdd.dataset_distance(SOURCE, TARGET, class_distances=no_euclidean(), **settings)


def test_the_table_of_sets_is_as_exact_as_its_bound_says():
    """Against rational arithmetic of the same W and shares 1 / k."""
    table = table_of(SOURCE, TARGET)
    found, error = set_table(table, (SOURCE, TARGET)), set_table_error(table, otdd.GroundCost())
    members = [side.label_sets.members.tolist() for side in (SOURCE, TARGET)]
    w = [[Fraction(value) for value in row] for row in table.tolist()]

    def mean(one, other, at_one, at_other):
        pairs = [(k, m) for k, on in enumerate(one) if on for m, there in enumerate(other) if there]
        return sum(w[at_one + k][at_other + m] for k, m in pairs) / Fraction(len(pairs))

    for i, one in enumerate(members[0][:6]):
        for j, other in enumerate(members[1][:6]):
            exact = mean(one, other, 0, 5) - (mean(one, one, 0, 0) + mean(other, other, 5, 5)) / 2
            gap = abs(Fraction(float(found[i, len(members[0]) + j])) - exact)
            assert gap / 2 <= Fraction(error)
    assert error < 1e-12 * float(table.max())


def test_scikit_learns_rows_with_several_labels(way):
    sides = []
    for seed, size in ((0, 60), (1, 50)):
        x, u = sklearn.datasets.make_multilabel_classification(
            size, 6, n_classes=4, allow_unlabeled=False, random_state=seed
        )
        sides.append(LabeledSamples.from_arrays(x / 10, u))
    found = otdd.dataset_distance(*sides, **CLOSE)
    costs = dense_costs(*sides, found.class_distances.full)
    expected = dense_value(costs, sides[0].masses, sides[1].masses)
    assert found.value == pytest.approx(expected, abs=1e-7)
    assert found.bounds[0] - 1e-9 <= expected <= found.bounds[1] + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["means", "not Euclidean"])
def test_kernels_see_features(way, metric):
    """In Triton's interpreter, with self terms that need a column side of their own."""
    settings = {"epsilon": EPSILON, **METRICS[metric]}
    found = otdd.dataset_distance(
        SOURCE, TARGET, compute=ComputeOptions("cpu", "triton"), **settings
    )
    costs = dense_costs(SOURCE, TARGET, found.class_distances.full)
    expected = dense_value(costs, SOURCE.masses, TARGET.masses)
    assert found.divergence.backend.startswith("triton")
    assert found.value == pytest.approx(expected, abs=5e-3)
    assert found.bounds[0] <= expected <= found.bounds[1]


def test_a_gradient_by_sets_is_pulled_back_to_labels():
    sides = SOURCE, TARGET
    table = table_of(*sides).requires_grad_()
    wide = set_table(table, sides)
    given = torch.randn(wide.shape, generator=torch.Generator().manual_seed(0), dtype=wide.dtype)
    (expected,) = torch.autograd.grad((wide * given).sum(), table)
    torch.testing.assert_close(by_labels(given, sides), expected)


def test_a_label_called_like_a_set_is_told_apart():
    names, rows = ("a", "b", "a+b"), torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 0]])
    x = torch.eye(3)
    one = LabeledSamples(x, rows, names)
    other = LabeledSamples(x, torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 0]]), names)
    assert set(one.class_names) == {"a", "b", "a+b"}
    assert set(other.class_names) == {r"a\+b", "b", r"a+a\+b+b"}
    assert one.fingerprint != other.fingerprint
    assert otdd.dataset_distance(one, other, labels="means", epsilon=0.1).value > 0


def test_tables_of_sets_of_whole_numbers_and_of_arrays():
    source, target = (np.eye(2), [["a"], ["a", "b"]]), (np.eye(2), [["c"], ["c", "d"]])
    table = 4 * (1 - torch.eye(4, dtype=torch.int64))
    found = set_table(table, (source, target))
    sides = [LabeledSamples.from_arrays(*side) for side in (source, target)]
    assert found.dtype == torch.float64
    assert torch.equal(found, set_table(table.double(), sides))
    # The shares of a set of two labels are halves, which whole numbers cannot hold.
    assert found[0, 1] == 1


@pytest.mark.parametrize(
    ("table", "sides", "message"),
    [
        (torch.ones(3, 3), 2, r"have the shape \(3, 3\) for 5 \+ 4 labels; give W \(9, 9\)"),
        (torch.ones(9, 9), 1, "takes the source and the target, got 1 datasets"),
        (torch.ones(9, 9, dtype=torch.complex64), 2, "class distances must be real, got complex64"),
    ],
)
def test_what_tables_of_sets_are_made_of_is_checked(table, sides, message):
    with pytest.raises(InputError, match=message):
        set_table(table, (SOURCE, TARGET)[:sides])


@pytest.mark.parametrize(
    "settings", [{"labels": "none"}, {"labels": "means", "lambda_y": 0.0}], ids=str
)
@pytest.mark.parametrize("ground", ["sqeuclidean", "inner"])
def test_many_sets_that_cost_nothing_need_no_columns(settings, ground, monkeypatch):
    monkeypatch.setattr(comparisons, "MOST_SETS", 0)
    monkeypatch.setattr(comparisons, "embedding_of_sets", None)
    if ground == "inner" and settings["labels"] != "none":
        settings = {"class_distances": no_euclidean(), "lambda_y": 0.0}
    rest = CLOSE | {"ground": ground}
    found = otdd.dataset_distance(SOURCE, TARGET, **settings, **rest)
    bare = [LabeledSamples(side.features, None, (), side.weights) for side in (SOURCE, TARGET)]
    expected = otdd.dataset_distance(*bare, labels="none", **rest)
    assert found.value == expected.value
    assert torch.equal(found.barycentric_map(), expected.barycentric_map())


def test_columns_are_appended_once():
    sides = [
        LabeledSamples(side.features, None, (), targets=torch.arange(float(len(side))))
        for side in (SOURCE, TARGET)
    ]
    found = Comparison.prepare(sides, otdd.GroundCost(), DOUBLE, target_scale=(2.0,))
    found = found.with_classes(None)
    assert [side.dim for side in found.transformed] == [4, 4]
    assert [side.dim for side in found.unweighted(0, 1).transformed] == [4, 4]
    assert [side.dim for side in found.with_points(*sides).transformed] == [4, 4]
    with pytest.raises(AssertionError, match="have columns of labels already"):
        found.with_classes(None)


@pytest.mark.parametrize("kind", ["sets", "numbers"])
def test_columns_that_do_not_fit_are_refused_before_they_are_made(kind, monkeypatch):
    monkeypatch.setattr(comparisons, "MOST_SETS", 0)
    sides, table, added = [SOURCE, TARGET], table_of(SOURCE, TARGET, "means"), 3
    scale = None
    if kind == "numbers":
        sides = [
            LabeledSamples(side.features, None, (), targets=torch.rand(len(side), 3))
            for side in sides
        ]
        table, scale = None, (1.0, 1.0, 1.0)
    found = Comparison.prepare(sides, otdd.GroundCost(), DOUBLE, target_scale=scale)
    monkeypatch.setattr(memory, "ASSUMED_FREE", 0)
    # The points with their columns alone, in float64.
    monkeypatch.setattr(memory, "free_memory", lambda device: 8 * 70 * (3 + added))
    monkeypatch.setattr(comparisons.LabelEmbedding, "appended", None)
    with pytest.raises(InputError, match=r"^not enough memory on cpu for .* dimension 6: at least"):
        found.with_classes(table)


@pytest.mark.parametrize("more", [0, 1])
def test_sets_up_to_a_number_are_classes(more):
    count = MOST_SETS + more
    labels = len(bin(count)) - 2
    indicator = (torch.arange(1, count + 1)[:, None] >> torch.arange(labels)) % 2 == 1
    names = tuple(f"label {k}" for k in range(labels))
    many = LabeledSamples(torch.ones(count, 1), indicator, names)
    few = LabeledSamples(torch.ones(2, 1), torch.eye(2, dtype=torch.bool), ("a", "b"))
    table = 1 - torch.eye(labels + 2, dtype=torch.float64)
    for sides in ((many, few), (few, many)):
        found = Comparison.prepare(sides, otdd.GroundCost(), DOUBLE).with_classes(table)
        assert (found.embedding is None) == (more == 0)
        assert sum(side.class_total for side in found.transformed) == (2 if more else count + 2)


def test_labels_that_are_not_compared_meet_rows_without_any():
    source, target = tagged(30, ["a", "b", "c"], 0), tagged(20, ["a", "b"], 1)
    sides = source.features, target.features
    given = CLOSE | {"labels": "none"}
    expected = otdd.dataset_distance(*sides, **given)
    for pair in ((source, sides[1]), (sides[0], target)):
        found = otdd.dataset_distance(*pair, **given)
        assert found.value == pytest.approx(expected.value, rel=1e-6)


def test_labels_of_sets_are_replaced_by_an_indicator_or_with_their_sets():
    hot = SOURCE.shares.flip(0) > 0
    for names in (SOURCE.class_names, tuple("abcde")):
        found = replace(SOURCE, labels=hot, class_names=names)
        assert found.label_names == tuple("abcde")
        assert torch.equal(found.shares > 0, hot)
    found = replace(SOURCE, labels=hot[:, :2] | ~hot[:, :2].any(1)[:, None], class_names=("p", "q"))
    assert found.label_names == ("p", "q")
    plain = replace(SOURCE, labels=torch.arange(40) % 2, class_names=("p", "q"), label_sets=None)
    assert plain.class_names == ("p", "q")
    message = r"class_names must be those of label_sets, .* got \('p', 'q'\); .*label_sets=None"
    with pytest.raises(InputError, match=message):
        replace(SOURCE, labels=torch.arange(40) % 2, class_names=("p", "q"))
    with pytest.raises(InputError, match="class_names must be those of label_sets"):
        replace(SOURCE, label_sets=SOURCE.label_sets.take([0]))
    with pytest.raises(InputError, match="label_sets must be LabelSets, got 'x'"):
        replace(SOURCE, label_sets="x")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.bool), "each set has a label, and number 0 has none"),
        (torch.eye(2), r"members must be \(S, 2\) of bool, .* got .* \(2, 2\) torch.float32"),
        (torch.ones(2, 3, dtype=torch.bool), r"members must be \(S, 2\) of bool"),
        (torch.ones(2, dtype=torch.bool), r"members must be \(S, 2\) of bool"),
        (np.eye(2, dtype=bool), r"members must be \(S, 2\) of bool, .* got ndarray"),
    ],
)
def test_members_of_sets_are_checked(members, message):
    with pytest.raises(InputError, match=message):
        LabelSets(("a", "b"), members)
