"""Studies of small tasks: every number is that of the function it belongs to, and comes back."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import pearsonr, spearmanr
from small_tasks import QUICK, small_study, small_task, small_tasks

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.report.study.console import study_table
from otdd_flash.report.study.writing import TABLES, write_study_report
from otdd_flash.study import bench as benches
from otdd_flash.study import pool
from otdd_flash.study.measures import MEASURES
from otdd_flash.study.measures.base import Reading
from otdd_flash.study.measures.frechet import frechet_distance
from otdd_flash.study.measures.otce import conditional_entropy
from otdd_flash.study.statistics.findings import Finding
from otdd_flash.study.task import as_tasks
from otdd_flash.study.transfer.networks import Network, build_body, build_head
from otdd_flash.study.transfer.training import train
from otdd_flash.study.transfer.units import TargetRun, TrainedSource, target_rows
from otdd_flash.study.units import work
from otdd_flash.study.units.store import Store


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> otdd.StudyResult:
    return small_study().run(tmp_path_factory.mktemp("study"))


def tables(result: otdd.StudyResult) -> list[tuple]:
    return [*result.pairs(), *result.transfers(), *result.correlations()]


def test_all_units_are_done_and_every_ordered_pair_has_its_rows(result) -> None:
    assert result.complete
    assert not result.failures
    assert len(result.pairs()) == 8 * 12
    assert len(result.transfers()) == 12
    assert {row.measure for row in result.pairs()} == {*otdd.Study(small_tasks()).measures}
    assert {row.statistic for row in result.correlations() if row.measure == "otdd"} == {
        *("spearman", "pearson", "spearman_over_sources", "regret", "random_regret"),
        *("largest_regret", "partial_spearman"),
    }


def test_the_table_has_a_row_an_ordered_pair_with_gains_and_measures(result) -> None:
    frame = result.to_frame()
    names = [(a, b) for a in result.names for b in result.names if a != b]
    assert list(zip(frame.source, frame.target, strict=True)) == names
    for row in result.transfers():
        (shown,) = frame[(frame.source == row.source) & (frame.target == row.target)].to_dict(
            "records"
        )
        assert (shown["alone"], shown["transferred"]) == (row.alone, row.transferred)
        assert shown["gain"] == row.gain or (row.gain is None and np.isnan(shown["gain"]))
    for row in result.pairs():
        (shown,) = frame[(frame.source == row.source) & (frame.target == row.target)].to_dict(
            "records"
        )
        assert shown[row.measure] == row.value
        assert shown[f"{row.measure}.converged"] is True
        for part in ("lower", "upper", "root", "sample_lower", "deviation"):
            number = getattr(row, part)
            assert shown.get(f"{row.measure}.{part}") == number
    assert {str(frame[name].dtype) for name in ("gain", "otdd", "otdd.lower")} == {"float64"}


def test_what_is_not_done_is_missing_in_the_table(result) -> None:
    readings = {"otdd": {(0, 1): Reading(math.inf, 1.0, math.inf)}}
    partly = replace(result, readings=readings, errors=np.full_like(result.errors, np.nan))
    frame = partly.to_frame()
    assert frame["otdd"].isna().all()
    assert frame["otdd.lower"].count() == 1
    assert frame["otdd.converged"].count() == 1
    assert frame["gain"].isna().all()
    content = partly.to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert (content["pairs"][0]["value"], content["pairs"][0]["upper"]) == (None, None)


def test_the_content_is_json(result) -> None:
    content = result.to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert [tuple(row.values()) for row in content["pairs"]] == [tuple(r) for r in result.pairs()]
    assert len(content["transfers"]) == len(result.transfers())
    assert content["settings"] == json.loads(json.dumps(result.setup.to_dict()))


NOISE = 4e-15 * np.random.default_rng(0).standard_normal((4, 4))
LEVELS = np.arange(16.0).reshape(4, 4) % 5
BY_TARGET = np.array([9.0, 4.0, 9.0, 9.0])


def measured(result: otdd.StudyResult, **values: Any) -> otdd.StudyResult:
    """The study as if its measures had been these (4, 4), or values with lower and upper bounds.

    The first of them chooses.
    """
    readings = {}
    for name, value in values.items():
        parts = value if isinstance(value, tuple) else (value,)
        readings[name] = {
            pair: Reading(*(float(part[pair]) for part in parts))
            for pair in result.setup.ordered_pairs()
        }
    settings = replace(result.setup.settings, measure=next(iter(values)))
    return replace(result, readings=readings, setup=replace(result.setup, settings=settings))


def correlations(result: otdd.StudyResult) -> dict[tuple[str, str], Finding]:
    return {(row.measure, row.statistic): row for row in result.correlations()}


@pytest.mark.parametrize(
    ("measure", "values", "why"),
    [
        ("h_score", 9 + NOISE, "the same for all pairs"),
        ("h_score", BY_TARGET + NOISE, "the same for all sources of a target"),
        ("otce", np.abs(NOISE), "the same for all pairs"),
        ("leep", NOISE, "the same for all pairs"),
        ("otdd", (2 + 1e-4 * LEVELS, 2 + 0 * LEVELS, 2.01 + 0 * LEVELS), "the same for all pairs"),
    ],
)
def test_a_measure_that_chooses_no_source_has_no_correlation(
    result, tmp_path, measure, values, why
) -> None:
    flat = measured(result, knn=LEVELS, **{measure: values})
    found = correlations(flat)
    for name in (measure, f"knn - {measure}"):
        for statistic in ("spearman", "pearson", "spearman_over_sources"):
            row = found[name, statistic]
            assert (row.value, row.lower, row.upper, row.p) == (None,) * 4
            assert why in row.note
    assert found[measure, "partial_spearman"].value is None
    assert found["knn", "spearman"].value is not None
    # It costs what a choice at random costs.
    assert found[measure, "regret"].value == found[measure, "random_regret"].value
    write_study_report(flat, tmp_path, content="table")
    (line,) = (
        line
        for line in (tmp_path / "correlations.csv").read_text("utf-8").splitlines()
        if line.startswith(f"{measure},spearman,")
    )
    assert line.startswith(f"{measure},spearman,,,,,4,12,")
    assert why in line
    page = (tmp_path / "report.html").read_text("utf-8")
    assert f"{measure} has no correlation with the gain; the measure is {why}" in page
    assert f"{measure} chooses no source, and is left out of pictures and tables" in page
    title = MEASURES[measure].title
    assert page.count(f"<span>{title}</span>") == 0
    # As the measure that was fixed it stays in the table, where it chooses at random.
    fixed = replace(
        flat, setup=replace(flat.setup, settings=replace(flat.setup.settings, measure=measure))
    )
    for row in fixed.choices():
        assert len(row.chosen) == row.sources == 3
        assert row.regret == pytest.approx(row.random_regret)
    write_study_report(fixed, tmp_path, content="table")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("<span>any: the same for all sources</span>") == 4
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(study_table(fixed))
    assert len(re.findall(r"│ any +│", console.export_text())) == 4


def test_ties_up_to_rounding_have_one_rank(result) -> None:
    gains = result.gains[~np.eye(4, dtype=bool)]
    values = LEVELS[~np.eye(4, dtype=bool)]
    found = correlations(measured(result, knn=LEVELS + NOISE, otdd=10 - LEVELS + NOISE))
    expected = spearmanr(values, gains).statistic
    # One orientation: a distance that falls where a score rises says the same.
    for measure in ("knn", "otdd"):
        assert found[measure, "spearman"].value == pytest.approx(expected, abs=1e-12)
        assert found[measure, "pearson"].value == pytest.approx(
            pearsonr(values, gains).statistic, abs=1e-9
        )
    assert found["knn", "regret"].value == pytest.approx(found["otdd", "regret"].value, abs=1e-12)
    assert found["knn - otdd", "spearman"].value == pytest.approx(0, abs=1e-12)


def test_degenerate_numbers_say_why_there_is_no_correlation(result) -> None:
    holes = np.where(LEVELS == 1, np.nan, LEVELS)
    some = measured(result, knn=holes)
    assert "knn has no number for 3 of 12 pairs" in some.notes()
    assert sum(row.value is None for row in some.pairs()) == 3
    assert correlations(some)["knn", "spearman"].pairs == 9
    nothing = correlations(measured(result, knn=np.full((4, 4), np.nan)))["knn", "spearman"]
    assert nothing.value is None
    assert nothing.note == "not defined: 0 pairs, and 3 are needed"
    # A third fewer errors for everyone, of whatever number: ratios that are equal in exact numbers.
    alone = np.array([[30.0, 33.0], [60.0, 9.0], [12.0, 15.0], [99.0, 3.0]])
    errors = np.repeat(alone[None] / 3 * 2, 4, 0)
    same = replace(measured(result, knn=LEVELS), alone=alone, errors=errors)
    row = correlations(same)["knn", "spearman"]
    assert row.value is None
    assert row.note == "not defined: the gains of all pairs are the same"


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "settings",
    [
        {"labels": "none"},
        {"epsilon_relative": 0.05, "labels": otdd.labels.Gaussian(diagonal=True)},
        {"labels": "sinkhorn", "cost": otdd.GroundCost(1.0, 0.2, "cosine")},
        {},
    ],
    ids=str,
)
def test_distances_are_those_of_dataset_distance_to_the_last_bit(tmp_path, settings) -> None:
    if settings.get("labels") == "sinkhorn":
        settings = {**settings, "labels": otdd.labels.Sinkhorn(epsilon=0.5)}
    compute = otdd.ComputeOptions("cpu", memory_budget=10**8)
    study = small_study(measures=["otdd", "otce"], transfer=None, compute=compute, **settings)
    result = study.run(tmp_path, threads=torch.get_num_threads())
    tasks = [task.train for task in result.setup.tasks]
    cost = settings.get("cost", otdd.GroundCost())
    epsilon = otdd.pairwise_distances(
        tasks,
        epsilon_relative=settings.get("epsilon_relative"),
        labels=settings.get("labels", "gaussian"),
        lambda_x=cost.lambda_x,
        lambda_y=cost.lambda_y,
        ground=cost.ground,
        compute=compute,
    ).epsilon
    rows = {(row.measure, row.source, row.target): row for row in result.pairs()}
    for one, other in combinations(tasks, 2):
        found = otdd.dataset_distance(
            one,
            other,
            epsilon=epsilon,
            labels=settings.get("labels", "gaussian"),
            lambda_x=cost.lambda_x,
            lambda_y=cost.lambda_y,
            ground=cost.ground,
            compute=compute,
        )
        for names in ((one.name, other.name), (other.name, one.name)):
            row = rows["otdd", *names]
            assert (row.value, row.lower, row.upper) == (found.value, *found.bounds)
        coupling = found.class_coupling()
        there = rows["otce", one.name, other.name].value
        assert there == conditional_entropy(coupling)
        assert rows["otce", other.name, one.name].value == conditional_entropy(coupling.T)


def test_sliced_and_frechet_are_those_of_their_functions(result) -> None:
    tasks = [task.train for task in result.setup.tasks]
    sliced = otdd.sliced_distances(tasks, projections=60, device="cpu")
    rows = {(row.measure, row.source, row.target): row for row in result.pairs()}
    for i, j in combinations(range(4), 2):
        row = rows["sliced", tasks[j].name, tasks[i].name]
        assert row.value == float(sliced.values[i, j])
        assert row.root == pytest.approx(float(sliced.roots[i, j]))
        assert rows["frechet", tasks[i].name, tasks[j].name].value == frechet_distance(
            tasks[i], tasks[j]
        )


def test_gains_are_of_mean_errors_over_seeds(result) -> None:
    for row in result.transfers():
        assert row.transferred == pytest.approx(100 * np.mean(row.errors) / row.test_rows)
        expected = 100 * (row.alone - row.transferred) / row.alone
        assert row.gain == pytest.approx(expected)
    assert np.isnan(np.diag(result.gains)).all()


@pytest.mark.slow
def test_a_second_run_is_the_same_to_the_last_bit(result, tmp_path) -> None:
    # Repr: NaN is no equal of itself.
    assert repr(tables(small_study().run(tmp_path))) == repr(tables(result))


def test_on_resumption_no_finished_unit_is_computed_again(tmp_path, monkeypatch) -> None:
    counted: list[str] = []
    compute = work.compute

    def counting(unit, *arguments):
        counted.append(unit.digest)
        return compute(unit, *arguments)

    for module in (work, benches):
        monkeypatch.setattr(module, "compute", counting)
    part = small_study().run(tmp_path, stop=lambda: len(counted) == 40)
    assert not part.complete
    assert part.done == 40
    assert "40 of" in part.notes()[-1]
    whole = small_study().run(tmp_path, resume=True)
    assert whole.complete
    assert len(counted) == len({*counted}) == whole.total
    small_study().run(tmp_path, resume=True, workers=3)
    assert len(counted) == whole.total


@pytest.mark.slow
def test_a_part_of_a_study_can_be_read(tmp_path) -> None:
    part = small_study().run(tmp_path, stop=lambda: len(list(tmp_path.glob("units/*"))) > 30)
    assert 0 < len(part.pairs()) < 96
    assert isinstance(part.correlations(), tuple)


def test_targets_see_the_rows_of_their_seed_and_the_baseline_the_same(result) -> None:
    setup = result.setup
    for seed in range(2):
        rows = target_rows(setup, 1, seed)
        assert len(rows) == QUICK.target_samples
        assert int(rows.class_counts.min()) >= 1
    first, second = (target_rows(setup, 1, seed).features for seed in range(2))
    assert not torch.equal(first, second)
    one, other = (TrainedSource(setup, place, 0)._body(4) for place in (0, 1))
    alone = TargetRun(setup, None, 2, 0)._body(4)
    for weights in zip(one.parameters(), other.parameters(), alone.parameters(), strict=True):
        assert torch.equal(weights[0], weights[1])
        assert torch.equal(weights[0], weights[2])


def test_a_frozen_body_stays_and_a_free_one_moves() -> None:
    samples = small_task(0)[0]
    for frozen in (True, False):
        body = build_body(QUICK, samples.dim, seed=0)
        before = [weight.clone() for weight in body.parameters()]
        network = Network(body, build_head(body, samples.dim, 3, seed=0))
        head = network.head.weight.clone()
        steps = train(
            network,
            samples.features,
            samples.labels,
            QUICK,
            epochs=1,
            min_steps=7,
            seed=0,
            frozen_body=frozen,
        )
        assert steps == 7
        assert not torch.equal(head, network.head.weight)
        moved = [not torch.equal(*both) for both in zip(before, body.parameters(), strict=True)]
        assert moved == [not frozen] * len(moved)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 5, 4), (1, 16, 16)])
def test_images_get_a_network_of_lenets_size(shape) -> None:
    transfer = otdd.Transfer(image_shape=shape)
    dim = int(np.prod(shape))
    body = build_body(transfer, dim, 0)
    assert build_head(body, dim, 7, 0).in_features == 84
    count = sum(weight.numel() for weight in body.parameters())
    assert count < 70_000
    if shape == (1, 28, 28):
        # LeNet-5's 61,706 weights, less its last layer's 850.
        assert count == 60_856


@pytest.mark.slow
def test_workers_end_between_units_when_asked_to(tmp_path) -> None:
    part = small_study().run(tmp_path, workers=2, threads=1, stop=lambda: True)
    assert not part.complete
    assert not list((tmp_path / "units").glob(".stop*"))
    assert small_study().run(tmp_path, resume=True).complete


def test_a_network_by_its_path_is_the_same_as_the_function() -> None:
    by_path = otdd.Transfer(network=f"{__name__}:own_network").to_dict()
    assert by_path == otdd.Transfer(network=own_network).to_dict()
    with pytest.raises(InputError, match=r"transfer\.network=math:no"):
        small_study(transfer=otdd.Transfer(network="math:no")).run("nowhere")
    with pytest.raises(InputError, match=r"transfer\.network must return a torch module, got int"):
        build_body(otdd.Transfer(network=lambda dim, shape: 3), 4, 0)
    with pytest.raises(InputError, match="one row per input"):
        build_head(torch.nn.Flatten(0), 4, 2, 0)


def test_a_network_of_ones_own(tmp_path) -> None:
    transfer = otdd.Transfer(
        seeds=1, target_samples=6, source_epochs=1, min_target_steps=2, network=own_network
    )
    result = small_study(measures=["knn"], transfer=transfer).run(tmp_path)
    assert result.complete
    assert "own_network" in result.setup.to_dict()["transfer"]["network"]


def own_network(dim: int, shape: object) -> torch.nn.Module:
    return torch.nn.Linear(dim, 5)


@pytest.mark.slow
def test_transfer_between_like_tasks_gains(tmp_path) -> None:
    tasks = {f"{k}": small_task(k, rows=300, d=30) for k in range(4)}
    transfer = otdd.Transfer(seeds=2, target_samples=12, min_target_steps=50)
    result = otdd.Study(tasks, measures=["knn"], transfer=transfer).run(tmp_path)
    gains = [row.gain for row in result.transfers()]
    assert min(gains) > 0


@pytest.mark.slow
def test_baselines_with_few_errors_give_no_gain_and_are_named(tmp_path) -> None:
    tasks = small_tasks()
    clear = small_task(9, rows=40)
    tasks["clear"] = tuple(
        otdd.LabeledSamples(
            20 * part.labels[:, None] + 0.01 * part.features, part.labels, tuple("abc")
        )
        for part in clear
    )
    transfer = otdd.Transfer(seeds=1, min_target_steps=300, source_epochs=1)
    result = otdd.Study(tasks, measures=["knn"], transfer=transfer, projections=10).run(tmp_path)
    rows = [row for row in result.transfers() if row.target == "clear"]
    assert [row.gain for row in rows] == [None] * 4
    assert any("clear alone is learnt with" in note for note in result.notes())


@pytest.mark.slow
def test_tasks_that_share_rows_are_a_family_and_have_no_transfer(tmp_path) -> None:
    train, test = small_task(0, rows=60)
    tasks = {
        "whole": (train, test),
        "one": (train.keep_classes([0, 1]), test.keep_classes([0, 1])),
        "two": (train.keep_classes([1, 2]), test.keep_classes([1, 2])),
        **small_tasks(2),
        "other": small_task(5),
    }
    result = otdd.Study(tasks, measures=["otdd", "knn"], transfer=QUICK).run(tmp_path)
    setup = result.setup
    # The second and third share the class in the middle.
    assert [task.family for task in setup.tasks[:3]] == ["whole"] * 3
    assert len({task.family for task in setup.tasks}) == 1 + 3 - 1
    assert len(setup.shared) >= 3
    pairs = {(row.source, row.target) for row in result.transfers()}
    assert ("whole", "one") not in pairs
    assert ("one", "two") not in pairs
    assert ("whole", "other") in pairs
    assert any("whole and one share" in note for note in result.notes())
    # Distances are there for all pairs, in statistics only those without rows in common.
    assert len([row for row in result.pairs() if row.measure == "otdd"]) == 30
    assert result.table("otdd").count == len(pairs)


@pytest.mark.slow
def test_sampling_gives_intervals_of_every_distance(tmp_path) -> None:
    tasks = {f"{k}": small_task(k, rows=40)[0] for k in range(2)}
    measures = ["otdd", "frechet", "otce"]
    settings = {"subsample": 39, "noise_floor": True, "compute": "cpu"}
    result = otdd.Study(tasks, measures, None, **settings).run(tmp_path, threads=1)
    assert len(result.pairs()) == 6
    for row in result.pairs():
        assert row.sample_lower < row.sample_upper, row.measure
    rows = {(row.source, row.target): row for row in result.pairs() if row.measure == "otdd"}
    assert rows["0", "1"].floor_source == rows["1", "0"].floor_target
    one, other = (task.train for task in result.setup.tasks)
    same = {"epsilon": result.epsilon}
    whole = otdd.dataset_distance(one, other, **same)
    expected = otdd.subsample_interval(one, other, whole.value, count=39, **same)
    assert rows["0", "1"].sample_lower == pytest.approx(expected.lower)
    floor = otdd.noise_floor(one, other, **same)
    assert rows["0", "1"].floor_source == pytest.approx(floor.source.value)


@pytest.mark.slow
def test_sampling_gives_intervals_of_scores(tmp_path) -> None:
    quick = otdd.Transfer(seeds=2, target_samples=24, source_epochs=1, min_target_steps=1)
    study = small_study(measures=["knn", "h_score"], transfer=quick, subsample=39)
    deviations: dict[str, list[float]] = {}
    for row in study.run(tmp_path, threads=1).pairs():
        assert row.sample_lower <= row.sample_upper, row.measure
        deviations.setdefault(row.measure, []).append(row.deviation)
    # A score of features that tell all classes apart is the same in every draw.
    assert min(max(found) for found in deviations.values()) > 0


def test_a_study_by_the_default_of_earlier_versions_goes_on_when_that_is_given(tmp_path) -> None:
    settings = {"measures": ["frechet"], "transfer": None}
    small_study(**settings, epsilon=0.1).run(tmp_path)
    with pytest.raises(InputError, match=r"epsilon, .* 0\.1 was the default of earlier versions"):
        small_study(**settings).run(tmp_path, resume=True)
    assert small_study(**settings, epsilon=0.1).run(tmp_path, resume=True).complete


def test_a_folder_is_a_studys_own(tmp_path) -> None:
    study = small_study(measures=["frechet"], transfer=None)
    study.run(tmp_path / "a")
    with pytest.raises(InputError, match=r"holds a study already; give study\.resume=true"):
        study.run(tmp_path / "a")
    other = small_study(measures=["frechet"], transfer=None, seed=1, epsilon=0.2)
    with pytest.raises(InputError, match="other settings: epsilon, epsilon_relative, seed differ"):
        other.run(tmp_path / "a", resume=True)
    content = json.loads((tmp_path / "a" / "study.json").read_text())
    del content["fingerprint_version"]
    (tmp_path / "a" / "study.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="holds a study of another version of otdd_flash"):
        study.run(tmp_path / "a", resume=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"is not a study: it holds thesis\.tex"):
        study.run(tmp_path / "b", resume=True)


@pytest.mark.slow
def test_what_is_auto_is_kept(tmp_path) -> None:
    study = small_study(measures=["frechet"], transfer=None, compute=None)
    study.run(tmp_path, workers=1, threads=None)
    kept = json.loads((tmp_path / "study.json").read_text())
    assert "auto" not in json.dumps({key: kept[key] for key in ("compute", "threads")})
    for key, value in (("threads", 7), ("compute", {**kept["compute"], "memory_budget": 12345})):
        kept[key] = value
    (tmp_path / "study.json").write_text(json.dumps(kept))
    # Another number of workers is no other study.
    again = small_study(measures=["frechet"], transfer=None, compute=None)
    result = again.run(tmp_path, resume=True, workers=2)
    assert result.setup.settings.threads == 7
    assert result.setup.settings.compute.memory_budget == 12345


@pytest.mark.slow
def test_a_damaged_unit_is_computed_again_and_the_study_is_the_same(tmp_path, result) -> None:
    small_study().run(tmp_path)
    for path in sorted((tmp_path / "units").glob("*.safetensors"))[::7]:
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.warns(DataNotice, match="is damaged"):
        again = small_study().run(tmp_path, resume=True)
    assert repr(tables(again)) == repr(tables(result))


@pytest.mark.slow
def test_a_unit_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch) -> None:
    def fails(self, bench):
        raise InputError("out of luck")

    monkeypatch.setattr("otdd_flash.study.transfer.units.TrainedSource.compute", fails)
    result = small_study().run(tmp_path)
    assert not result.complete
    assert len(result.failures) == 8
    assert {row.measure for row in result.pairs()} == {"otdd", "sliced", "frechet", "otce"}
    assert result.transfers() == ()
    assert any("out of luck" in note for note in result.notes())
    monkeypatch.undo()
    assert small_study().run(tmp_path, resume=True).complete


CASES = [
    ({}, {}, "compares at least 2 tasks and correlates from 4, got 0"),
    ({"a": small_task(0)}, {}, "got 1: add tasks"),
    (small_tasks(3), {}, "got 3: add tasks or set transfer=null"),
    ({**small_tasks(), "wide": small_task(7, d=9)}, {}, "has 4 features and wide has 9"),
    ({**small_tasks(), "x": small_task(7)[0].features}, {}, "task x has no labels"),
    ({**small_tasks(), "x": small_task(7)[0]}, {}, r"task x has no test rows .*test_fraction"),
    ({**small_tasks(), "x": 3}, {}, "task x must be LabeledSamples"),
    (small_tasks(), {"transfer": otdd.Transfer(target_samples=2)}, "between the 3 classes and"),
    (small_tasks(), {"transfer": otdd.Transfer(target_samples=31)}, "and the 30 training rows"),
    (small_tasks(), {"transfer": None, "measures": ["leep", "knn"]}, "leep, knn need trained"),
    (small_tasks(), {"measures": ["otd"]}, "unknown measure 'otd'; choose one of: otdd,"),
    (small_tasks(), {"measures": []}, "measures must name at least one"),
    (small_tasks(), {"solver": otdd.GeomlossSchedule()}, "solves every term once"),
    (small_tasks(), {"subsample": 3}, "at level 0.95 needs at least 39"),
    (small_tasks(), {"families": {"no": "f"}}, "families names 'no', which is no task"),
    ({**small_tasks(), "copy": small_tasks()["task 0"]}, {}, "have the same training rows"),
    (
        small_tasks(),
        {"transfer": otdd.Transfer(image_shape=(1, 3, 3))},
        "has 9 values, but the tasks have 4 features",
    ),
]


@pytest.mark.parametrize(("tasks", "settings", "message"), CASES)
def test_bad_input_ends_in_a_sentence(tmp_path, tasks, settings, message) -> None:
    given = {"transfer": QUICK, "projections": 4, **settings}
    if "transfer" in settings or "wide" in tasks or len(tasks) < 4:
        given = {"measures": ["frechet"], **given}
    with pytest.raises(InputError, match=message):
        otdd.Study(tasks, **given).run(tmp_path)
    assert not list(tmp_path.glob("units/*"))


def test_an_unknown_protocol_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"unknown transfer\.protocol 'all'; .*finetune, head"):
        otdd.Transfer(protocol="all")


KILLED = """
import sys
sys.path[:0] = {paths!r}
from small_tasks import small_study
small_study().run("run", resume=True, workers=int(sys.argv[1]))
"""
KILLS = 10


@pytest.mark.slow
def test_killed_at_ten_random_moments_a_study_ends_as_if_it_were_not(tmp_path, result) -> None:
    program = KILLED.format(paths=[str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    store, generator = tmp_path / "run" / "units", random.Random(0)
    finished: dict[Path, int] = {}
    for kill in range(KILLS):
        # The last one leaves workers behind, which hold their units until they end as well.
        command = [sys.executable, "-c", program, "2" if kill == KILLS - 1 else "1"]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment)
        # The first units take seconds to come, as torch is imported.
        while len(list(store.glob("*.safetensors"))) == len(finished):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(generator.random() * 0.05)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for path in store.glob("*.safetensors"):
            finished.setdefault(path, path.stat().st_mtime_ns)
    again = small_study().run(tmp_path / "run", resume=True)
    assert again.complete
    assert again.total > len(finished) >= KILLS
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    for folder, one in (("run", again), ("undisturbed", result)):
        write_study_report(one, tmp_path / folder, content="none")
    for name in TABLES:
        found, expected = ((tmp_path / folder / name) for folder in ("run", "undisturbed"))
        assert found.read_bytes() == expected.read_bytes()


ENDLESS = """
import sys
sys.path[:0] = {paths!r}
import otdd_flash as otdd
from small_tasks import small_study
endless = otdd.Transfer(seeds=2, target_samples=6, source_epochs=10**7)
small_study(measures=["knn"], transfer=endless).run("run", workers=2, threads=1)
"""


def children(parent: int) -> set[int]:
    """The processes, of this system's table, that a process began and that have not ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of a program may hold spaces and brackets.
            state, began = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(began) == parent and state != "Z":
            found.add(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no table of processes")
def test_workers_end_within_a_unit_when_their_parent_is_killed(tmp_path) -> None:
    program = ENDLESS.format(paths=[str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 120
    # Scores ask for sources, which both workers begin to train.
    while len(list((tmp_path / "run" / "units").glob(".*.lock"))) < 2:
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.1)
    workers = children(parent.pid)
    assert len(workers) >= 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while (left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_and_what_is_finished_stays(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pool, "_worker", killed_worker)
    with pytest.raises(InputError, match=r"a worker process was killed .* study\.resume=true"):
        small_study(measures=["frechet"], transfer=None).run(tmp_path, workers=2, threads=1)
    monkeypatch.undo()
    again = small_study(measures=["frechet"], transfer=None).run(tmp_path, resume=True)
    assert again.complete


def killed_worker(*arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_workers_and_shards_do_the_same_work(tmp_path, result) -> None:
    again = small_study().run(tmp_path / "a", workers=2, threads=result.setup.settings.threads)
    assert repr(tables(again)) == repr(tables(result))
    assert Store(tmp_path / "a").folder.exists()


def test_test_rows_that_were_trained_on_are_said() -> None:
    tasks = small_tasks()
    train, _ = tasks["task 0"]
    tasks["task 0"] = train, train.take(torch.arange(12))
    said = "task 0: 12 of 12 different test rows are training rows as well"
    with pytest.warns(DataNotice, match=said):
        as_tasks(tasks, min_class_size=None, families=None, transfer=True)
