"""Studies of small tasks: every number is that of the function it belongs to, and comes back."""

import json
import math
import os
import pickle
import random
import signal
import time
import warnings
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import naming
from small_tasks import QUICK, small_study, small_task, small_tasks
from spying import calls_of

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.report.study.writing import TABLES, write_study_report
from otdd_flash.study import study as running
from otdd_flash.study.measures import MEASURES, distances
from otdd_flash.study.measures.base import Reading
from otdd_flash.study.measures.distances import conditional_entropy, frechet_distance
from otdd_flash.study.setup import Setup, as_tasks
from otdd_flash.study.training import (
    Network,
    Purpose,
    build_body,
    build_head,
    initial_network,
    target_rows,
    train,
)

DISTANCES = {"measures": ["frechet"], "transfer": None}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return small_study().run(tmp_path_factory.mktemp("study"), threads=1)


def tables(result):
    # Repr: NaN is no equal of itself.
    return repr([*result.pairs(), *result.transfers(), *result.correlations()])


@pytest.mark.slow
def test_all_units_are_done_and_every_ordered_pair_has_its_rows(result):
    assert result.complete
    assert not result.failures
    assert len(result.pairs()) == 8 * 12
    assert len(result.transfers()) == 12
    assert {row.measure for row in result.pairs()} == {*otdd.Study(small_tasks()).measures}
    assert {row.statistic for row in result.correlations() if row.measure == "otdd"} == {
        *("spearman", "pearson", "spearman_over_sources", "regret", "random_regret"),
        *("largest_regret", "partial_spearman"),
    }
    for row in result.transfers():
        assert row.transferred == pytest.approx(100 * np.mean(row.errors) / row.test_rows)
        assert row.gain == pytest.approx(100 * (row.alone - row.transferred) / row.alone)
    assert np.isnan(np.diag(result.gains)).all()
    content = result.to_dict()
    assert [tuple(row.values()) for row in content["pairs"]] == [tuple(r) for r in result.pairs()]
    assert len(content["transfers"]) == len(result.transfers())
    assert content["settings"] == json.loads(json.dumps(result.setup.to_dict()))
    # Sliced distances and those of Fréchet are those of their functions.
    tasks = [task.train for task in result.setup.tasks]
    sliced = otdd.sliced_distances(tasks, projections=60, device="cpu")
    rows = {(row.measure, row.source, row.target): row for row in result.pairs()}
    for i, j in combinations(range(4), 2):
        row = rows["sliced", tasks[j].name, tasks[i].name]
        assert row.value == float(sliced.values[i, j])
        assert row.root == pytest.approx(float(sliced.roots[i, j]))
        frechet = rows["frechet", tasks[i].name, tasks[j].name]
        assert frechet.value == frechet_distance(tasks[i], tasks[j])


@pytest.mark.slow
def test_the_table_has_a_row_an_ordered_pair_with_gains_and_measures(result):
    frame = result.to_frame()
    names = [(a, b) for a in result.names for b in result.names if a != b]
    assert list(zip(frame.source, frame.target, strict=True)) == names
    shown = {(row["source"], row["target"]): row for row in frame.to_dict("records")}
    for row in result.transfers():
        there = shown[row.source, row.target]
        assert (there["alone"], there["transferred"]) == (row.alone, row.transferred)
        assert there["gain"] == row.gain or (row.gain is None and np.isnan(there["gain"]))
    for row in result.pairs():
        there = shown[row.source, row.target]
        assert there[row.measure] == row.value
        assert there[f"{row.measure}.converged"] is True
        for part in ("lower", "upper", "root", "sample_lower", "deviation"):
            assert there.get(f"{row.measure}.{part}") == getattr(row, part)
    # What is not done is missing.
    readings = {"otdd": {(0, 1): Reading(math.inf, 1.0, math.inf)}}
    partly = replace(result, readings=readings, errors=np.full_like(result.errors, np.nan))
    frame = partly.to_frame()
    assert frame["otdd"].isna().all()
    assert frame["otdd.lower"].count() == frame["otdd.converged"].count() == 1
    assert frame["gain"].isna().all()
    content = partly.to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert (content["pairs"][0]["value"], content["pairs"][0]["upper"]) == (None, None)


NOISE = 4e-15 * np.random.default_rng(0).standard_normal((4, 4))
LEVELS = np.arange(16.0).reshape(4, 4) % 5
BY_TARGET = np.array([9.0, 4.0, 9.0, 9.0])


