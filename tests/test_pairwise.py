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


WEIGHTS = torch.linspace(0, 1, 12)
DATASETS = [
    clusters(15, 0),
    clusters(12, 1, classes=2, weights=WEIGHTS),
    clusters(14, 2, classes=4),
]
UNLABELLED = LabeledSamples(torch.eye(3), None, (), name="cells")


@pytest.fixture(scope="module")
def result():
    return pairwise_distances(DATASETS, epsilon=0.5)


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


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": 0.5},
        {"epsilon": 3.0, "labels": "none", "lambda_x": 1.3, "lambda_y": 0.2},
        {"epsilon": 3.0, "labels": otdd.labels.Sinkhorn(epsilon=1.0)},
        {"epsilon": 0.5, "compute": ComputeOptions(precision="double")},
        {"epsilon": 3.0, "solver": Converged(tolerance=2e-5)},
        {"epsilon": 2e-3},
    ],
    ids=["plain", "none", "sinkhorn", "double", "tight", "rounding"],
)
# The last one is at the floor of rounding, which it may miss or not, as the single one does.
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
def test_every_number_is_that_of_a_single_comparison(options):
    result = pairwise_distances(DATASETS, **options)
    tolerances = []
    for i, j in ((0, 1), (0, 2), (1, 2)):
        single = dataset_distance(DATASETS[i], DATASETS[j], **options)
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


def test_every_term_is_solved_once(solves):
    heard: list[tuple[int, int]] = []
    datasets = [*DATASETS, clusters(10, 3)]
    pairwise_distances(datasets, epsilon=3.0, progress=lambda *event: heard.append(event))
    assert solves == {"self": 4, "cross": 6}
    assert heard == [(done, 10) for done in range(1, 11)]


def test_identical_datasets_are_at_exactly_zero(solves):
    one, two, _ = DATASETS
    copy = LabeledSamples(one.features.clone(), one.labels, one.class_names, name=one.name)
    result = pairwise_distances([one, two, copy], epsilon=0.5)
    assert result.names == ("set 0 (0)", "set 1", "set 0 (2)")
    for table in (result.values, result.lower, result.upper):
        assert float(table[0, 2]) == 0
    assert float(result.lower[1, 0]) <= float(result.values[1, 2]) <= float(result.upper[1, 0])
    assert solves == {"self": 3, "cross": 2}


def test_a_relative_epsilon_of_two_datasets_is_that_of_a_single_comparison():
    pair = pairwise_distances(DATASETS[:2], epsilon_relative=0.1)
    assert pair.epsilon == dataset_distance(*DATASETS[:2], epsilon_relative=0.1).epsilon


def test_class_distances_are_measured_once_and_kept(tmp_path):
    heard: list[tuple[int, int]] = []
    options = {"epsilon": 3.0, "cache_dir": tmp_path}
    pairwise_distances(DATASETS, class_progress=lambda *event: heard.append(event), **options)
    assert heard[-1] == (36, 36)
    heard.clear()
    pairwise_distances(DATASETS, class_progress=lambda *event: heard.append(event), **options)
    assert heard == [(36, 36)]


@pytest.mark.slow
def test_a_table_can_be_given():
    table = otdd.class_distances(DATASETS, "means")
    result = pairwise_distances(DATASETS, epsilon=3.0, class_distances=table)
    assert result.method == "given"
    measured = pairwise_distances(DATASETS, epsilon=3.0, labels="means")
    assert torch.equal(result.values, measured.values)
    # Subsets take the distances between whole classes.
    some = [samples.take(torch.arange(8)) for samples in DATASETS]
    part = pairwise_distances(some, epsilon=3.0, class_distances=table)
    assert torch.equal(part.class_distances.full, table.full)


def test_pairs_and_rows_of_the_table_are_listed_from_the_nearest(result):
    rows = result.pairs()
    assert [row.value for row in rows] == sorted(result.values[[0, 0, 1], [1, 2, 2]].tolist())
    assert all(row.lower <= row.value <= row.upper for row in rows)
    names = {(row.source, row.target) for row in rows}
    assert names == {("set 0", "set 1"), ("set 0", "set 2"), ("set 1", "set 2")}
    frame = result.to_frame()
    assert [tuple(row)[:-1] for row in frame.itertuples(index=False)] == list(rows)
    assert list(frame.columns) == [*ComparedPair._fields, "epsilon"]
    assert set(frame.epsilon) == {0.5}
    assert {str(frame[name].dtype) for name in ("value", "lower", "upper")} == {"float64"}
    assert frame.converged.dtype == bool
    # It can follow one of a single distance.
    one = dataset_distance(*DATASETS[:2], epsilon=3.0).to_frame()
    assert list(one.columns)[: len(frame.columns)] == list(frame.columns)


