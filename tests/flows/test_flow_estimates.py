"""What a step saw of a part is an estimate; the start and the end are evaluated on the whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_flows import DOUBLE, blobs, digits, flow, rough_flow

import otdd_flash as otdd
from otdd_flash.flows.history import StepRecord
from otdd_flash.flows.modes.feature_driven import FeaturesMode
from otdd_flash.flows.stepping import Stepping
from otdd_flash.report.flow.console import flow_table
from otdd_flash.report.flow.metrics import write_metrics_csv

SOURCE, TARGET = blobs(14), blobs(15, seed=1)
PARTS: dict[str, Stepping] = {
    "minibatch": Stepping(0.3, minibatch=5),
    "noise": Stepping(0.3, noise=0.5),
    "both": Stepping(0.3, noise=0.2, minibatch=5),
}
every_part = pytest.mark.parametrize("stepping", PARTS.values(), ids=PARTS)


def assert_whole(record: StepRecord) -> None:
    assert record.estimate is None
    assert record.estimated_on is None
    assert record.divergence is not None
    assert record.lower <= record.divergence <= record.upper


def assert_estimate(record: StepRecord, points: int) -> None:
    assert record.estimated_on == points
    assert record.estimate is not None
    assert (record.objective, record.divergence, record.lower, record.upper) == (None,) * 4


@pytest.mark.slow
def test_flows_with_minibatches_or_noise_report_the_distances_that_there_are() -> None:
    source, target = digits("train", 60), digits("test", 60, rotate=30)
    before = otdd.dataset_distance(source, target, epsilon=0.1, compute=DOUBLE)
    for stepping in (Stepping(0.1, minibatch=20), Stepping(0.1, noise=0.1)):
        result = flow(
            source, target, steps=3, epsilon=0.1, stepping=stepping, solver=otdd.Converged()
        )
        after = otdd.dataset_distance(result.samples, target, epsilon=0.1, compute=DOUBLE)
        for record, distance in ((result.before, before), (result.after, after)):
            assert_whole(record)
            # Two intervals that hold one number.
            assert record.lower <= distance.bounds[1]
            assert distance.bounds[0] <= record.upper
            assert record.divergence == pytest.approx(distance.value, abs=1e-3)
        # A part of the points is farther away than all of them are.
        assert all(step.estimate > before.bounds[1] for step in result.history[:1])


@pytest.mark.slow(after=1)
@every_part
def test_steps_that_see_a_part_are_estimates_on_so_many_points(stepping: Stepping) -> None:
    result = rough_flow(SOURCE, TARGET, steps=3, stepping=stepping)
    for record in result.history[:-1]:
        assert_estimate(record, stepping.minibatch or 14)
    assert [record.step for record in result.history] == [0, 1, 2, 3]
    assert result.after is result.history[-1]
    for record in (result.before, result.after):
        assert_whole(record)
        assert record.step_size == 0
    assert result.evaluations == (result.before, *result.history)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "stepping"),
    [
        ("attached", PARTS["both"]),
        ("features", PARTS["noise"]),
        ("joint", PARTS["minibatch"]),
        ("augmented", PARTS["minibatch"]),
    ],
    ids=["attached", "features", "joint", "augmented"],
)
def test_the_start_and_the_end_of_every_mode_are_those_of_a_flow_that_sees_all(
    mode: str, stepping: Stepping
) -> None:
    parts = flow(SOURCE, TARGET, steps=1, mode=mode, stepping=stepping, epsilon=4.0)
    whole = flow(SOURCE, TARGET, steps=1, mode=mode, epsilon=4.0)
    assert parts.before.divergence == pytest.approx(whole.before.divergence, abs=1e-8)
    if mode in ("features", "attached"):
        end = otdd.dataset_distance(
            parts.samples, TARGET, epsilon=4.0, compute=DOUBLE, solver=otdd.Converged(1e-9)
        )
        assert parts.after.divergence == pytest.approx(end.value, abs=1e-8)


@pytest.mark.slow
def test_the_end_is_that_of_the_returned_particles_between_two_measurements_too() -> None:
    """Class distances of the last evaluation are those of now, whatever `refresh` says."""
    result = flow(SOURCE, TARGET, steps=2, refresh=3, epsilon=4.0)
    end = otdd.dataset_distance(
        result.samples, TARGET, epsilon=4.0, compute=DOUBLE, solver=otdd.Converged(1e-9)
    )
    assert result.after.divergence == pytest.approx(end.value, abs=1e-8)
    table = otdd.class_distances([result.samples, TARGET]).between(0, 1)
    torch.testing.assert_close(result.class_distances.full, table.full)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tolerance": 0.9}, {"stop": lambda: True}], ids=list)
def test_a_flow_that_ends_early_ends_with_the_whole(options: dict[str, Any]) -> None:
    result = flow(SOURCE, TARGET, steps=30, stepping=PARTS["both"], **options)
    assert result.stopped_by in ("tolerance", "interrupted")
    assert_whole(result.after)
    end = otdd.dataset_distance(
        result.samples, TARGET, epsilon=1.0, compute=DOUBLE, solver=otdd.Converged(1e-9)
    )
    assert result.after.divergence == pytest.approx(end.value, abs=1e-8)


@pytest.mark.slow
def test_a_minibatch_of_all_points_is_no_estimate() -> None:
    result = rough_flow(SOURCE, TARGET, stepping=Stepping(0.3, minibatch=15))
    assert result.samples.fingerprint == rough_flow(SOURCE, TARGET).samples.fingerprint
    for record in result.history:
        assert_whole(record)


@pytest.mark.slow
def test_the_gradient_norm_of_a_batch_is_that_of_its_particles() -> None:
    source, target, part = blobs(30), blobs(33, seed=1), Stepping(0.3, minibatch=8)
    whole = rough_flow(source, target, steps=1, epsilon=1.0).history[0].gradient_norm
    batches = [
        rough_flow(source, target, steps=1, epsilon=1.0, stepping=part, seed=seed)
        for seed in range(8)
    ]
    mean = sum(result.history[0].gradient_norm for result in batches) / 8
    assert mean == pytest.approx(whole, rel=0.25)


@pytest.mark.slow
def test_estimates_are_called_so_in_every_file(tmp_path: Path) -> None:
    result = rough_flow(SOURCE, TARGET, steps=2, stepping=PARTS["minibatch"])
    result.save(tmp_path)
    summary = json.loads((tmp_path / "result.json").read_text())
    assert summary["value"] == result.after.divergence
    assert summary["bounds"] == [result.after.lower, result.after.upper]
    assert summary["start"]["value"] == result.before.divergence
    assert summary["start"]["bounds"] == [result.before.lower, result.before.upper]
    assert summary["objective"]["start"] == result.before.objective
    for record, saved in zip(result.history, summary["history"], strict=True):
        assert (saved["estimate"], saved["estimated_on"]) == (record.estimate, record.estimated_on)
        assert saved["divergence"] == record.divergence
    loaded = otdd.FlowResult.load(tmp_path)
    assert loaded.before == result.before
    assert loaded.evaluations == result.evaluations

    write_metrics_csv(result.evaluations, tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["step"] for row in rows] == ["0", "0", "1", "2"]
    assert [row["estimated_on"] for row in rows] == ["", "5", "5", ""]
    assert [bool(row["divergence"]) for row in rows] == [True, False, False, True]
    assert [bool(row["lower"]) for row in rows] == [True, False, False, True]


@pytest.mark.slow
def test_the_table_says_on_how_many_points_steps_estimated() -> None:
    shown = Console(width=120, record=True, quiet=False)
    result = rough_flow(SOURCE, TARGET, stepping=PARTS["both"])
    with shown.capture() as told:
        shown.print(flow_table(result.to_dict()))
    assert "5 points, moved by noise of 0.2: their distances are estimates on 5" in told.get()
    assert "an estimate on 5 points" in result.history[0].described
    assert "estimate" not in result.after.described
    with shown.capture() as told:
        shown.print(flow_table(rough_flow(SOURCE, TARGET, steps=1).to_dict()))
    assert "estimate" not in told.get()


@pytest.mark.slow
def test_steps_that_see_all_measure_no_class_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, measured = FeaturesMode.measure, []
    monkeypatch.setattr(
        FeaturesMode, "measure", lambda *given: measured.append(1) or measure(*given)
    )
    rough_flow(SOURCE, TARGET, steps=5)
    assert len(measured) == 5