def with_settings(result, **changes):
    settings = replace(result.setup.settings, **changes)
    return replace(result, setup=replace(result.setup, settings=settings))


def measured(result, **values):
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
    return replace(with_settings(result, measure=next(iter(values))), readings=readings)


def correlations(result):
    return {(row.measure, row.statistic): row for row in result.correlations()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measure", "values", "why"),
    [
        ("h_score", BY_TARGET + NOISE, "the same for all sources of a target"),
        ("otdd", (2 + 1e-4 * LEVELS, 2 + 0 * LEVELS, 2.01 + 0 * LEVELS), "the same for all pairs"),
    ],
)
def test_a_measure_that_chooses_no_source_has_no_correlation(
    result, tmp_path, measure, values, why
):
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
    page = (tmp_path / "report.html").read_text("utf-8")
    assert f"{measure} has no correlation with the gain; the measure is {why}" in page
    assert f"{measure} chooses no source, and is left out of pictures and tables" in page
    assert page.count(f"<span>{MEASURES[measure].title}</span>") == 0
    # As the measure that was fixed it stays in the table, where it chooses at random.
    fixed = with_settings(flat, measure=measure)
    for row in fixed.choices():
        assert len(row.chosen) == row.sources == 3
        assert row.regret == pytest.approx(row.random_regret)
    write_study_report(fixed, tmp_path, content="table")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("<span>any: the same for all sources</span>") == 4


@pytest.mark.slow
def test_ties_up_to_rounding_have_one_rank(result):
    from scipy.stats import pearsonr, spearmanr

    off = ~np.eye(4, dtype=bool)
    gains, values = result.gains[off], LEVELS[off]
    found = correlations(measured(result, knn=LEVELS + NOISE, otdd=10 - LEVELS + NOISE))
    # One orientation: a distance that falls where a score rises says the same.
    for measure in ("knn", "otdd"):
        for name, formula in (("spearman", spearmanr), ("pearson", pearsonr)):
            expected = pytest.approx(formula(values, gains).statistic, abs=1e-9)
            assert found[measure, name].value == expected, (measure, name)
    assert found["knn", "regret"].value == pytest.approx(found["otdd", "regret"].value, abs=1e-12)
    assert found["knn - otdd", "spearman"].value == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