def test_saved_results_load_again(result, tmp_path):
    folder = tmp_path / "run"
    assert result.save(folder) == folder
    assert {path.name for path in folder.iterdir()} == {"result.json", "class_distances.npz"}
    content = json.loads((folder / "result.json").read_text())
    assert content["datasets"] == ["set 0", "set 1", "set 2"]
    assert content["values"] == result.values.tolist()
    assert content["converged"] == [[True] * 3] * 3
    loaded = PairwiseResult.load(folder)
    assert loaded.to_dict() == result.to_dict()
    assert torch.equal(loaded.class_distances.full, result.class_distances.full)
    (folder / "class_distances.npz").unlink()
    for wrong, place in ((folder, ".*run"), (tmp_path, "")):
        with pytest.raises(InputError, match=f"no complete result in {place}"):
            PairwiseResult.load(wrong)
    # A number that is not finite is null in files, and comes back.
    upper = result.upper.clone()
    upper[0, 2] = upper[2, 0] = torch.inf
    endless = replace(result, upper=upper)
    content = endless.to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["upper"][0][2] is None
    assert torch.equal(PairwiseResult.load(endless.save(tmp_path)).upper, upper)


@pytest.mark.slow
def test_small_classes_are_dropped_from_all():
    first, *others = DATASETS
    features = torch.cat((first.features, torch.ones(1, 3)))
    labels = torch.cat((first.labels, torch.tensor([3])))
    lonely = [LabeledSamples(features, labels, ("a", "b", "c", "d"), name="lonely"), *others]
    with pytest.warns(DataNotice, match="one sample are points.*'d' of lonely"):
        pairwise_distances(lonely, epsilon=3.0)
    with pytest.warns(DataNotice, match=r"d \(1\)"):
        found = pairwise_distances(lonely, epsilon=3.0, min_class_size=2)
    assert torch.equal(found.values, pairwise_distances(DATASETS, epsilon=3.0).values)


def test_stopping_early_is_said_once_with_names():
    early = Converged(tolerance=1e-4, max_iterations=2)
    with pytest.warns(NotConvergedWarning) as said:
        result = pairwise_distances(DATASETS, epsilon=0.05, solver=early)
    assert len(said) == 1
    assert "set 0 and set 1" in str(said[0].message)
    assert "after 2 iterations" in str(said[0].message)
    assert not result.converged[0, 1]
    required = Converged(tolerance=1e-4, max_iterations=2, require_convergence=True)
    with pytest.raises(ConvergenceError, match=r"set 1 and itself.*solver.tolerance=0.0001"):
        pairwise_distances(DATASETS, epsilon=0.05, solver=required)


def test_every_reason_to_stop_early_has_its_own_advice(monkeypatch):
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
        pairwise_distances(DATASETS, epsilon=3.0)
    (message,) = (str(warning.message) for warning in said)
    assert message == (
        "not converged as far as rounding allows in set 0 and itself; set 1 and itself; set 2 and "
        "itself: marginal error 1.50e-02 against solver.tolerance=0.001; the solver bounds still "
        "hold. Raise solver.tolerance or epsilon, or set precision=double; not converged after "
        "100000 iterations in set 0 and set 1; set 0 and set 2; set 1 and set 2: marginal error "
        "1.50e-02 against solver.tolerance=0.001; the solver bounds still hold. Raise "
        "solver.max_iterations or epsilon"
    )


TABLE = otdd.class_distances(DATASETS, "means")
POINT = LabeledSamples(torch.ones(1, 2), None, ())


@pytest.mark.parametrize(
    ("datasets", "options", "message"),
    [
        *(
            (DATASETS, options, message)
            for options, message in (
                ({"epsilon": -1.0}, "epsilon must be positive and finite, got -1"),
                ({"epsilon_relative": 0.0}, "epsilon_relative must be positive and finite, got 0"),
                ({"labels": "gauss"}, "unknown labels.method 'gauss'"),
                ({"labels": "given"}, "labels=given needs a table"),
                ({"lambda_x": -1.0}, "lambda_x"),
                ({"compute": ComputeOptions(device="nothing")}, "'nothing'"),
                ({"solver": Converged(tolerance=1e-12)}, "too tight for float32"),
                ({"solver": Converged(bound_width=0.1)}, "every term once, to solver.tolerance"),
                ({"solver": Converged(max_seconds=9.0)}, r"solver\.max_seconds .*dataset_distance"),
                ({"solver": GeomlossSchedule()}, r"geomloss are for dataset_distance"),
                (
                    {"class_distances": TABLE.between(0, 1)},
                    r"must be JointClassDistances, .* got ClassDistances",
                ),
            )
        ),
        (DATASETS[:1], {}, "holds 1 datasets, and at least 2"),
        (DATASETS[0], {}, "datasets must be a list, got LabeledSamples"),
        ([DATASETS[0], "usps"], {}, r"datasets\[1\] must be LabeledSamples, .*, got 'usps'"),
        ([DATASETS[0], clusters(20, 5, dim=4)], {}, r"3 .*4|4 .*3"),
        ([DATASETS[0], UNLABELLED], {}, "cells has no labels"),
        (DATASETS[:2], {"class_distances": TABLE}, "about 3 datasets"),
        ([POINT, POINT], {"labels": "none", "epsilon_relative": 0.1}, "positive mean cost"),
    ],
)
def test_impossible_requests_are_refused(datasets, options, message):
    with pytest.raises(InputError, match=message):
        pairwise_distances(datasets, **options)
