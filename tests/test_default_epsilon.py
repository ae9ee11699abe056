"""The epsilon that is used where none is given, and what is asked for where one has to be."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from rich.console import Console

import otdd_flash as otdd
from otdd_flash.report.distance import summary_table
from otdd_flash.report.flow.writing import flow_table
from otdd_flash.report.pairwise import pairwise_table
from otdd_flash.report.study.writing import study_table

DRAW = np.random.default_rng(7)
# Of different sizes, scales and places, so that every pair has a mean cost of its own.
DATASETS = [
    (DRAW.normal(place, scale, (rows, 3)), np.arange(rows) % 2)
    for place, scale, rows in ((0.0, 1.0, 12), (2.0, 3.0, 11), (-5.0, 0.5, 7))
]
ONE, TWO, THREE = DATASETS
POINT = np.ones((4, 2)), np.arange(4) % 2


def mean_cost(one, other, lambda_x=0.5):
    """The mean of lambda_x ||x - y||^2, in float64, where classes do not count."""
    return lambda_x * np.square(one[0][:, None] - other[0]).sum(2).mean()


def mean_over_pairs(*datasets):
    pairs = [(i, j) for i in range(len(datasets)) for j in range(i)]
    return np.mean([mean_cost(datasets[i], datasets[j]) for i, j in pairs])


def pooled(*datasets):
    """The mean of ||x - y||^2 over all pairs of all rows."""
    rows = np.concatenate([features for features, _ in datasets])
    return np.square(rows[:, None] - rows).sum(2).mean()


def study(datasets=DATASETS, **settings):
    tasks = dict(zip("abc", datasets, strict=False))
    return otdd.Study(tasks, measures=["otdd"], transfer=None, labels="none", **settings)


def rendered(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_a_distance_takes_a_hundredth_of_the_mean_cost():
    found = otdd.dataset_distance(ONE, TWO, labels="none")
    assert found.epsilon == pytest.approx(0.01 * mean_cost(ONE, TWO))
    assert found.mean_cost == pytest.approx(mean_cost(ONE, TWO))
    assert (
        found.value == otdd.dataset_distance(ONE, TWO, labels="none", epsilon_relative=0.01).value
    )
    table = torch.tensor([[3.0, 5.0], [7.0, 4.0]])
    zero = torch.zeros(2, 2)
    labelled = otdd.dataset_distance(
        ONE, TWO, class_distances=otdd.ClassDistances(zero, table, zero), lambda_y=2.0
    )
    between = 2 * table.numpy()[ONE[1][:, None], TWO[1]].mean()
    assert labelled.epsilon == pytest.approx(0.01 * (mean_cost(ONE, TWO) + between))
    # Of costs of any sign, as `epsilon_relative`.
    inner = otdd.dataset_distance(ONE, TWO, labels="none", ground="inner")
    lengths = [np.linalg.norm(features, axis=1).mean() for features, _ in (ONE, TWO)]
    assert inner.epsilon == pytest.approx(0.01 * 0.5 * np.prod(lengths))


def test_several_datasets_share_one_epsilon_that_of_all_pairs(tmp_path):
    expected = 0.01 * mean_over_pairs(*DATASETS)
    found = otdd.pairwise_distances(DATASETS, labels="none")
    assert found.epsilon == pytest.approx(expected)
    pair = otdd.dataset_distance(ONE, THREE, labels="none", epsilon=found.epsilon)
    assert found.values[0, 2] == pytest.approx(pair.value, rel=1e-6)
    ran = study().run(tmp_path)
    assert (ran.epsilon, ran.mean_cost) == pytest.approx((expected, 100 * expected))
    assert ran.matrix("otdd")[0, 2] == pytest.approx(pair.value, rel=1e-6)
    # The same study, said in other words.
    assert study(epsilon_relative=0.01).run(tmp_path, resume=True).complete


@pytest.mark.slow
def test_a_flow_keeps_the_epsilon_of_its_start():
    flow = otdd.gradient_flow(ONE, TWO, otdd.Flow(1), labels="none")
    assert flow.settings["epsilon"] == pytest.approx(0.01 * mean_cost(ONE, TWO))
    assert flow.mean_cost == pytest.approx(mean_cost(ONE, TWO))


def test_a_cost_of_zero_has_epsilon_one(tmp_path):
    settings = {"labels": "none"}
    tiny = np.full((4, 2), 1e-170), POINT[1]
    for point in (POINT, tiny):
        pair = point, (point[0][:3], point[1][:3])
        assert otdd.dataset_distance(*pair, **settings).epsilon == 1
        assert otdd.pairwise_distances(pair, **settings).epsilon == 1
    assert otdd.gradient_flow(*pair, otdd.Flow(1), **settings).settings["epsilon"] == 1
    assert study(pair).run(tmp_path).epsilon == 1
    assert otdd.dataset_distance(*pair, labels="sinkhorn").labels_epsilon == 1
    with pytest.raises(otdd.InputError, match="epsilon_relative needs a positive mean cost"):
        otdd.dataset_distance(*pair, epsilon_relative=0.1, **settings)


BOTH = {"epsilon": 0.5, "epsilon_relative": 0.25}


@pytest.mark.parametrize(
    "call",
    [
        lambda: otdd.dataset_distance(ONE, TWO, **BOTH),
        lambda: otdd.pairwise_distances(DATASETS, **BOTH),
        lambda: otdd.gradient_flow(ONE, TWO, **BOTH),
        lambda: study(**BOTH),
        lambda: otdd.matrix_transport(torch.rand(3, 4), **BOTH),
        lambda: otdd.matrix_plan(torch.rand(3, 4), **BOTH),
    ],
)
def test_both_epsilons_are_refused(call):
    with pytest.raises(otdd.InputError, match=r"got both, epsilon=0\.5 and epsilon_relative=0\.25"):
        call()


X, Y = torch.rand(5, 2), torch.rand(4, 2)
NEED = {
    otdd.sinkhorn: (X, Y),
    otdd.sinkhorn_divergence: (X, Y),
    otdd.sinkhorn_loss: (X, Y),
    otdd.sinkhorn_losses: ([X], [Y]),
    otdd.sinkhorn_hessian: (X, Y),
    otdd.sinkhorn_potentials: (X, Y),
    otdd.transport_map: (X, Y),
    otdd.sinkhorn_plans: (torch.rand(2, 3, 4),),
    otdd.matrix_loss: (torch.rand(3, 4),),
}


@pytest.mark.parametrize("function", NEED, ids=lambda function: function.__name__)
def test_where_epsilon_is_needed_a_sentence_asks_for_it(function):
    name = function.__name__
    with pytest.raises(otdd.InputError, match=f"^{name} needs epsilon: give epsilon=VALUE"):
        function(*NEED[function])
    with pytest.raises(otdd.InputError, match=f"^{name} takes no epsilon_relative: give epsilon="):
        function(*NEED[function], epsilon_relative=0.1)
    with pytest.raises(otdd.InputError, match="epsilon must be a number"):
        function(*NEED[function], epsilon=None)


@pytest.mark.slow
def test_class_distances_by_sinkhorn_follow_what_is_given_else_their_own_cost(tmp_path):
    given = otdd.dataset_distance(ONE, TWO, labels="sinkhorn", epsilon=0.3)
    assert given.labels_epsilon == 0.3
    expected = otdd.class_distances([ONE, TWO], otdd.labels.Sinkhorn(0.3))
    assert torch.equal(given.class_distances.full, expected.between(0, 1).full)
    own = otdd.dataset_distance(ONE, TWO, labels=otdd.labels.Sinkhorn(0.7), epsilon=0.3)
    assert own.labels_epsilon == 0.7
    of_two, of_all = 0.01 * pooled(ONE, TWO), 0.01 * pooled(*DATASETS)
    for relative in (None, 0.2):
        found = otdd.dataset_distance(ONE, TWO, labels="sinkhorn", epsilon_relative=relative)
        assert found.labels_epsilon == pytest.approx(of_two)
    flow = otdd.gradient_flow(ONE, TWO, otdd.Flow(1), labels="sinkhorn")
    assert flow.settings["labels.epsilon"] == pytest.approx(of_two)
    pairs = otdd.pairwise_distances(DATASETS, labels="sinkhorn")
    assert pairs.details["labels_epsilon"] == pytest.approx(of_all)
    table = otdd.class_distances(DATASETS, "sinkhorn").full
    assert torch.equal(table, pairs.class_distances.full)
    tasks = dict(zip("abc", DATASETS, strict=True))
    ran = otdd.Study(tasks, measures=["otdd"], transfer=None, labels="sinkhorn").run(tmp_path)
    assert ran.setup.settings.labels.epsilon == pytest.approx(of_all)
    # Measured on the whole datasets, it is that of their rows.
    part = (ONE[0][:6], ONE[1][:6]), (TWO[0][:6], TWO[1][:6])
    wholes = tuple(otdd.LabeledSamples.from_arrays(*whole) for whole in (ONE, TWO))
    found = otdd.dataset_distance(*part, labels="sinkhorn", class_statistics=wholes)
    assert found.labels_epsilon == pytest.approx(of_two)
    cosine = otdd.dataset_distance(ONE, TWO, labels="sinkhorn", ground="cosine")
    units = [(x / np.linalg.norm(x, axis=1, keepdims=True), y) for x, y in (ONE, TWO)]
    assert cosine.labels_epsilon == pytest.approx(0.01 * pooled(*units))


@pytest.mark.slow
def test_weights_count_in_the_pool():
    weights = np.repeat((1.0, 0.0), 6)
    weighted = otdd.LabeledSamples.from_arrays(*ONE, weights)
    kept = ONE[0][:6], ONE[1][:6]
    # The rows of weight 0 stay rows: their dataset counts twelve times a row's mass.
    twice = tuple(np.concatenate([part, part]) for part in kept)
    found = otdd.dataset_distance(weighted, TWO, labels="sinkhorn")
    assert found.labels_epsilon == pytest.approx(0.01 * pooled(twice, TWO))


@pytest.mark.slow
def test_tables_print_epsilon_in_both_units(tmp_path):
    found = otdd.dataset_distance(ONE, TWO, labels="sinkhorn", epsilon=0.5)
    mean = found.mean_cost
    both = f"0.5 ({0.5 / mean:.3g} of the mean cost {mean:.6g})"
    assert both in rendered(summary_table(found.to_dict()))
    assert "sinkhorn, epsilon 0.5" in rendered(summary_table(found.to_dict()))
    found.save(tmp_path / "distance")
    loaded = otdd.DistanceResult.load(tmp_path / "distance")
    assert (loaded.mean_cost, loaded.labels_epsilon) == (pytest.approx(mean), 0.5)
    flow = otdd.gradient_flow(ONE, TWO, otdd.Flow(1), labels="sinkhorn", epsilon=0.5)
    assert both in rendered(flow_table(flow.to_dict()))
    flow.save(tmp_path / "flow")
    assert otdd.FlowResult.load(tmp_path / "flow").mean_cost == flow.mean_cost
    pairs = otdd.pairwise_distances(DATASETS, labels="none")
    share = f"{pairs.epsilon:.6g} (0.01 of the mean cost {100 * pairs.epsilon:.6g})"
    assert share in rendered(pairwise_table(pairs))
    assert otdd.PairwiseResult.load(pairs.save(tmp_path / "pairs")).mean_cost == pairs.mean_cost
    assert share in rendered(study_table(study().run(tmp_path / "study")))
    given = study(epsilon=0.5).run(tmp_path / "given")
    assert f"0.5 ({0.5 / pairs.mean_cost:.3g} of the mean cost" in rendered(study_table(given))


def test_an_epsilon_too_small_for_float32_names_ways_out_that_do():
    x, y = (1e4 * np.random.default_rng(k).normal(size=(12, 4)) for k in (0, 1))
    with pytest.raises(otdd.InputError, match="is too small for float32") as said:
        otdd.dataset_distance(x, y, labels="none", epsilon=0.1)
    message = str(said.value)
    assert "raise epsilon to about" in message
    assert "epsilon_relative=0.01" in message
    assert "extractor.standardize=true" in message
    found = otdd.dataset_distance(x, y, labels="none", epsilon_relative=0.01)
    assert found.converged
    assert otdd.dataset_distance(x / 1e4, y / 1e4, labels="none", epsilon=0.1).converged
    # Neither helps where they do not: the epsilon is too small for features of any scale.
    with pytest.raises(otdd.InputError, match="raise epsilon to about") as said:
        otdd.dataset_distance(x / 1e4, y / 1e4, labels="none", epsilon=1e-9)
    assert "standardize" not in str(said.value)
    assert "epsilon_relative=0.01" in str(said.value)
