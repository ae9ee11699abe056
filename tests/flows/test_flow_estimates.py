"""What a step saw of a part is an estimate; the start and the end are evaluated on the whole."""

import csv
import json

import pytest
import torch
from refusals import naming
from rich.console import Console
from small_flows import DOUBLE, blobs, flow, rough_flow

import otdd_flash as otdd
from otdd_flash.flows.stepping import Stepping
from otdd_flash.report.flow import flow_table, write_metrics_csv

SOURCE, TARGET = blobs(14), blobs(15, seed=1)
PARTS = {
    "minibatch": Stepping(0.3, noise=0.2, minibatch=5),
    "noise": Stepping(0.3, noise=0.5),
}


def assert_whole(record, samples=SOURCE):
    """A record is of all points, and holds the distance of these."""
    assert record.estimate is None
    assert record.estimated_on is None
    assert record.step_size == 0
    assert record.lower <= record.divergence <= record.upper
    asked = {"epsilon": 4.0, "compute": DOUBLE, "solver": otdd.Converged(1e-9)}
    found = otdd.dataset_distance(samples, TARGET, **asked)
    assert record.divergence == pytest.approx(found.value, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("stepping", PARTS.values(), ids=PARTS)
def test_steps_that_see_a_part_are_estimates_and_both_ends_are_whole(stepping):
    result = flow(SOURCE, TARGET, stepping=stepping, epsilon=4.0)
    for record in result.history[:-1]:
        assert record.estimated_on == (stepping.minibatch or 14)
        assert record.estimate is not None
        assert (record.objective, record.divergence, record.lower, record.upper) == (None,) * 4
    assert [record.step for record in result.history] == [0, 1, 2]
    assert_whole(result.before)
    assert_whole(result.after, result.samples)
    assert result.evaluations == (result.before, *result.history)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["attached", "joint", "augmented"])
def test_both_ends_of_every_mode_are_whole(mode):
    parts = flow(SOURCE, TARGET, steps=1, mode=mode, stepping=PARTS["minibatch"], epsilon=4.0)
    whole = flow(SOURCE, TARGET, steps=1, mode=mode, epsilon=4.0)
    assert parts.before.divergence == pytest.approx(whole.before.divergence, abs=1e-8)
    if mode == "attached":
        assert_whole(parts.after, parts.samples)


@pytest.mark.slow
def test_a_flow_that_ends_early_or_between_two_measurements_ends_with_the_whole_of_now():
    """Whatever `refresh` says of class distances."""
    for options in (
        {"tolerance": 0.9, "stepping": PARTS["noise"]},
        {"stop": lambda: True, "stepping": PARTS["minibatch"]},
        {"steps": 2, "refresh": 3},
    ):
        result = flow(SOURCE, TARGET, **{"steps": 30, "epsilon": 4.0, **options})
        with naming(options):
            assert len(result.history) < 30
            assert_whole(result.after, result.samples)
            table = otdd.class_distances([result.samples, TARGET]).between(0, 1)
            torch.testing.assert_close(result.class_distances.full, table.full)


@pytest.mark.slow
def test_a_minibatch_of_all_points_is_no_estimate():
    for mode in ("features", "augmented"):
        batch = rough_flow(SOURCE, TARGET, mode=mode, stepping=Stepping(0.3, minibatch=15))
        whole = rough_flow(SOURCE, TARGET, mode=mode)
        torch.testing.assert_close(
            batch.samples.features, whole.samples.features, rtol=0, atol=1e-6
        )
        assert all(record.estimate is None for record in batch.history), mode


@pytest.mark.slow
def test_estimates_are_called_so_in_every_file_and_table(tmp_path):
    result = rough_flow(SOURCE, TARGET, stepping=PARTS["minibatch"])
    summary = json.loads((result.save(tmp_path) / "result.json").read_text())
    for where, record in ((summary, result.after), (summary["start"], result.before)):
        assert where["value"] == record.divergence
        assert where["bounds"] == [record.lower, record.upper]
    for record, saved in zip(result.history, summary["history"], strict=True):
        for name in ("estimate", "estimated_on", "divergence"):
            assert saved[name] == getattr(record, name)
    assert otdd.FlowResult.load(tmp_path).evaluations == result.evaluations

    write_metrics_csv(result.evaluations, tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["step"] for row in rows] == ["0", "0", "1", "2"]
    assert [row["estimated_on"] for row in rows] == ["", "5", "5", ""]
    for name in ("divergence", "lower"):
        assert [bool(row[name]) for row in rows] == [True, False, False, True]
    frame = result.to_frame()
    assert frame.divergence.isna().tolist() == [False, True, True, False]
    assert frame.estimated_on.fillna(0).tolist() == [0, 5, 5, 0]

    assert "an estimate on 5 points" in result.history[0].described
    assert "estimate" not in result.after.described
    shown = Console(width=120, record=True, quiet=False)
    with shown.capture() as told:
        shown.print(flow_table(result.to_dict()))
    assert "5 points, moved by noise of 0.2: their distances are estimates on 5" in told.get()
