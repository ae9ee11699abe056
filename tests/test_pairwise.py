"""Several datasets, each with each: the numbers of single comparisons, every term solved once."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning
from otdd_flash.otdd import dataset_distance
from otdd_flash.pairwise import ComparedPair, PairwiseResult, pairwise_distances
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver import divergence, solving
from otdd_flash.solver.geomloss import GeomlossSchedule
from otdd_flash.solver.schedules import Converged


def clusters(size, seed, *, classes=3, weights=None):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(size) % classes)
    features = 2 * rng.normal(size=(classes, 3))[labels] + rng.normal(size=(size, 3))
    names = tuple("abcdefgh"[:classes])
    return LabeledSamples(features.astype("f4"), labels, names, weights, name=f"set {seed}")


DATASETS = [
    clusters(15, 0),
    clusters(12, 1, classes=2, weights=torch.linspace(0, 1, 12)),
    clusters(14, 2, classes=4),
]


@pytest.fixture(scope="module")
def result():
    return pairwise_distances(DATASETS, epsilon=3.0)


@pytest.fixture
def solves(monkeypatch):
    """How many self terms and how many cross terms were solved."""
    counts = {"self": 0, "cross": 0}
    solve = divergence.SOLVES[Converged]

    def counting(operator, epsilon, options, form, **kwargs):
        counts["self" if form.symmetric else "cross"] += 1
        return solve(operator, epsilon, options, form, **kwargs)

    side_by_side = solving.solve_small

    def counting_small(*args, **kwargs):
        found = side_by_side(*args, **kwargs)
        for name in () if found is None else found.terms:
            counts["cross" if name == "xy" else "self"] += 1
        return found

    monkeypatch.setitem(divergence.SOLVES, Converged, counting)
    monkeypatch.setattr(solving, "solve_small", counting_small)
    return counts


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": 3.0, "lambda_x": 1.3, "lambda_y": 0.2},
        {"epsilon": 3.0, "labels": otdd.labels.Sinkhorn(epsilon=1.0)},
        {"epsilon": 0.5, "compute": ComputeOptions(precision="double")},
        {"epsilon": 2e-3},
    ],
    ids=["plain", "sinkhorn", "double", "rounding"],
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
            assert float(table[i, j]) == float(table[j, i])
            # Terms that are solved side by side, as in float32, round apart from one alone.
            off = {} if "compute" in options else {"rel": 1e-7, "abs": 1e-6}
            wanted = pytest.approx(number, **off) if off else number
            assert float(table[i, j]) == wanted
        assert bool(result.converged[i, j]) == single.converged
        tolerances.append(single.divergence.tolerance)
        assert torch.equal(result.class_distances.between(i, j).full, single.class_distances.full)
    assert result.tolerance == max(tolerances)
    for table in (result.values, result.lower, result.upper):
        assert not table.diagonal().any()


@pytest.mark.slow
def test_every_term_is_solved_once_and_equal_datasets_are_at_zero(solves):
    heard: list[tuple[int, int]] = []
    one, two, three = DATASETS
    copy = replace(one, features=one.features.clone())
    progress = {"progress": lambda *event: heard.append(event)}
    result = pairwise_distances([one, two, three, copy], epsilon=3.0, **progress)
    assert solves == {"self": 4, "cross": 5}
    assert [done for done, _ in heard] == list(range(1, len(heard) + 1))
    assert result.names == ("set 0 (0)", "set 1", "set 2", "set 0 (3)")
    for table in (result.values, result.lower, result.upper):
        assert float(table[0, 3]) == 0
        assert float(table[1, 3]) == pytest.approx(float(table[1, 0]), rel=1e-2)


@pytest.mark.slow
def test_a_table_can_be_given():
    table = otdd.class_distances(DATASETS, "means")
    # Subsets take the distances between whole classes.
    some = [samples.take(torch.arange(8)) for samples in DATASETS]
    part = pairwise_distances(some, epsilon=3.0, class_distances=table)
    assert part.method == "given"
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
    assert {str(frame[name].dtype) for name in ("value", "lower", "epsilon")} == {"float64"}
    assert frame.converged.dtype == bool


def test_saved_results_load_again(result, tmp_path):
    folder = tmp_path / "run"
    assert result.save(folder) == folder
    assert {path.name for path in folder.iterdir()} == {"result.json", "class_distances.npz"}
    content = json.loads((folder / "result.json").read_text())
    assert content["datasets"] == ["set 0", "set 1", "set 2"]
    assert content["values"] == result.values.tolist()
    loaded = PairwiseResult.load(folder)
    assert loaded.to_dict() == result.to_dict()
    assert torch.equal(loaded.class_distances.full, result.class_distances.full)
    (folder / "class_distances.npz").unlink()
    for wrong, place in ((folder, ".*run"), (tmp_path, "")):
        with pytest.raises(InputError, match=f"no complete result in {place}"):
            PairwiseResult.load(wrong)
    # A number that is not finite is null in files, and comes back.
    endless = replace(result, upper=result.upper + torch.inf)
    assert json.loads(json.dumps(endless.to_dict(), allow_nan=False))["upper"][0][2] is None
    assert torch.equal(PairwiseResult.load(endless.save(tmp_path)).upper, endless.upper)


def test_stopping_early_is_said_once_with_names():
    early = Converged(tolerance=1e-4, max_iterations=2)
    with pytest.warns(NotConvergedWarning) as warned:
        result = pairwise_distances(DATASETS, epsilon=0.05, solver=early)
    assert len(warned) == 1
    assert "set 0 and set 1" in str(warned[0].message)
    assert "after 2 iterations" in str(warned[0].message)
    assert not result.converged[0, 1]
    required = replace(early, require_convergence=True)
    with pytest.raises(ConvergenceError, match=r"set 1 and itself.*solver.tolerance=0.0001"):
        pairwise_distances(DATASETS, epsilon=0.05, solver=required)


TABLE = otdd.class_distances(DATASETS, "means")


@pytest.mark.parametrize(
    ("datasets", "options", "message"),
    [
        (DATASETS, {"epsilon": -1.0}, "epsilon must be finite and not negative, got -1"),
        (DATASETS, {"labels": "given"}, "labels=given needs a table"),
        (DATASETS, {"solver": Converged(tolerance=1e-12)}, "too tight for float32"),
        (DATASETS, {"solver": Converged(bound_width=0.1)}, "every term once, to solver.tolerance"),
        (DATASETS, {"solver": Converged(max_seconds=9.0)}, r"solver\.max_seconds .*dataset_distan"),
        (DATASETS, {"solver": GeomlossSchedule()}, r"geomloss are for dataset_distance"),
        (DATASETS, {"class_distances": TABLE.between(0, 1)}, r"Joint.* got ClassDistances"),
        (DATASETS[:2], {"class_distances": TABLE}, "about 3 datasets"),
        (DATASETS[:1], {}, "holds 1 datasets, and at least 2"),
        ([DATASETS[0], "usps"], {}, r"datasets\[1\] must be LabeledSamples, .*, got 'usps'"),
        ([DATASETS[0], LabeledSamples(torch.eye(3), None, ())], {}, "has no labels"),
    ],
)
def test_impossible_requests_are_refused(datasets, options, message):
    with pytest.raises(InputError, match=message):
        pairwise_distances(datasets, **options)