def test_degenerate_numbers_say_why_there_is_no_correlation_or_gain(result):
    some = measured(result, knn=np.where(LEVELS == 1, np.nan, LEVELS))
    assert "knn has no number for 3 of 12 pairs" in some.notes()
    assert sum(row.value is None for row in some.pairs()) == 3
    assert correlations(some)["knn", "spearman"].pairs == 9
    nothing = correlations(measured(result, knn=np.full((4, 4), np.nan)))["knn", "spearman"]
    assert (nothing.value, nothing.note) == (None, "not defined: 0 pairs, and 3 are needed")
    # A third fewer errors for everyone, of whatever number: ratios that are equal in exact numbers.
    alone = np.array([[30.0, 33.0], [60.0, 9.0], [12.0, 15.0], [99.0, 3.0]])
    errors = np.repeat(alone[None] / 3 * 2, 4, 0)
    same = replace(measured(result, knn=LEVELS), alone=alone, errors=errors)
    row = correlations(same)["knn", "spearman"]
    assert (row.value, row.note) == (None, "not defined: the gains of all pairs are the same")
    # A baseline of fewer than 5 errors leaves nothing to gain that could be told from chance.
    alone[2] = 4.0, 5.0
    few = replace(result, alone=alone)
    assert [row.gain for row in few.transfers() if row.target == "task 2"] == [None] * 3
    assert all(row.gain is not None for row in few.transfers() if row.target != "task 2")
    assert any("task 2 alone is learnt with 4.5 errors" in note for note in few.notes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (2, {"epsilon_relative": 0.05, "labels": otdd.labels.Gaussian(diagonal=True)}),
        (
            2,
            {
                "labels": otdd.labels.Sinkhorn(epsilon=2.0),
                "cost": otdd.GroundCost(1.0, 0.2, "cosine"),
            },
        ),
        (3, {}),
        (2, {"unbalanced_relative": 0.3}),
        (2, {"epsilon_relative": 0.05, "unbalanced": 2.0, "noise_floor": True}),
        (2, {"epsilon_relative": 0.05, "unbalanced_relative": 0.5, "subsample": 39}),
    ],
    ids=str,
)
def test_distances_are_those_of_dataset_distance(tmp_path, count, settings):
    compute = otdd.ComputeOptions("cpu", memory_budget=10**8)
    measures = ["otdd", "otce"]
    study = small_study(count, measures=measures, transfer=None, compute=compute, **settings)
    result = study.run(tmp_path, threads=torch.get_num_threads())
    tasks = [task.train for task in result.setup.tasks]
    cost = settings.get("cost", otdd.GroundCost())
    same = {"lambda_x": cost.lambda_x, "lambda_y": cost.lambda_y, "ground": cost.ground}
    same |= {"compute": compute, "labels": settings.get("labels", "gaussian")}
    relative = settings.get("epsilon_relative")
    pairwise = otdd.pairwise_distances(tasks, epsilon_relative=relative, **same)
    epsilon, mean_cost = pairwise.epsilon, pairwise.mean_cost
    if any(key.startswith("unbalanced") for key in settings):
        rho = settings.get("unbalanced", 0) + settings.get("unbalanced_relative", 0) * mean_cost
        same["unbalanced"] = rho
        assert "unbalanced" in result.epsilon_text()
    rows = {(row.measure, row.source, row.target): row for row in result.pairs()}
    for one, other in combinations(tasks, 2):
        found = otdd.dataset_distance(one, other, epsilon=epsilon, **same)
        for names in ((one.name, other.name), (other.name, one.name)):
            row = rows["otdd", *names]
            # Terms that are solved side by side round apart from those that are solved alone.
            numbers = found.value, *found.bounds
            assert (row.value, row.lower, row.upper) == pytest.approx(numbers, rel=1e-6, abs=1e-6)
        if "noise_floor" in settings:
            floors = otdd.noise_floor(one, other, epsilon=epsilon, **same)
            assert rows["otdd", one.name, other.name].floor_source == floors.source.value
        if "subsample" in settings:
            drawn = otdd.subsample_interval(
                one, other, found.value, count=39, epsilon=epsilon, **same
            )
            row = rows["otdd", one.name, other.name]
            ends = row.sample_lower, row.sample_upper
            assert ends == pytest.approx((drawn.lower, drawn.upper), rel=1e-6)
        coupling = found.class_coupling()
        for names, matrix in (
            ((one.name, other.name), coupling),
            ((other.name, one.name), coupling.T),
        ):
            entropy = conditional_entropy(matrix)
            assert rows["otce", *names].value == pytest.approx(entropy, rel=1e-4)


@pytest.mark.slow
def test_targets_see_the_rows_of_their_seed_and_start_from_the_same_weights(result):
    drawn = [target_rows(result.setup, 1, seed) for seed in range(2)]
    for rows in drawn:
        assert len(rows) == QUICK.target_samples
        assert int(rows.class_counts.min()) >= 1
    assert not torch.equal(drawn[0].features, drawn[1].features)
    heads = Purpose.SOURCE_HEAD, Purpose.SOURCE_HEAD, Purpose.TARGET_HEAD
    trained = [task.train for task in result.setup.tasks]
    networks = [
        initial_network(result.setup, 0, rows, head)
        for rows, head in zip(trained, heads, strict=False)
    ]
    bodies = [network.body for network in networks]
    for weights in zip(*(body.parameters() for body in bodies), strict=True):
        assert torch.equal(weights[0], weights[1])
        assert torch.equal(weights[0], weights[2])


def test_a_frozen_body_stays_a_free_one_moves_and_images_get_one_of_lenets_size():
    samples = small_task(0)[0]
    for frozen in (True, False):
        body = build_body(QUICK, samples.dim, seed=0)
        before = [weight.clone() for weight in body.parameters()]
        network = Network(body, build_head(body, samples.dim, 3, seed=0))
        head = network.head.weight.clone()
        more = {"epochs": 1, "min_steps": 7, "seed": 0, "frozen_body": frozen}
        assert train(network, samples, QUICK, **more) == 7
        assert not torch.equal(head, network.head.weight)
        moved = [not torch.equal(*both) for both in zip(before, body.parameters(), strict=True)]
        assert moved == [not frozen] * len(moved)
    for shape in ((1, 8, 8), (1, 28, 28), (3, 5, 4), (1, 16, 16)):
        dim = math.prod(shape)
        body = build_body(otdd.Transfer(image_shape=shape), dim, 0)
        assert build_head(body, dim, 7, 0).in_features == 84
        count = sum(weight.numel() for weight in body.parameters())
        # LeNet-5's 61,706 weights, less its last layer's 850.
        assert count == 60_856 if shape == (1, 28, 28) else count < 70_000, shape


