"""Rankings of rows with several labels, with numbers, and by trees, against dense formulas."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import reference
import torch
from ranking.libraries import truth
from ranking.test_race import check

import otdd_flash as otdd
from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import InputError
from otdd_flash.labels import metric_of
from otdd_flash.operators import comparison
from otdd_flash.ranking.bounds import class_tables, lowest_by_moments, moments_of
from otdd_flash.ranking.index import digest_of

TAGS = ("a", "b", "c")
TREE = {"a": "ab", "b": "ab", "ab": "root", "c": ("root", 3.0)}


def tagged(rng, *, weighted=False, scale=1.0):
    """Rows of one to three labels, of which some are far from others."""
    size, dim = int(rng.integers(8, 16)), 2
    tags = rng.random((size, 3)) < rng.uniform(0.2, 0.7, 3)
    tags[np.arange(size), rng.integers(0, 3, size)] = True
    features = tags @ rng.normal(size=(3, dim)) * 2 + rng.normal(size=(size, dim)) * 0.5
    features = scale * features
    weights = rng.uniform(0.2, 1, size) if weighted else None
    return otdd.LabeledSamples(features.astype("f4"), tags, TAGS, weights)


def numbered(rng, columns=2):
    """Rows with numbers far from 0, of which one column is a thousand times the other."""
    size = int(rng.integers(6, 16))
    features = rng.normal(size=(size, 2)) * rng.uniform(0.3, 1.5) + rng.normal(size=2)
    numbers = (2000 + rng.normal(size=(size, 2)) * rng.uniform(2, 9)) * [1, 1000]
    numbers = numbers[:, :columns]
    return otdd.LabeledSamples(features.astype("f4"), None, (), targets=numbers)


def shares(side):
    """The part that each label is of a row (n, V)."""
    if side.label_sets is None:
        return torch.eye(len(side.class_names), dtype=torch.float64)[side.labels]
    of_rows = side.label_sets.members[side.labels].double()
    return of_rows / of_rows.sum(1, keepdim=True)


def label_table(sides, labels):
    """W between the labels of both sides, by formulas."""
    if labels == "tree":
        names = [name for side in sides for name in side.label_names]
        length = {("a", "b"): 2.0, ("a", "c"): 5.0, ("b", "c"): 5.0}
        rows = [[0.0 if k == c else length[min(k, c), max(k, c)] for c in names] for k in names]
        return torch.tensor(rows, dtype=torch.float64)
    clouds = []
    for side in sides:
        for part in shares(side).T:
            masses = side.masses * part
            some = masses > 0
            clouds.append((side.features[some].double(), masses[some] / masses.sum()))
    if labels == "means":
        means = torch.stack([masses @ points for points, masses in clouds])
        return (means[:, None] - means).square().sum(2)
    rows = [[reference.bures_wasserstein(*one, *other) for other in clouds] for one in clouds]
    return torch.tensor(rows, dtype=torch.float64)


def costs(x, y, labels, scale=None, weights=(0.5, 0.5)):
    """The cost (n, m) between rows."""
    gaps = (x.features.double()[:, None] - y.features.double()).square().sum(2)
    if scale is not None:
        of_labels = ((x.targets[:, None] - y.targets) / torch.tensor(scale)).square().sum(2)
    else:
        table, u, v = label_table((x, y), labels), shares(x), shares(y)
        cut = u.shape[1]
        w, own, others = table[:cut, cut:], table[:cut, :cut], table[cut:, cut:]
        half_x, half_y = ((u @ own) * u).sum(1) / 2, ((v @ others) * v).sum(1) / 2
        of_labels = u @ w @ v.T - half_x[:, None] - half_y
    return weights[0] * gaps + weights[1] * of_labels


def transport(x, y, epsilon, how, rho):
    given = costs(x, y, *how), x.masses, y.masses
    if epsilon == 0:
        return float(ot.emd2(given[1].numpy(), given[2].numpy(), given[0].numpy()))
    if rho is not None:
        return reference.unbalanced_transport(*given, epsilon, (rho, rho))[0]
    return reference.entropic_transport(*given, epsilon)[0]


def library(seed, make):
    """A query and members, far and near; one member repeats rows in another order."""
    rng = np.random.default_rng(seed)
    query = make(rng)
    members = {f"m{k}": make(rng) for k in range(4)}
    members["turned"] = members["m0"].take(torch.arange(len(members["m0"]) - 1, -1, -1))
    return query, members


def check_library(query, members, index, how, seed, rho=None):
    values = truth(query, members, index.settings.epsilon, transport, how=how, rho=rho)
    for ordered in (False, True):
        ranking = otdd.nearest(query, index, 2, ordered=ordered)
        check(ranking, values, 2, ordered=ordered)
        assert all(row.proven or row.tied for row in ranking.rows), seed
    stopped = otdd.nearest(query, index, 2, max_seconds=1e-9)
    check(stopped, values, 2, ordered=False)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("labels", ["gaussian", "means", "tree"])
@pytest.mark.parametrize("columns", [False, True])
def test_several_labels_are_ranked_as_dense_formulas_rank_them(labels, columns, seed, monkeypatch):
    """As classes of a table, and as columns of points, which many sets are."""
    if columns:
        monkeypatch.setattr(comparison, "MOST_SETS", 1)
    weighted = seed % 3 == 0
    query, members = library(seed, lambda rng: tagged(rng, weighted=weighted))
    metric = otdd.labels.Tree(TREE) if labels == "tree" else labels
    epsilon = (0.0, 0.3, 1.0)[seed % 3 if not columns else 1 + seed % 2]
    index = otdd.index(members, labels=metric, epsilon=epsilon)
    check_library(query, members, index, (labels,), seed)


def test_classes_and_sets_are_ranked_together():
    """A query of one label each row, among members of several."""
    rng = np.random.default_rng(3)
    _, members = library(3, tagged)
    labels = np.arange(9) % 3
    points = rng.normal(size=(9, 2)).astype("f4")
    query = otdd.LabeledSamples(points, labels, TAGS)
    members["plain"] = otdd.LabeledSamples(points + 0.5, labels, TAGS)
    check_library(query, members, otdd.index(members, epsilon=0.3), ("gaussian",), 3)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seed", range(12))
def test_numbers_are_ranked_as_dense_formulas_rank_them(seed):
    query, members = library(seed, numbered)
    weights = ((0.5, 0.5), (0.0, 1.0), (2.0, 0.1))[seed % 3]
    given = dict(zip(("lambda_x", "lambda_y"), weights, strict=True))
    epsilon = None if seed % 4 else 0.0
    index = otdd.index(members, labels="continuous", epsilon=epsilon, **given)
    scale = index.settings.metric.scale
    pooled = torch.cat([one.targets for one in members.values()])
    assert scale == pytest.approx(pooled.std(0, correction=0).tolist(), rel=1e-9)
    check_library(query, members, index, ("continuous", scale, weights), seed)


# Powers above 1 of ways in a tree are no squared distances of points: b and c together are nearer
# to a than to themselves.
CUBED = otdd.labels.Tree({"b": "a", "c": "a"}, power=3)


@pytest.mark.filterwarnings("ignore:labels.power=3")
@pytest.mark.slow(after=3)
@pytest.mark.parametrize("name", ["gaussian", "cubed", "none", "means", "upper_bound", "exact"])
def test_moments_bound_several_labels_from_below(name):
    """Also where the label cost is below 0, as that of many distances may be."""
    metric = CUBED if name == "cubed" else metric_of(name)
    below = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sides = [tagged(rng, weighted=seed % 2 == 1) for _ in range(2)]
        sides.append(sides[0].take(torch.arange(len(sides[0]) - 1, -1, -1)))
        ground = GroundCost(0.0, 1.0) if seed % 4 else GroundCost(0.7, 0.4)
        own = class_tables(sides, [(k, k) for k in range(3)], metric)
        query, *others = moments_of(sides, metric, ground, own)
        found = lowest_by_moments(query, others, ground, metric)
        tables = class_tables(sides, [(0, 1), (0, 2)], metric)
        for side, table, bound in zip(sides[1:], tables, found.tolist(), strict=True):
            if name in ("gaussian", "means"):
                true = label_table((sides[0], side), name)
                assert torch.allclose(table, true, atol=1e-8), seed
            given = otdd.labels.set_table(table, (sides[0], side))
            count = sides[0].class_total
            block = given[:count, count:][sides[0].labels][:, side.labels]
            gaps = (sides[0].features.double()[:, None] - side.features.double()).square().sum(2)
            cost = ground.lambda_x * gaps + ground.lambda_y * block
            value = ot.emd2(sides[0].masses.numpy(), side.masses.numpy(), cost.numpy())
            assert bound <= value + 1e-9, (seed, bound, value)
            below += value < -1e-6
    assert below > 0 or name != "cubed"


def test_numbers_tighten_what_moments_prove():
    """Numbers of a copy that are all one more cost lambda_y, of which the bound knows."""
    x = otdd.LabeledSamples(torch.zeros(4, 2), None, (), targets=torch.arange(4.0))
    y = otdd.LabeledSamples(torch.zeros(4, 2), None, (), targets=torch.arange(4.0) + 1)
    for weights in ((0.5, 0.25), (0.0, 0.25)):
        ground, metric = GroundCost(*weights), otdd.labels.Continuous((1.0,))
        query, member = moments_of([x, y], metric, ground)
        (found,) = lowest_by_moments(query, [member], ground, metric).tolist()
        assert found == pytest.approx(0.25, rel=1e-6)
        assert found <= 0.25


@pytest.mark.parametrize("kind", ["sets", "numbers", "tree"])
def test_folders_keep_other_labels(kind, tmp_path):
    make, labels = {
        "sets": (tagged, "gaussian"),
        "numbers": (numbered, "continuous"),
        "tree": (tagged, otdd.labels.Tree(TREE, add="means")),
    }[kind]
    query, members = library(5, make)
    names = list(members)
    first = otdd.index({name: members[name] for name in names[:3]}, tmp_path, labels=labels)
    whole = otdd.index({name: members[name] for name in names[3:]}, tmp_path, labels=labels)
    assert whole.settings == first.settings
    loaded = otdd.Index.load(tmp_path)
    assert loaded.settings == whole.settings
    assert loaded.dim == 2
    for entry in loaded.entries:
        found, given = loaded.rows(entry), members[entry.name]
        assert digest_of(found) == digest_of(given) == entry.digest
        assert found.fingerprint == given.fingerprint
    memory = otdd.index(members, labels=first.settings.metric, epsilon=first.settings.epsilon)
    one, other = (otdd.nearest(query, index, 2) for index in (loaded, memory))
    assert [row.name for row in one.rows] == [row.name for row in other.rows]
    assert [row.value for row in one.rows] == pytest.approx([row.value for row in other.rows])
    again = otdd.nearest(members["m1"], loaded, 1)
    assert again.rows[0][:3] == ("m1", 0.0, 0.0)


def test_other_numbers_and_scales_are_refused(tmp_path):
    query, members = library(2, numbered)
    built = otdd.index(members, tmp_path, labels="continuous")
    rng = np.random.default_rng(0)
    one_column = numbered(rng, 1)
    with pytest.raises(InputError, match=r"1 numbers for each row, and the index compares 2"):
        otdd.nearest(one_column, built, 1)
    plain = otdd.LabeledSamples(query.features, [0] * len(query), ("cat",))
    with pytest.raises(
        InputError, match=r"labels=continuous compares numbers, and .* has classes that are none"
    ):
        otdd.nearest(plain, built, 1)
    with pytest.raises(InputError, match="has numbers and no classes, which labels=gaussian"):
        otdd.nearest(query, {"a": plain}, 1)
    for scale in (None, (1.0, 2.0)):
        with pytest.raises(InputError, match="the index was built with"):
            otdd.index(members, tmp_path, labels=otdd.labels.Continuous(scale))
    same = otdd.labels.Continuous(built.settings.metric.scale)
    assert otdd.index(members, tmp_path, labels=same).settings == built.settings


@pytest.mark.filterwarnings("ignore:labels.power=3")
def test_relaxed_marginals_are_refused_where_label_costs_are_below_zero():
    query, members = library(1, lambda rng: tagged(rng, scale=0.3))
    with pytest.raises(InputError, match="class distances of several labels are below 0"):
        otdd.index(members, epsilon=0.5, unbalanced=1.0, labels=CUBED)
    index = otdd.index(members, epsilon=0.5, unbalanced=1.0, labels="means")
    check_library(query, members, index, ("means",), 0, rho=1.0)


def test_another_tree_is_refused(tmp_path):
    _, members = library(5, tagged)
    built = otdd.index(members, tmp_path, labels=otdd.labels.Tree(TREE, add="means"), epsilon=0.3)
    one, other = otdd.labels.Tree(TREE), otdd.labels.Tree(TREE | {"a": ("ab", 2.0)}, add="means")
    for labels in (one, other, "gaussian"):
        with pytest.raises(InputError, match="the index was built with labels="):
            otdd.index(members, tmp_path, labels=labels, epsilon=0.3)
    same = otdd.labels.Tree(TREE, add="means")
    assert otdd.index({}, tmp_path, labels=same, epsilon=0.3).settings == built.settings
