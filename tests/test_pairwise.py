"""Several datasets, each with each: the numbers of single comparisons, every term solved once."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import ConvergenceError, DataNotice, InputError, NotConvergedWarning
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.request import Request
from otdd_flash.otdd import dataset_distance
from otdd_flash.pairwise import pairwise_distances
from otdd_flash.pairwise_result import ComparedPair, PairwiseResult
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.schedules.geomloss import GeomlossSchedule


def clusters(size, seed, *, dim=3, classes=3, weights=None):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(size) % classes)
    features = 2 * rng.normal(size=(classes, dim))[labels] + rng.normal(size=(size, dim))
    names = tuple("abcdefgh"[:classes])
    return LabeledSamples(
        torch.from_numpy(features).float(),
        torch.from_numpy(labels),
        names,
        weights,
        name=f"set {seed}",
    )


@pytest.fixture
def datasets():
    weights = torch.rand(24, generator=torch.manual_seed(0))
    weights[::5] = 0
    return [
        clusters(31, 0),
        clusters(24, 1, classes=2, weights=weights),
        clusters(27, 2, classes=4),
    ]


@pytest.fixture
def solves(monkeypatch):
    """How many self terms and how many cross terms were solved."""
    counts = {"self": 0, "cross": 0}
    solve = Converged.solve_term

    def counting(options, *args, name, **kwargs):
        counts["cross" if name == "xy" else "self"] += 1
        return solve(options, *args, name=name, **kwargs)

    monkeypatch.setattr(Converged, "solve_term", counting)
    return counts


@pytest.mark.slow(after=3)
@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": 0.5},
        {"epsilon": 3.0, "labels": otdd.labels.Sinkhorn(epsilon=1.0)},
        {"epsilon": 0.5, "labels": "none", "lambda_x": 1.3, "lambda_y": 0.2},
        {"epsilon": 0.5, "compute": ComputeOptions(precision="double")},
        {"epsilon": 3.0, "solver": Converged(tolerance=2e-5)},
        {"epsilon": 2e-3},
    ],
    ids=["plain", "sinkhorn", "none", "double", "tight", "rounding"],
)
# The last one is at the floor of rounding, which it may miss or not, as the single one does.
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
def test_every_number_is_that_of_a_single_comparison(datasets, options):
    result = pairwise_distances(datasets, **options)
    tolerances = []
    for i, j in ((0, 1), (0, 2), (1, 2)):
        single = dataset_distance(datasets[i], datasets[j], **options)
        for table, number in (
            (result.values, single.value),
            (result.lower, single.bounds[0]),
            (result.upper, single.bounds[1]),
            (result.marginal_errors, single.divergence.marginal_error),
        ):
            assert float(table[i, j]) == float(table[j, i]) == number
        assert bool(result.converged[i, j]) == single.converged
        tolerances.append(single.divergence.tolerance)
        assert torch.equal(result.class_distances.between(i, j).full, single.class_distances.full)
    assert result.tolerance == max(tolerances)
    for table in (result.values, result.lower, result.upper):
        assert not table.diagonal().any()


def test_every_term_is_solved_once(datasets, solves):
    heard: list[tuple[int, int]] = []
    pairwise_distances(
        [*datasets, clusters(20, 3)], epsilon=0.5, progress=lambda *event: heard.append(event)
    )
    assert solves == {"self": 4, "cross": 6}
    assert heard == [(done, 10) for done in range(1, 11)]


def test_identical_datasets_are_at_exactly_zero(datasets, solves):
    one, two, _ = datasets
    copy = LabeledSamples(one.features.clone(), one.labels, one.class_names, name=one.name)
    result = pairwise_distances([one, two, copy], epsilon=0.5)
    assert result.names == ("set 0 (0)", "set 1", "set 0 (2)")
    for table in (result.values, result.lower, result.upper):
        assert float(table[0, 2]) == 0
    assert float(result.lower[1, 0]) <= float(result.values[1, 2]) <= float(result.upper[1, 0])
    assert solves == {"self": 3, "cross": 2}


def test_epsilon_can_be_relative_to_the_mean_cost_of_all_pairs(datasets):
    result = pairwise_distances(datasets, epsilon_relative=0.1)
    request = Request.prepare(datasets, GroundCost(), otdd.ComputeOptions())
    means = [
        request.inputs(pair, result.class_distances.between(*pair).xy).labelled.mean_cost
        for pair in ((0, 1), (0, 2), (1, 2))
    ]
    assert result.epsilon == pytest.approx(0.1 * sum(means) / 3, rel=1e-12)
    # Between two datasets it is that of a single comparison.
    pair = pairwise_distances(datasets[:2], epsilon_relative=0.1)
    assert pair.epsilon == dataset_distance(*datasets[:2], epsilon_relative=0.1).epsilon


def test_class_distances_are_measured_once_and_kept(datasets, tmp_path):
    heard: list[tuple[int, int]] = []

    def progress(*event):
        heard.append(event)

    pairwise_distances(datasets, epsilon=0.5, cache_dir=tmp_path, class_progress=progress)
    assert heard[-1] == (36, 36)
    heard.clear()
    pairwise_distances(datasets, epsilon=0.5, cache_dir=tmp_path, class_progress=progress)
    assert heard == [(36, 36)]


def test_a_table_can_be_given(datasets):
    table = otdd.class_distances(datasets, "means")
    result = pairwise_distances(datasets, epsilon=0.5, class_distances=table)
    assert result.method == "given"
    assert torch.equal(
        result.values, pairwise_distances(datasets, epsilon=0.5, labels="means").values
    )
    # Subsets take the distances between whole classes.
    some = [samples.take(torch.arange(12)) for samples in datasets]
    part = pairwise_distances(some, epsilon=0.5, class_distances=table)
    assert torch.equal(part.class_distances.full, table.full)


def test_pairs_are_listed_from_the_nearest(datasets):
    result = pairwise_distances(datasets, epsilon=0.5)
    rows = result.pairs()
    assert [row.value for row in rows] == sorted(result.values[[0, 0, 1], [1, 2, 2]].tolist())
    assert all(row.lower <= row.value <= row.upper for row in rows)
    assert {(row.source, row.target) for row in rows} == {
        ("set 0", "set 1"),
        ("set 0", "set 2"),
        ("set 1", "set 2"),
    }


def test_the_table_has_a_row_a_pair_and_can_follow_one_of_a_single_distance(datasets):
    result = pairwise_distances(datasets, epsilon=0.5)
    frame = result.to_frame()
    assert [tuple(row)[:-1] for row in frame.itertuples(index=False)] == list(result.pairs())
    assert list(frame.columns) == [*ComparedPair._fields, "epsilon"]
    assert set(frame.epsilon) == {0.5}
    assert {str(frame[name].dtype) for name in ("value", "lower", "upper")} == {"float64"}
    assert frame.converged.dtype == bool
    one = dataset_distance(*datasets[:2], epsilon=0.5).to_frame()
    assert list(one.columns)[: len(frame.columns)] == list(frame.columns)


def test_numbers_that_are_not_finite_are_null_in_files_and_come_back(datasets, tmp_path):
    result = pairwise_distances(datasets, epsilon=0.5)
    upper = result.upper.clone()
    upper[0, 2] = upper[2, 0] = torch.inf
    endless = replace(result, upper=upper)
    content = endless.to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["upper"][0][2] is None
    assert torch.equal(PairwiseResult.load(endless.save(tmp_path)).upper, upper)


def test_saved_results_load_again(datasets, tmp_path):
    result = pairwise_distances(datasets, epsilon=0.5)
    assert result.save(tmp_path / "run") == tmp_path / "run"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "result.json",
        "class_distances.npz",
    }
    content = json.loads((tmp_path / "run" / "result.json").read_text())
    assert content["datasets"] == ["set 0", "set 1", "set 2"]
    assert content["values"] == result.values.tolist()
    assert content["converged"] == [[True] * 3] * 3
    loaded = PairwiseResult.load(tmp_path / "run")
    assert loaded.to_dict() == result.to_dict()
    assert torch.equal(loaded.class_distances.full, result.class_distances.full)
    (tmp_path / "run" / "class_distances.npz").unlink()
    with pytest.raises(InputError, match=r"no complete result in .*run"):
        PairwiseResult.load(tmp_path / "run")
    with pytest.raises(InputError, match="no complete result"):
        PairwiseResult.load(tmp_path)


def test_small_classes_are_dropped_from_all(datasets):
    extra = torch.cat((datasets[0].features, torch.ones(1, 3)))
    labels = torch.cat((datasets[0].labels, torch.tensor([3])))
    lonely = LabeledSamples(extra, labels, ("a", "b", "c", "d"), name="lonely")
    with pytest.warns(DataNotice, match="one sample are points.*'d' of lonely"):
        pairwise_distances([lonely, *datasets[1:]], epsilon=0.5)
    with pytest.warns(DataNotice, match=r"d \(1\)"):
        result = pairwise_distances([lonely, *datasets[1:]], epsilon=0.5, min_class_size=2)
    assert torch.equal(result.values, pairwise_distances(datasets, epsilon=0.5).values)


def test_stopping_early_is_said_once_with_names(datasets):
    early = Converged(tolerance=1e-4, max_iterations=2)
    with pytest.warns(NotConvergedWarning) as said:
        result = pairwise_distances(datasets, epsilon=0.05, solver=early)
    assert len(said) == 1
    assert "set 0 and set 1" in str(said[0].message)
    assert "after 2 iterations" in str(said[0].message)
    assert not result.converged[0, 1]
    required = Converged(tolerance=1e-4, max_iterations=2, require_convergence=True)
    with pytest.raises(ConvergenceError, match=r"set 1 and itself.*solver.tolerance=0.0001"):
        pairwise_distances(datasets, epsilon=0.05, solver=required)


def test_every_reason_to_stop_early_has_its_own_advice(datasets, monkeypatch):
    solve = Problem.solve

    def stopped(problem, options, **kwargs):
        """Self terms by rounding, at larger and larger errors; cross terms by their number."""
        found = solve(problem, options, **kwargs)
        reason = "rounding" if found.identical else "max_iterations"
        late = replace(
            found.xy,
            converged=False,
            stopped_by=reason,
            marginal_error=len(problem.request.seen[0]) / 1e3,
        )
        return replace(found, xy=late, xx=found.xx and late, yy=found.yy and late)

    monkeypatch.setattr(Problem, "solve", stopped)
    # Nothing but iterations may have the advice to raise them.
    with pytest.warns(NotConvergedWarning) as said:
        pairwise_distances(datasets, epsilon=0.5)
    (message,) = (str(warning.message) for warning in said)
    assert message == (
        "not converged as far as rounding allows in set 0 and itself; set 1 and itself; set 2 and "
        "itself: marginal error 3.10e-02 against solver.tolerance=0.001; the solver bounds still "
        "hold. Raise solver.tolerance or epsilon, or set precision=double; not converged after "
        "100000 iterations in set 0 and set 1; set 0 and set 2; set 1 and set 2: marginal error "
        "3.10e-02 against solver.tolerance=0.001; the solver bounds still hold. Raise "
        "solver.max_iterations or epsilon"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -1.0}, "epsilon must be positive and finite, got -1"),
        ({"epsilon_relative": 0.0}, "epsilon_relative must be positive and finite, got 0"),
        ({"labels": "gauss"}, "unknown labels.method 'gauss'"),
        ({"labels": "given"}, "labels=given needs a table"),
        ({"lambda_x": -1.0}, "lambda_x"),
        ({"compute": ComputeOptions(device="nothing")}, "'nothing'"),
        ({"solver": Converged(tolerance=1e-12)}, "too tight for float32"),
        ({"solver": Converged(bound_width=0.1)}, "solves every term once, to solver.tolerance"),
        ({"solver": Converged(max_seconds=9.0)}, r"solver\.max_seconds .* dataset_distance"),
        ({"solver": GeomlossSchedule()}, r"geomloss are for dataset_distance"),
    ],
)
def test_impossible_requests_are_refused(datasets, options, message):
    with pytest.raises(InputError, match=message):
        pairwise_distances(datasets, **options)


def test_impossible_lists_are_refused(datasets):
    for wrong, message in (
        (datasets[:1], "holds 1 datasets, and at least 2"),
        (datasets[0], "datasets must be a list, got LabeledSamples"),
        ([datasets[0], "usps"], r"datasets\[1\] must be LabeledSamples, .*, got 'usps'"),
        ([datasets[0], clusters(20, 5, dim=4)], r"3 .*4|4 .*3"),
        (
            [datasets[0], LabeledSamples(torch.eye(3), None, (), name="cells")],
            "cells has no labels",
        ),
    ):
        with pytest.raises(InputError, match=message):
            pairwise_distances(wrong)
    table = otdd.class_distances(datasets)
    with pytest.raises(InputError, match=r"must be JointClassDistances, .* got ClassDistances"):
        pairwise_distances(datasets, class_distances=table.between(0, 1))
    with pytest.raises(InputError, match="about 3 datasets"):
        pairwise_distances(datasets[:2], class_distances=table)
    point = LabeledSamples(torch.ones(1, 2), None, ())
    with pytest.raises(InputError, match="positive mean cost"):
        pairwise_distances([point, point], labels="none", epsilon_relative=0.1)