def own_network(dim, shape):
    return torch.nn.Linear(dim, 5)


def linear_to(width):
    return lambda dim, shape: torch.nn.Linear(dim, width)


@pytest.mark.slow
def test_a_network_of_ones_own(tmp_path):
    runs = {"seeds": 1, "target_samples": 6, "source_epochs": 1, "min_target_steps": 2}
    transfer = otdd.Transfer(**runs, network=own_network)
    result = small_study(measures=["knn"], transfer=transfer).run(tmp_path, threads=1)
    assert result.complete
    assert "own_network" in result.setup.to_dict()["transfer"]["network"]
    # By its path it is the same.
    by_path = otdd.Transfer(**runs, network=f"{__name__}:own_network").to_dict()
    assert by_path == transfer.to_dict()
    # Functions of one name and code differ by what they hold.
    held = [otdd.Transfer(network=linear_to(width)).to_dict()["network"] for width in (3, 4, 4)]
    assert held[0] != held[1] == held[2]
    bad, none = otdd.Transfer(network="math:no"), otdd.Transfer(network=lambda dim, shape: 3)
    for message, call in (
        (r"transfer\.network=math:no", lambda: small_study(transfer=bad).run("nowhere")),
        ("network must return a torch module, got int", lambda: build_body(none, 4, 0)),
        ("one row per input", lambda: build_head(torch.nn.Flatten(0), 4, 2, 0)),
        (r"unknown transfer\.protocol 'all'; .*finetune", lambda: otdd.Transfer(protocol="all")),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.slow
def test_tasks_that_share_rows_are_a_family_and_have_no_transfer(tmp_path):
    train, test = small_task(0, rows=60)
    tasks = {
        "whole": (train, test),
        "one": (train.keep_classes([0, 1]), test.keep_classes([0, 1])),
        "two": (train.keep_classes([1, 2]), test.keep_classes([1, 2])),
        **small_tasks(2),
        "other": small_task(5),
    }
    quick = replace(QUICK, seeds=1, source_epochs=1)
    result = otdd.Study(tasks, measures=["frechet"], transfer=quick).run(tmp_path, threads=1)
    setup = result.setup
    # The second and third share the class in the middle.
    assert [task.family for task in setup.tasks[:3]] == ["whole"] * 3
    assert len({task.family for task in setup.tasks}) == 1 + 3 - 1
    assert len(setup.shared) >= 3
    pairs = {(row.source, row.target) for row in result.transfers()}
    assert not pairs & {("whole", "one"), ("one", "two")}
    assert ("whole", "other") in pairs
    assert any("whole and one share" in note for note in result.notes())
    # Distances are there for all pairs, in statistics only those without rows in common.
    assert len(result.pairs()) == 30
    assert result.table("frechet").count == len(pairs)


@pytest.mark.slow
def test_sampling_gives_intervals_of_every_measure(tmp_path):
    # Of scores as well.
    quick = otdd.Transfer(seeds=2, target_samples=24, source_epochs=1, min_target_steps=1)
    scored = small_study(measures=["knn"], transfer=quick, subsample=39).run(tmp_path / "scores")
    assert all(row.sample_lower <= row.sample_upper for row in scored.pairs())
    assert max(row.deviation for row in scored.pairs()) > 0
    tasks = {f"{k}": small_task(k, rows=24)[0] for k in range(2)}
    measures = ["otdd", "frechet", "otce"]
    settings = {"subsample": 39, "noise_floor": True, "compute": "cpu", "labels": "means"}
    study = otdd.Study(tasks, measures, None, epsilon=1.0, **settings)
    with warnings.catch_warnings():
        # Two rows of each class in a subsample: no notice of that for every pair.
        warnings.simplefilter("error", DataNotice)
        result = study.run(tmp_path / "distances", threads=1)
    assert not result.failures
    assert len(result.pairs()) == 6
    for row in result.pairs():
        assert row.sample_lower < row.value < row.sample_upper, row.measure
    rows = {(row.source, row.target): row for row in result.pairs() if row.measure == "otdd"}
    assert rows["0", "1"].floor_source == rows["1", "0"].floor_target
    one, other = (task.train for task in result.setup.tasks)
    same = {"epsilon": result.epsilon, "labels": "means"}
    expected = otdd.subsample_interval(one, other, rows["0", "1"].value, count=39, **same)
    assert rows["0", "1"].sample_lower == pytest.approx(expected.lower)
    floor = otdd.noise_floor(one, other, **same)
    assert rows["0", "1"].floor_source == pytest.approx(floor.source.value)


def test_a_folder_is_a_studys_own(tmp_path):
    study = small_study(**DISTANCES)
    study.run(tmp_path / "a")
    file = tmp_path / "a" / "study.json"
    content = json.loads(file.read_text())
    del content["fingerprint_version"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    other = small_study(**DISTANCES, seed=1, epsilon=0.2)
    differ = "other settings: epsilon, epsilon_relative, seed differ"
    for one, folder, resume, message in (
        (study, "a", False, r"holds a study already; give study\.resume=true"),
        (other, "a", True, differ),
        (study, "b", True, r"is not a study: it holds thesis\.tex"),
        (study, "a", True, "holds a study of another version of otdd_flash"),
    ):
        if "version" in message:
            file.write_text(json.dumps(content))
        with pytest.raises(InputError, match=message):
            one.run(tmp_path / folder, resume=resume)
    # By the default of earlier versions a study goes on when that is given.
    earlier = small_study(**DISTANCES, epsilon=0.1)
    earlier.run(tmp_path / "c")
    with pytest.raises(InputError, match=r"epsilon, .* 0\.1 was the default of earlier versions"):
        study.run(tmp_path / "c", resume=True)
    assert earlier.run(tmp_path / "c", resume=True).complete


def test_every_unit_is_made_once(monkeypatch, tmp_path):
    study = small_study(6, measures=["otdd", "otce"], transfer=None)
    tasks, metric = study._compared(study._tasks())
    setup = Setup(tasks, study._settings({}, metric, 1, 1))
    made = calls_of(monkeypatch, distances, "Unit")
    units = running.study_units(setup)
    # Class distances and terms of 15 pairs and 6 tasks, and the mean cost.
    assert len(units) == len(made) == 2 * (15 + 6) + 1
    running.gather(setup, running.Store(tmp_path, 1), units, seconds=0.0)
    assert running.study_units(setup) == units
    assert len(made) == len(units)
    # Another process makes its own.
    sent = pickle.loads(pickle.dumps(setup))
    assert [unit.digest for unit in running.study_units(sent)] == [unit.digest for unit in units]
    assert len(made) == 2 * len(units)


@pytest.mark.slow
def test_what_is_auto_is_kept(tmp_path):
    study = small_study(**DISTANCES, compute=None)
    study.run(tmp_path, workers=1, threads=None)
    kept = json.loads((tmp_path / "study.json").read_text())
    assert "auto" not in json.dumps({key: kept[key] for key in ("compute", "threads")})
    for key, value in (("threads", 7), ("compute", {**kept["compute"], "memory_budget": 12345})):
        kept[key] = value
    (tmp_path / "study.json").write_text(json.dumps(kept))
    # Another number of workers is no other study.
    settings = study.run(tmp_path, resume=True, workers=2).setup.settings
    assert (settings.threads, settings.compute.memory_budget) == (7, 12345)


SOME = small_tasks()
CASES = [
    ({}, {}, "compares at least 2 tasks and correlates from 4, got 0"),
    ({"a": small_task(0)}, {}, "got 1: add tasks"),
    (small_tasks(3), {}, "got 3: add tasks or set transfer=null"),
    ({**SOME, "wide": small_task(7, d=9)}, {}, "has 4 features and wide has 9"),
    ({**SOME, "x": small_task(7)[0].features}, {}, "task x has no labels"),
    ({**SOME, "x": small_task(7)[0]}, {}, r"task x has no test rows .*test_fraction"),
    ({**SOME, "x": 3}, {}, "task x must be LabeledSamples"),
    (SOME, {"transfer": otdd.Transfer(target_samples=2)}, "between the 3 classes and"),
    (SOME, {"transfer": otdd.Transfer(target_samples=31)}, "and the 30 training rows"),
    (SOME, {"transfer": None, "measures": ["leep", "knn"]}, "leep, knn need trained"),
    (SOME, {"measures": ["otd"]}, "unknown measure 'otd'; choose one of: otdd,"),
    (SOME, {"measures": []}, "measures must name at least one"),
    (SOME, {"solver": otdd.GeomlossSchedule()}, "solves every term once"),
    (SOME, {"unbalanced": 1.0, "unbalanced_relative": 1.0}, "got both, unbalanced=1 and unb"),
    (SOME, {"unbalanced": 1.0, "epsilon": 0}, r"epsilon=0.* exact marginals; leave out unbal"),
    (SOME, {"unbalanced": [1.0, 2.0]}, "unbalanced must be a number, got list"),
    (SOME, {"unbalanced": 1.0, "cost": otdd.GroundCost(ground="inner")}, "ground=inner"),
    (
        SOME,
        {"unbalanced_relative": 0.5, "measures": ["sliced", "frechet", "knn"]},
        r"unbalanced_relative=0.5 is for measures of plans, and sliced, frechet, knn read none",
    ),
    (SOME, {"subsample": 3}, "at level 0.95 needs at least 39"),
    (SOME, {"families": {"no": "f"}}, "families names 'no', which is no task"),
    ({**SOME, "copy": SOME["task 0"]}, {}, "have the same training rows"),
    (SOME, {"transfer": otdd.Transfer(image_shape=(1, 3, 3))}, "has 9 values, but the tasks have"),
]


def test_bad_input_ends_in_a_sentence(tmp_path):
    for tasks, settings, message in CASES:
        given = {"transfer": QUICK, "projections": 4, **settings}
        if "transfer" in settings or "wide" in tasks or len(tasks) < 4:
            given = {"measures": ["frechet"], **given}
        with naming(message), pytest.raises(InputError, match=message):
            otdd.Study(tasks, **given).run(tmp_path)
    assert not list(tmp_path.glob("units/*"))
    # Test rows that were trained on are said.
    train, _ = SOME["task 0"]
    tasks = {**SOME, "task 0": (train, train.take(torch.arange(12)))}
    said = "task 0: 12 of 12 different test rows are training rows as well"
    with pytest.warns(DataNotice, match=said):
        as_tasks(tasks, min_class_size=None, families=None, transfer=True)


@pytest.mark.parametrize(("given", "transfer"), [(SOME, True), (None, False)])
def test_test_rows_that_do_no_harm_are_not_said(given, transfer):
    """Where none was trained on, and where no errors are counted."""
    train, _ = SOME["task 0"]
    tasks = given or {**SOME, "task 0": (train, train)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataNotice)
        as_tasks(tasks, min_class_size=None, families=None, transfer=transfer)


KILLS = 3


def study_in(folder, workers):
    small_study().run(folder, resume=True, threads=1, workers=workers)


@pytest.mark.slow
def test_killed_at_random_moments_a_study_ends_as_if_it_were_not(tmp_path, result, begin):
    store, generator = tmp_path / "run" / "units", random.Random(0)
    finished = {}
    for kill in range(KILLS):
        # The last one leaves workers behind, which hold their units until they end as well.
        process = begin(study_in, tmp_path / "run", 2 if kill == KILLS - 1 else 1)
        while len(list(store.glob("*.safetensors"))) == len(finished):
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(generator.random() * 0.05)
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
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


def children(parent):
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


def endless_study_in(folder):
    endless = otdd.Transfer(seeds=2, target_samples=6, source_epochs=10**7)
    small_study(measures=["knn"], transfer=endless).run(folder, workers=2, threads=1)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no table of processes")
def test_workers_end_within_a_unit_when_their_parent_is_killed(tmp_path, begin):
    parent = begin(endless_study_in, tmp_path / "run")
    deadline = time.monotonic() + 170
    # Scores ask for sources, which both workers begin to train.
    while len(list((tmp_path / "run" / "units").glob(".*.lock"))) < 2:
        assert time.monotonic() < deadline
        assert parent.is_alive()
        time.sleep(0.1)
    workers = children(parent.pid)
    assert len(workers) >= 2
    parent.kill()
    parent.join(60)
    deadline = time.monotonic() + 60
    while (left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.slow
def test_workers_do_the_same_work_and_end_between_units(tmp_path, result):
    study = small_study()
    part = study.run(tmp_path, workers=2, threads=1, stop=lambda: True)
    assert not part.complete
    assert not list((tmp_path / "units").glob(".stop*"))
    again = study.run(tmp_path, resume=True, workers=2)
    assert tables(again) == tables(result)


def killed_worker(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_and_what_is_finished_stays(tmp_path, monkeypatch):
    study = small_study(**DISTANCES)
    with monkeypatch.context() as patch:
        patch.setattr(running, "_worker", killed_worker)
        with pytest.raises(InputError, match=r"worker process was killed .* study\.resume=true"):
            study.run(tmp_path, workers=2, threads=1)
    assert study.run(tmp_path, resume=True).complete
