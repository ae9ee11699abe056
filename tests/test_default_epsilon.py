"""The epsilon that is used where none is given, and what is asked for where one has to be."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from rich.console import Console

import otdd_flash as otdd
from otdd_flash.report.distance import summary_table

DRAW = np.random.default_rng(7)
# Of different sizes, scales and places, so that every pair has a mean cost of its own.
DATASETS = [
    (DRAW.normal(place, scale, (rows, 3)), np.arange(rows) % 2)
    for place, scale, rows in ((0.0, 1.0, 12), (2.0, 3.0, 11), (-5.0, 0.5, 7))
]
ONE, TWO, THREE = DATASETS


def mean_cost(one, other):
    """The mean of ||x - y||^2 / 2, in float64, where classes do not count."""
    return np.square(one[0][:, None] - other[0]).sum(2).mean() / 2


def pooled(*datasets):
    """The mean of ||x - y||^2 over all pairs of all rows."""
    rows = np.concatenate([features for features, _ in datasets])
    return np.square(rows[:, None] - rows).sum(2).mean()


def study(datasets=DATASETS, **settings):
    tasks = dict(zip("abc", datasets, strict=False))
    return otdd.Study(tasks, ["otdd"], transfer=None, **({"labels": "none"} | settings))


def test_a_distance_takes_a_hundredth_of_the_mean_cost():
    found = otdd.dataset_distance(ONE, TWO, labels="none")
    assert found.epsilon == pytest.approx(0.01 * mean_cost(ONE, TWO))
    assert found.mean_cost == pytest.approx(mean_cost(ONE, TWO))
    table, zero = torch.tensor([[3.0, 5.0], [7.0, 4.0]]), torch.zeros(2, 2)
    given = {"class_distances": otdd.ClassDistances(zero, table, zero), "lambda_y": 2.0}
    between = 2 * table.numpy()[ONE[1][:, None], TWO[1]].mean()
    labelled = otdd.dataset_distance(ONE, TWO, **given)
    assert labelled.epsilon == pytest.approx(0.01 * (mean_cost(ONE, TWO) + between))
    # Of costs of any sign, as `epsilon_relative`.
    inner = otdd.dataset_distance(ONE, TWO, labels="none", ground="inner")
    lengths = [np.linalg.norm(features, axis=1).mean() for features, _ in (ONE, TWO)]
    assert inner.epsilon == pytest.approx(0.01 * 0.5 * np.prod(lengths))


@pytest.mark.slow
def test_several_datasets_share_one_epsilon_that_of_all_pairs(tmp_path):
    mean = np.mean([mean_cost(*pair) for pair in ((ONE, TWO), (ONE, THREE), (TWO, THREE))])
    settings = {"solver": otdd.Converged(0.1)}
    assert otdd.pairwise_distances(DATASETS, labels="none", **settings).epsilon == pytest.approx(
        0.01 * mean
    )
    ran = study(**settings).run(tmp_path)
    assert (ran.epsilon, ran.mean_cost) == pytest.approx((0.01 * mean, mean))
    # The same study, said in other words.
    assert study(epsilon_relative=0.01, **settings).run(tmp_path, resume=True).complete


@pytest.mark.slow
def test_a_flow_keeps_the_epsilon_of_its_start():
    flow = otdd.gradient_flow(ONE, TWO, otdd.Flow(1), labels="none")
    assert flow.settings["epsilon"] == pytest.approx(0.01 * mean_cost(ONE, TWO))
    assert flow.mean_cost == pytest.approx(mean_cost(ONE, TWO))


@pytest.mark.slow
def test_a_cost_of_zero_has_epsilon_one(tmp_path):
    labels, settings = np.arange(4) % 2, {"labels": "none"}
    for points in (np.ones((4, 2)), np.full((4, 2), 1e-170), np.full((4, 2), 0.3)):
        pair = (points, labels), (points[:3], labels[:3])
        assert otdd.dataset_distance(*pair, **settings).epsilon == 1
        assert otdd.pairwise_distances(pair, **settings).epsilon == 1
    assert otdd.gradient_flow(*pair, otdd.Flow(1), **settings).settings["epsilon"] == 1
    assert study(pair).run(tmp_path).epsilon == 1
    assert otdd.dataset_distance(*pair, labels="sinkhorn").labels_epsilon == 1
    with pytest.raises(otdd.InputError, match="epsilon_relative needs a positive mean cost"):
        otdd.dataset_distance(*pair, epsilon_relative=0.1, **settings)


BOTH = {"epsilon": 0.5, "epsilon_relative": 0.25}
X, Y, COSTS = torch.rand(5, 2), torch.rand(4, 2), torch.rand(3, 4)


def test_both_epsilons_are_refused():
    for call, given in (
        *((call, (ONE, TWO)) for call in (otdd.dataset_distance, otdd.gradient_flow)),
        *((call, (COSTS,)) for call in (otdd.matrix_transport, otdd.matrix_plan)),
        *((call, (DATASETS,)) for call in (otdd.pairwise_distances, study)),
    ):
        with pytest.raises(otdd.InputError, match=r"got both, epsilon=0\.5 and epsilon_relative="):
            call(*given, **BOTH)


NEED = {
    **dict.fromkeys((otdd.sinkhorn, otdd.sinkhorn_divergence, otdd.sinkhorn_loss), (X, Y)),
    **dict.fromkeys((otdd.sinkhorn_hessian, otdd.sinkhorn_potentials, otdd.transport_map), (X, Y)),
    otdd.sinkhorn_losses: ([X], [Y]),
    otdd.sinkhorn_plans: (COSTS[None],),
    otdd.matrix_loss: (COSTS,),
}


@pytest.mark.parametrize("function", NEED, ids=lambda function: function.__name__)
def test_where_epsilon_is_needed_a_sentence_asks_for_it(function):
    name = function.__name__
    with pytest.raises(otdd.InputError, match=f"^{name} needs epsilon: give epsilon=VALUE"):
        function(*NEED[function])
    with pytest.raises(otdd.InputError, match=f"^{name} takes no epsilon_relative: give epsilon="):
        function(*NEED[function], epsilon_relative=0.1)


@pytest.mark.slow
def test_class_distances_by_sinkhorn_follow_what_is_given_else_their_own_cost(tmp_path):
    sinkhorn = {"labels": "sinkhorn", "solver": otdd.Converged(0.1)}
    assert otdd.dataset_distance(ONE, TWO, epsilon=0.3, **sinkhorn).labels_epsilon == 0.3
    own = otdd.dataset_distance(ONE, TWO, labels=otdd.labels.Sinkhorn(0.7), epsilon=0.3)
    assert own.labels_epsilon == 0.7
    of_two, of_all = (pytest.approx(0.01 * pooled(*some)) for some in ((ONE, TWO), DATASETS))
    for relative in (None, 0.2):
        found = otdd.dataset_distance(ONE, TWO, epsilon_relative=relative, **sinkhorn)
        assert found.labels_epsilon == of_two
    flow = otdd.gradient_flow(ONE, TWO, otdd.Flow(1), **sinkhorn)
    assert flow.settings["labels.epsilon"] == of_two
    pairs = otdd.pairwise_distances(DATASETS, **sinkhorn)
    assert pairs.details["labels_epsilon"] == of_all
    assert torch.equal(otdd.class_distances(DATASETS, "sinkhorn").full, pairs.class_distances.full)
    assert study(**sinkhorn).run(tmp_path).setup.settings.labels.epsilon == of_all
    # Measured on the whole datasets, it is that of their rows, of which some may weigh nothing.
    part = (ONE[0][:6], ONE[1][:6]), (TWO[0][:6], TWO[1][:6])
    wholes = tuple(otdd.LabeledSamples.from_arrays(*whole) for whole in (ONE, TWO))
    found = otdd.dataset_distance(*part, class_statistics=wholes, **sinkhorn)
    assert found.labels_epsilon == of_two
    cosine = otdd.dataset_distance(ONE, TWO, ground="cosine", **sinkhorn)
    units = [(x / np.linalg.norm(x, axis=1, keepdims=True), y) for x, y in (ONE, TWO)]
    assert cosine.labels_epsilon == pytest.approx(0.01 * pooled(*units))


def test_tables_print_epsilon_in_both_units():
    found = otdd.dataset_distance(ONE, TWO, labels="sinkhorn", epsilon=5.0)
    printed = io.StringIO()
    Console(width=200, file=printed).print(summary_table(found.to_dict()))
    share = f"5 ({5 / found.mean_cost:.3g} of the mean cost {found.mean_cost:.6g})"
    assert share in printed.getvalue()
    assert "sinkhorn, epsilon 5" in printed.getvalue()


def test_an_epsilon_too_small_for_float32_names_ways_out_that_do():
    x, y = (1e4 * np.random.default_rng(k).normal(size=(12, 4)) for k in (0, 1))
    with pytest.raises(otdd.InputError, match="is too small for float32") as refused:
        otdd.dataset_distance(x, y, labels="none", epsilon=0.1)
    for way in ("raise epsilon to about", "epsilon_relative=0.01", "extractor.standardize=true"):
        assert way in str(refused.value)
    assert otdd.dataset_distance(x, y, labels="none", epsilon_relative=0.01).converged
    assert otdd.dataset_distance(x / 1e4, y / 1e4, labels="none", epsilon=0.1).converged
    # Neither helps where they do not: the epsilon is too small for features of any scale.
    with pytest.raises(otdd.InputError, match="raise epsilon to about") as refused:
        otdd.dataset_distance(x / 1e4, y / 1e4, labels="none", epsilon=1e-9)
    assert "standardize" not in str(refused.value)
